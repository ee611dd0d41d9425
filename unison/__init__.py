"""Many GPUs, one result: sharded, private and second-order training in PyTorch.

This module holds the public names and nothing else. Importing it needs torch and numpy only.
"""

from unison.errors import BadInput, Diverged, UnisonError, UnsupportedOperation

__version__ = "0.1.0"

__all__ = ["BadInput", "Diverged", "UnisonError", "UnsupportedOperation", "__version__"]
