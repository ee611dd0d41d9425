"""Names of dtypes, as JSON holds them."""

import torch

from unison.errors import BadInput


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype.

    >>> dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name.

    Raises:
        BadInput: If this torch knows no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BadInput(f"expected the name of a torch dtype, found {name!r}")
    return dtype
