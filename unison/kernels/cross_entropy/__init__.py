"""Cross-entropy of a linear map's outputs, which never exist for a whole batch.

`linear_cross_entropy` is what users call. It is made of chunks (`head`), and these of two
operations on rows of logits (`rows`): Triton on CUDA, plain torch elsewhere.
"""

from unison.kernels.cross_entropy.autocast import plain_arithmetic
from unison.kernels.cross_entropy.chunks import Chunk
from unison.kernels.cross_entropy.head import Head
from unison.kernels.cross_entropy.linear import (
    IGNORE_INDEX,
    linear_cross_entropy,
    make_head,
    reduced,
    sample_means,
    token_losses,
)
from unison.kernels.cross_entropy.rows import gradient_, statistics, using_backend

__all__ = [
    "IGNORE_INDEX",
    "Chunk",
    "Head",
    "gradient_",
    "linear_cross_entropy",
    "make_head",
    "plain_arithmetic",
    "reduced",
    "sample_means",
    "statistics",
    "token_losses",
    "using_backend",
]
