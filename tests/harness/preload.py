"""What the fork server of ranks imports, once for all of them.

Every rank would import these for itself otherwise, at seconds each: the first optimizer step alone
pulls in torch._dynamo. (With it comes triton: set TRITON_INTERPRET before the first pool starts,
not inside a test.) No tests, whose asserts the ranks rewrite.
"""

import atexit
import contextlib
import gc
import importlib

gc.disable()  # imports make no garbage

for _name in (
    "torch.distributed.fsdp",
    "torch._dynamo",
    "torch._inductor",
    "torch.testing",
    "numba.core.registry",
    "pytest",
    "hypothesis",
    "transformers.modeling_utils",
    "dp_accounting",
    "unison.train",
    "unison.cli",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)

# What numba imports and registers before it loads its first kernel from the cache.
with contextlib.suppress(ImportError):
    from numba.core.registry import cpu_target

    cpu_target.typing_context.refresh()
    cpu_target.target_context.refresh()

# Trainings of ranks end without their picture, as those of the tests' own process do.
with contextlib.suppress(ImportError):
    from unison.train import loop

    loop.plot_losses = lambda records, path, **_: path.touch()

# Collections in ranks pass over what is there by now, half a million objects. At its own end the
# server frees them, or libraries complain of leaks.
gc.freeze()
gc.enable()
atexit.register(gc.unfreeze)
