"""Sample inputs for every operation that unison registers with `torch.library`.

`tests/test_operations.py` runs `torch.library.opcheck` on each of them. An operation is named as it
was registered (`"unison::fill_normal"`); each sample is the tuple of its arguments, and a dict in
the last place holds keyword arguments. Give odd sizes, an empty tensor, and inputs that require a
gradient where the operation is differentiable. Samples are copied before use, so an operation that
writes into its arguments does no harm.
"""

from typing import Any

SAMPLES: dict[str, list[tuple[Any, ...]]] = {}
