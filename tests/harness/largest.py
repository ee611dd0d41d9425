"""The largest tensor that a piece of code makes."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Largest(TorchDispatchMode):
    """Watches a `with` block.

    Attributes:
        numel: The most elements of any storage that an operation returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_iter(result):
            if isinstance(each, Tensor):
                size = each.untyped_storage().nbytes() // each.element_size()
                self.numel = max(self.numel, size)
        return result
