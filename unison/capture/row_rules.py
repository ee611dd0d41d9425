"""The sample of each row of an output, for each of torch's functions below autograd.

[Note: the sample of every row] Where rows are selected, sorted or masked by values, no count tells
which sample a row belongs to. So a second tensor goes along with each tensor that depends on the
batch: for every element the number of its sample, kept as one number for all elements along a
dimension where it does not change ([batch, 1, 1] beside [batch, tokens, features]). It begins at
the module's inputs. What moves elements about (views, indexing, sorting, packing) is done to the
numbers too, by the same function with the same indices. What computes with elements keeps a
number where all that went in agree; a sum over samples, or what has no rule here, gives `MIXED`,
and an operation with a parameter refuses that. What is made without the batch is `NOBODY`'s.

Gradients decide whose a row is, and integers have none: where a float and an integer meet, the
float's sample counts. To choose a row by its number does not make it the chooser's.

The trace runs below autograd, where torch has a few hundred functions with one name each, and only
for models that need it: those that move rows by values, or read values to decide what to do
(learn.py). Numbers belong to memory: all views of it see what is written to it in place.

A rule takes what finds the rows of an input, the function's arguments by name and its output, and
returns the samples' numbers in the (first) output, or one for each output, or None where nobody
can tell.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from unison.ops.records import NOBODY

MIXED = -2


@dataclass(frozen=True, eq=False, slots=True)
class RowSamples:
    """The sample that each element of a tensor belongs to.

    Attributes:
        ids: The sample of each element, int64: as many dimensions as the tensor, each as long, or 1
            where the sample does not change along it. `NOBODY` and `MIXED` are no samples.
        is_by_value: Whether values have decided where the rows lie.
        is_random: Whether it is nobody's, and drawn at random.
        lost_by: The function that has made it `MIXED`.
    """

    ids: Tensor
    is_by_value: bool = False
    is_random: bool = False
    lost_by: str | None = None


def lost(tensor: Tensor, by: str, ndim: int | None = None) -> RowSamples:
    """Return `MIXED` for all of a tensor, or of a view of it with so many dimensions."""
    shape = (1,) * (tensor.ndim if ndim is None else ndim)
    return RowSamples(torch.full(shape, MIXED, device=tensor.device), lost_by=by)


def compressed(ids: Tensor) -> Tensor:
    """Return ids with each dimension along which they do not change reduced to size 1."""
    for dim, size in enumerate(ids.shape):
        if size > 1:
            first = ids.narrow(dim, 0, 1)
            if bool((ids == first).all()):
                ids = first
    return ids.clone()


def combined(left: Tensor, right: Tensor) -> Tensor:
    """Broadcast two tensors of ids; `MIXED` where they disagree."""
    right = right.to(left.device)  # a number on the CPU may meet tensors elsewhere
    if left is right or (left.shape == right.shape and torch.equal(left, right)):
        return left
    agreed = torch.where((right == NOBODY) | (left == right), left, MIXED)
    return torch.where(left == NOBODY, right, agreed)


def filled(ids: Tensor, others: Tensor) -> Tensor:
    """Replace `NOBODY` by other ids."""
    if ids.numel() and bool((ids == NOBODY).any()):
        return torch.where(ids == NOBODY, others.to(ids.device), ids)
    return ids


def reduced(ids: Tensor, dims: Sequence[int], *, keepdim: bool) -> Tensor:
    """Reduce ids along some dimensions; `MIXED` where they disagree."""
    dims = sorted({dim % max(ids.ndim, 1) for dim in dims}, reverse=True)
    if ids.ndim == 0:
        return ids
    wide = [dim for dim in dims if ids.shape[dim] != 1]
    if wide and 0 in (ids.shape[dim] for dim in wide):
        sizes = [1 if dim in wide else size for dim, size in enumerate(ids.shape)]
        ids = torch.full(sizes, NOBODY, device=ids.device)
    elif wide:
        none = torch.iinfo(torch.int64).max
        low = torch.where(ids == NOBODY, none, ids).amin(wide, keepdim=True)
        high = ids.amax(wide, keepdim=True)
        ids = torch.where(low == none, NOBODY, torch.where(low == high, high, MIXED))
    if not keepdim:
        for dim in dims:
            ids = ids.squeeze(dim)
    return ids


def grown(ids: Tensor, ndim: int) -> Tensor:
    """Prepend dimensions of size 1, as broadcasting does."""
    return ids.reshape((1,) * (ndim - ids.ndim) + ids.shape)


def is_mixed(rows: RowSamples) -> bool:
    """Whether samples are mixed in some element, or nobody can tell whose it is."""
    with _disable_current_modes():
        return bool((rows.ids == MIXED).any())


# --- rules ----------------------------------------------------------------------------------------

Arguments = dict[str, Any]
Found = Tensor | RowSamples | None
Find = Callable[[Tensor], RowSamples | None]
"""The samples of a tensor; None if it is the same in every pass, without batch or draws."""
RowRule = Callable[[Find, Arguments, Any], Found | Sequence[Found]]

RULES: dict[str, RowRule] = {}
_Rule = TypeVar("_Rule", bound=RowRule)


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def register(function: _Rule) -> _Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = function
        return function

    return register


def _ids(find: Find, value: Any) -> Tensor | None:
    rows = find(value) if isinstance(value, Tensor) else None
    return None if rows is None or rows.is_random else rows.ids


def _all_ids(find: Find, value: Tensor) -> Tensor:
    ids = _ids(find, value)
    return torch.full((1,) * value.ndim, NOBODY, device=value.device) if ids is None else ids


def _with_others(find: Find, ids: Tensor, a: Arguments, *names: str) -> Tensor:
    """Combine ids with those of arguments that reach all elements, such as a norm's weights."""
    for name in names:
        own = _ids(find, a[name]) if isinstance(a.get(name), Tensor) else None
        if own is not None:
            ids = combined(ids, grown(reduced(own, range(own.ndim), keepdim=False), ids.ndim))
    return ids


@_rule(
    *("_to_copy", "floor_divide", "native_dropout", "dropout", "tril", "triu", "isin"),
    *("bucketize", "detach", "alias", "lift_fresh", "lift_fresh_copy", "contiguous", "clone"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
    *("bernoulli", "uniform", "normal", "exponential", "fill", "zero", "masked_fill", "where"),
    *("_conj", "conj", "resolve_conj", "resolve_neg", "_neg_view", "nan_to_num", "to", "view_as"),
    *("_fused_dropout", "randint_like", "rrelu_with_noise", "polygamma", "poisson"),
    *("log_sigmoid_forward", "hardswish", "_prelu_kernel", "polar", "complex"),
    *("fake_quantize_per_tensor_affine_cachemask",),
)
def pointwise(find: Find, a: Arguments, out: Any) -> Found:
    """Elementwise functions: ids of all inputs are combined, floats first (see the note)."""
    first = out if isinstance(out, Tensor) else out[0]
    floats, others = None, None
    for value in tree_leaves(a):
        ids = _ids(find, value)
        if ids is None or value.ndim > first.ndim:
            continue
        ids = grown(ids, first.ndim)
        if value.is_floating_point() or value.is_complex():
            floats = ids if floats is None else combined(floats, ids)
        else:
            others = ids if others is None else combined(others, ids)
    if floats is None or others is None:
        return others if floats is None else floats
    return filled(floats, others)


@_rule("index_fill")
def unless_chosen(find: Find, a: Arguments, out: Any) -> Found:
    """A number in the place of some rows: whoever it is of, it stands in all of them."""
    if _ids(find, a["index"]) is not None:
        return None
    return _with_others(find, _all_ids(find, a["self"]), a, "value")


@_rule("searchsorted")
def found_in_table(find: Find, a: Arguments, out: Tensor) -> Found:
    """Places of elements in a table, which is nobody's."""
    return None if _ids(find, a["sorted_sequence"]) is not None else _all_ids(find, a["self"])


@_rule("copy")
def copied(find: Find, a: Arguments, out: Tensor) -> Found:
    """`x.copy_(y)`: what is written over is gone."""
    ids = grown(_all_ids(find, a["src"]).to(out.device), out.ndim)
    return filled(ids, _all_ids(find, a["self"]))


@_rule(
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "dist"),
)
def loss(find: Find, a: Arguments, out: Tensor) -> Found:
    """Losses, element by element or of all of them."""
    ids = pointwise(find, a, a["self"])
    if out.ndim == a["self"].ndim or ids is None:
        return ids
    assert isinstance(ids, Tensor)
    return reduced(ids, range(ids.ndim), keepdim=False)


@_rule("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss")
def class_loss(find: Find, a: Arguments, out: Any) -> Found:
    """Losses of classes [batch, classes, ...], sample by sample or of all of them."""
    first = out if isinstance(out, Tensor) else out[0]
    ids = reduced(_all_ids(find, a["self"]), [min(1, a["self"].ndim - 1)], keepdim=False)
    ids = filled(ids, grown(_all_ids(find, a["target"]), ids.ndim))
    ids = _with_others(find, ids, a, "weight")
    return ids if first.ndim == ids.ndim else reduced(ids, range(ids.ndim), keepdim=False)


@_rule(
    *("sum", "mean", "amax", "amin", "max", "min", "any", "all", "prod", "var", "std", "nansum"),
    *("var_mean", "std_mean", "norm", "linalg_vector_norm", "logsumexp", "argmax", "argmin"),
    *("count_nonzero", "median", "mode", "kthvalue", "aminmax", "nanmedian"),
)
def reduction(find: Find, a: Arguments, out: Any) -> Found:
    """Reductions such as sums."""
    if isinstance(a.get("other"), Tensor):  # max and min of two
        return pointwise(find, a, out)
    return _over_dims(find, a["self"], a.get("dim"), keepdim=bool(a.get("keepdim")))


@_rule(
    *("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin"),
    *("_cummax_helper", "_cummin_helper", "logcumsumexp", "glu", "renorm", "softmax"),
    *("log_softmax",),
)
def along_dims(find: Find, a: Arguments, out: Any) -> Found:
    """Functions along a dimension such as softmax, where each output depends on all of it."""
    return _over_dims(find, a["self"], a.get("dim"))


@_rule("native_layer_norm", "_fused_rms_norm", "rms_norm", "layer_norm")
def last_dims(find: Find, a: Arguments, out: Any) -> Found:
    """Norms over the last dimensions."""
    ids = _over_dims(find, a["input"], range(-len(a["normalized_shape"]), 0))
    return _with_others(find, ids, a, "weight", "bias")


@_rule(
    *("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
    *("_native_batch_norm_legit_no_training", "cudnn_batch_norm", "miopen_batch_norm"),
)
def batch_norm(find: Find, a: Arguments, out: Sequence[Tensor]) -> list[Found]:
    """Each channel over all rows, or by itself where statistics are fixed."""
    x = a["input"]
    others = [dim for dim in range(x.ndim) if dim != 1]
    is_fixed = not a.get("training", False)
    ids = _all_ids(find, x) if is_fixed else _over_dims(find, x, others)
    ids = _with_others(find, ids, a, "weight", "bias", "running_mean", "running_var")
    return [ids, *(None for _ in out[1:])]


@_rule("multinomial")
def drawn_classes(find: Find, a: Arguments, out: Tensor) -> Found:
    """Numbers of classes, drawn with the last dimension's probabilities."""
    return _over_dims(find, a["self"], -1)


@_rule("histc", "bincount", "trace")
def of_all(find: Find, a: Arguments, out: Tensor) -> Found:
    """What all elements of a tensor decide, and their weights if they have any."""
    own = [_all_ids(find, x) for x in (a["self"], a.get("weights")) if isinstance(x, Tensor)]
    found = [reduced(ids, range(ids.ndim), keepdim=False) for ids in own]
    return grown(reduce(combined, found), out.ndim)


@_rule(
    *("linalg_inv_ex", "_linalg_solve_ex", "linalg_cholesky_ex", "_linalg_det", "_linalg_svd"),
    *("_linalg_eigh", "linalg_matrix_exp", "linalg_qr", "linalg_solve_triangular", "linalg_pinv"),
    *("_linalg_slogdet", "linalg_lu_factor_ex", "linalg_lu", "cholesky_solve", "linalg_eig"),
    *("linalg_householder_product", "_linalg_eigvals", "linalg_lu_solve", "cholesky_inverse"),
)
def matrices(find: Find, a: Arguments, out: Any) -> list[Found] | None:
    """Functions of matrices [batch, ..., rows, columns]."""
    given = [value for value in a.values() if isinstance(value, Tensor)]
    ndim = given[0].ndim - 2  # of the batch
    ids: Tensor | None = None
    for value in given:
        if value.ndim < 2 or value.ndim - 2 > ndim:
            return None
        own = grown(reduced(_all_ids(find, value), [-1, -2], keepdim=True), ndim + 2)
        ids = own if ids is None else combined(ids, own)
    assert ids is not None
    outputs = [out] if isinstance(out, Tensor) else out
    batch = ids.shape[:ndim]
    return [
        ids.reshape(*batch, *(1,) * (each.ndim - ndim)) if each.ndim >= ndim else None
        for each in outputs
    ]


@_rule("linalg_cross")
def cross(find: Find, a: Arguments, out: Tensor) -> Found:
    """The product of vectors along a dimension."""
    return combined(*(_over_dims(find, a[name], a.get("dim", -1)) for name in ("self", "other")))


@_rule("_ctc_loss")
def sequence_loss(find: Find, a: Arguments, out: Sequence[Tensor]) -> list[Found]:
    """Of [time, batch, classes], one for each of the batch."""
    ids = reduced(_all_ids(find, a["log_probs"]), [0, 2], keepdim=False)
    return [ids, *(None for _ in out[1:])]


@_rule(
    *("reflection_pad1d", "reflection_pad2d", "reflection_pad3d"),
    *("replication_pad1d", "replication_pad2d", "replication_pad3d"),
)
def mirrored(find: Find, a: Arguments, out: Tensor) -> Found:
    """What is added along the last dimensions comes from them."""
    return _over_dims(find, a["self"], range(-(len(a["padding"]) // 2), 0))


def _over_dims(find: Find, x: Tensor, dims: Any, *, keepdim: bool = True) -> Tensor:
    """Ids of what depends on all elements along some dimensions: one, a list, or None for all."""
    if isinstance(dims, int):
        dims = [dims]
    return reduced(_all_ids(find, x), dims or range(x.ndim), keepdim=keepdim)


@_rule(
    *("convolution", "_convolution", "mkldnn_convolution", "native_group_norm", "im2col", "col2im"),
    *("max_pool2d_with_indices", "max_pool3d_with_indices", "avg_pool2d", "avg_pool3d"),
    *("avg_pool1d", "max_pool1d", "max_pool2d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"),
    *("adaptive_max_pool2d", "adaptive_max_pool3d", "grid_sampler_2d", "grid_sampler_3d"),
    *("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d"),
    *("upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "pixel_shuffle"),
    *("_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "_upsample_bilinear2d_aa"),
    *("channel_shuffle", "affine_grid_generator", "_upsample_nearest_exact3d", "max_unpool2d"),
    *("pixel_unshuffle", "adaptive_avg_pool2d", "thnn_conv2d", "_slow_conv2d_forward"),
    *("_upsample_bicubic2d_aa", "fractional_max_pool2d", "fractional_max_pool3d", "max_unpool3d"),
    *("adaptive_avg_pool3d", "cudnn_convolution", "cudnn_convolution_transpose"),
    *("conv_depthwise3d", "_conv_depthwise2d", "slow_conv3d_forward"),
)
def first_dim(find: Find, a: Arguments, out: Any) -> Found | Sequence[Found]:
    """Functions of images, [batch, channels, ...], such as convolutions and pooling."""
    ids: Tensor | None = None
    for value in tree_leaves(a):
        found = _ids(find, value)
        if found is not None:
            found = reduced(found, range(1, found.ndim), keepdim=True).reshape(-1)
            ids = found if ids is None else combined(ids, found)
    assert ids is not None
    outputs = [out] if isinstance(out, Tensor) else out
    made = [ids.reshape(-1, *(1 for _ in range(each.ndim - 1))) for each in outputs]
    return made if len(made) > 1 else made[0]


# --- products ----------------------------------------------------------------------------------


@_rule("mm", "bmm", "addmm", "baddbmm", "matmul", "_grouped_mm", "grouped_mm_fallback", "_int_mm")
def matmul(find: Find, a: Arguments, out: Any) -> Found:
    """Products of matrices, and one added to them."""
    names = (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2"), ("self", "other"))
    left, right = next((a[i], a[j]) for i, j in (*names, ("input", "weight")) if i in a and j in a)
    x, w = _all_ids(find, left), _all_ids(find, right)
    if "offs" in a:
        if _ids(find, right) is not None or right.ndim != 3 or left.ndim != 2:
            return None
        return reduced(x, [-1], keepdim=True)
    if min(left.ndim, right.ndim) < 2:
        return None
    # [..., i, k] and [..., k, j]
    ids = combined(reduced(x, [-1], keepdim=True), reduced(w, [-2], keepdim=True))
    if "mat1" in a or "batch1" in a:
        ids = combined(ids, grown(_all_ids(find, a["self"]), ids.ndim))
    return ids


@_rule("mv", "addmv", "dot", "vdot")
def vectors(find: Find, a: Arguments, out: Tensor) -> Found:
    """Products with a vector."""
    x = a["self"] if "mat" not in a else a["mat"]
    v = a["vec"] if "vec" in a else a["tensor"]
    own = reduced(_all_ids(find, x), [-1], keepdim=False)
    return combined(own, grown(reduced(_all_ids(find, v), [-1], keepdim=False), own.ndim))


@_rule("_cdist_forward", "_euclidean_dist")
def distances(find: Find, a: Arguments, out: Tensor) -> Found:
    """Of all rows of one to all rows of another."""
    left, right = (_all_ids(find, a[name]) for name in ("x1", "x2"))
    right = reduced(right, [-1], keepdim=True)
    return combined(reduced(left, [-1], keepdim=True), right.transpose(-1, -2))


@_rule(
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    *("_scaled_dot_product_fused_attention_overrideable",),
    *("_scaled_dot_product_attention_math", "_scaled_dot_product_attention_math_for_mps"),
)
def attention(find: Find, a: Arguments, out: Any) -> list[Found]:
    """[batch, heads, tokens, features]: all tokens of one are mixed."""
    ids: Tensor | None = None
    for name in ("query", "key", "value"):
        own = reduced(_all_ids(find, a[name]), [-1, -2], keepdim=True)
        ids = own if ids is None else combined(ids, own)
    mask = a.get("attn_mask", a.get("attn_bias"))
    assert ids is not None
    if isinstance(mask, Tensor) and _ids(find, mask) is not None:
        own = reduced(grown(_all_ids(find, mask), 4), [-1, -2], keepdim=True)
        ids = combined(ids, own) if mask.is_floating_point() else filled(ids, own)
    outputs = [out] if isinstance(out, Tensor) else out
    return [ids if each.ndim == 4 else None for each in outputs]


# --- elements that move ------------------------------------------------------------------------


@_rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_view_copy", "view_copy", "unflatten")
def view(find: Find, a: Arguments, out: Tensor) -> Found:
    """The same elements in another shape: only dimensions that samples lie in are looked at."""
    x = a["self"]
    ids = _all_ids(find, x)
    if not isinstance(a.get("size", a.get("shape", ())), list | tuple):
        return ids if x.shape == out.shape else None  # another dtype
    if x.numel() == 0:  # nobody's rows, and none of them
        return torch.full([min(size, 1) for size in out.shape], NOBODY, device=out.device)
    pieces: list[int] = []  # sizes of the numbers before the pieces are put together
    shape: list[int] = []  # and those of the output that become of them
    for old, new in _aligned(tuple(x.shape), tuple(out.shape)):
        if all(ids.shape[dim] == 1 for dim in old):
            shape += [1] * len(new)
            pieces += [1] * len(old)
        else:
            shape += [out.shape[dim] for dim in new]
            pieces += [x.shape[dim] for dim in old]
    moved = ids.expand(pieces).reshape(shape)
    return compressed(moved) if moved.numel() > ids.numel() or len(shape) > x.ndim else moved


def _aligned(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Which dimensions of a shape become which of another: runs with as many elements."""
    found, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left, right = [i] if i < len(old) else [], [j] if j < len(new) else []
        i, j = i + len(left), j + len(right)
        while (a := math.prod(old[d] for d in left)) != (b := math.prod(new[d] for d in right)):
            if a < b:
                left.append(i)
                i += 1
            else:
                right.append(j)
                j += 1
        found.append((left, right))
    return found


@_rule("view_as_real", "view_as_complex")
def numbers_in_pairs(find: Find, a: Arguments, out: Tensor) -> Found:
    """The last dimension of two that complex numbers have when they are seen as real."""
    ids = _all_ids(find, a["self"])
    if out.ndim > ids.ndim:
        return ids.unsqueeze(-1)
    return reduced(ids, [-1], keepdim=False)


@_rule("as_strided")
def strided(find: Find, a: Arguments, out: Tensor) -> Found:
    """Elements by their places in memory."""
    x, start = a["self"], a.get("storage_offset")
    offset = 0 if start is None else start - x.storage_offset()
    ids = torch.empty_strided(x.shape, x.stride(), dtype=torch.int64, device=x.device)
    ids.copy_(_all_ids(find, x))
    return compressed(ids.as_strided(a["size"], a["stride"], offset))


@_rule("rot90")
def turned(find: Find, a: Arguments, out: Tensor) -> Found:
    """A quarter turn in two dimensions."""
    x, dims = a["self"], [dim % a["self"].ndim for dim in a["dims"]]
    ids = _all_ids(find, x)
    sizes = [n if d in dims else m for d, (n, m) in enumerate(zip(x.shape, ids.shape, strict=True))]
    return compressed(ids.expand(sizes).rot90(a["k"], dims))


@_rule("diag_embed")
def on_diagonal(find: Find, a: Arguments, out: Tensor) -> Found:
    """Vectors along the diagonals of matrices."""
    ids = _all_ids(find, a["self"])
    return ids.unsqueeze(-1) if ids.shape[-1] == 1 and a["dim1"] == -2 and a["dim2"] == -1 else None


# What means the same for dimensions of 1.
RULES["flip"] = lambda find, a, out: _all_ids(find, a["self"]).flip(a["dims"])

LISTS = {"split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "unsafe_chunk"}
VIEWS = {
    *("permute", "transpose", "t", "unsqueeze", "squeeze", "expand", "broadcast_to", "select"),
    *("slice", "narrow", "narrow_copy", "diagonal", "unfold", *LISTS),
}


def view_rule(func: Callable[..., Any], names: Sequence[str]) -> RowRule:
    """Return the rule of a view function: the same function, run on ids.

    Args:
        func: The function.
        names: Of its arguments.
    """

    def rule(find: Find, a: Arguments, out: Any) -> Found | Sequence[Found]:
        x = a[names[0]]
        ids = _all_ids(find, x)
        if out is x:  # in place: it has its new strides already
            return ids
        made = func(ids.expand(x.shape), **{each: a.get(each) for each in names[1:]})
        return _unexpanded(made) if isinstance(made, Tensor) else list(map(_unexpanded, made))

    return rule


def _unexpanded(ids: Tensor) -> Tensor:
    """Reduce each expanded dimension (stride 0) to size 1."""
    for dim, (size, stride) in enumerate(zip(ids.shape, ids.stride(), strict=True)):
        if size > 1 and stride == 0:
            ids = ids.narrow(dim, 0, 1)
    return ids


@_rule("repeat", "tile")
def repeat(find: Find, a: Arguments, out: Tensor) -> Found:
    """`repeat`: dimensions along which samples do not change stay of 1."""
    ids = grown(_all_ids(find, a["self"]), out.ndim)
    times = [n if size > 1 else 1 for n, size in zip(a["repeats"], ids.shape, strict=True)]
    return ids.repeat(times)


@_rule("roll")
def roll(find: Find, a: Arguments, out: Tensor) -> Found:
    """`roll`."""
    ids = _all_ids(find, a["self"])
    if not a.get("dims"):
        return ids if ids.numel() == 1 else None
    return ids.roll(a["shifts"], a["dims"])


@_rule("cat", "stack", "concat")
def cat(find: Find, a: Arguments, out: Tensor) -> Found:
    """`cat` and `stack`."""
    tensors, dim = a["tensors"], a.get("dim", 0) % out.ndim
    if all(x.ndim < out.ndim for x in tensors):
        parts = [(1, _all_ids(find, x).unsqueeze(dim)) for x in tensors]
    else:  # `cat` leaves out tensors of shape [0]
        parts = [(x.shape[dim], _all_ids(find, x)) for x in tensors if x.ndim == out.ndim]
    first = parts[0][1]
    if first.shape[dim] == 1 and all(torch.equal(ids, first) for _, ids in parts):
        return first
    sizes = [max(ids.shape[d] for _, ids in parts) for d in range(out.ndim)]
    wide = []
    for size, ids in parts:
        sizes[dim] = size
        wide.append(ids.expand(sizes))
    return torch.cat(wide, dim)


@_rule("constant_pad_nd")
def pad(find: Find, a: Arguments, out: Tensor) -> Found:
    """`F.pad`: what is added along samples is nobody's, what is added to a sample is its own."""
    ids, sides = _all_ids(find, a["self"]), list(a["pad"])
    for place in range(len(sides) // 2):
        if ids.shape[-1 - place] == 1:
            sides[2 * place : 2 * place + 2] = [0, 0]
    return torch.constant_pad_nd(ids, sides, NOBODY)


# --- rows by their numbers ---------------------------------------------------------------------


def _chosen(ids: Tensor, choosers: Tensor, *, is_by_value: bool) -> RowSamples:
    """Ids of what an index has chosen: `NOBODY`'s rows get the sample of the index."""
    choosers = choosers.to(ids.device)
    if ids.numel() != 1 or int(ids) != NOBODY:  # what many have chosen is nobody's all the same
        choosers = torch.where(choosers == MIXED, NOBODY, choosers)
    is_torn = (ids >= 0) & (choosers >= 0) & (ids != choosers)
    return RowSamples(torch.where(is_torn, MIXED, filled(ids, choosers)), is_by_value=is_by_value)


@_rule("index", "_unsafe_index")
def index(find: Find, a: Arguments, out: Tensor) -> Found:
    """`x[i, mask, :]`."""
    x, indices = a["self"], list(a["indices"])
    ids = _all_ids(find, x)
    dims: list[int] = []  # that are indexed
    is_by_value, dim = False, 0
    for each in indices:
        own = range(dim, dim + (each.ndim if each is not None and _is_mask(each) else 1))
        dim = own.stop
        if each is None:
            continue
        dims += own
        if find(each) is not None:  # of a mask at least the number of rows changes
            is_by_value |= _is_mask(each) or any(ids.shape[d] > 1 for d in own)
    # A dimension that is not indexed, and along which samples do not change, stays of 1.
    wide = ids.expand([x.shape[d] if d in dims else ids.shape[d] for d in range(x.ndim)])
    shadow = _index_shadow(find, x, indices, out)
    if _ids(find, x) is None and shadow is not None:  # rows of a table
        return RowSamples(shadow, is_by_value=is_by_value)
    made = torch.ops.aten.index.Tensor(wide, indices)
    if shadow is None:
        return RowSamples(made, is_by_value=is_by_value)
    return _chosen(made, shadow, is_by_value=is_by_value)


def _index_shadow(
    find: Find, x: Tensor, indices: Sequence[Tensor | None], out: Tensor
) -> Tensor | None:
    """Ids of the indices, broadcast as in the output; None if no sample made them."""
    given = [(d, each) for d, each in enumerate(indices) if each is not None]
    if all(_ids(find, each) is None for _, each in given):
        return None
    if any(_is_mask(each) for _, each in given):
        if len(given) > 1:
            return None
        dim, mask = given[0]
        own = _all_ids(find, mask).expand(mask.shape)[mask]  # [chosen]
        return own.reshape([-1 if d == dim else 1 for d in range(out.ndim)])
    shadow = None
    for _, each in given:
        own = _all_ids(find, each)
        shadow = own if shadow is None else combined(*_same_ndim(shadow, own))
    assert shadow is not None
    num_index = max(each.ndim for _, each in given)
    shadow = grown(shadow, num_index)
    places = [d for d, _ in given]
    is_run = places == list(range(places[0], places[0] + len(places)))
    before = places[0] if is_run else 0
    after = out.ndim - before - num_index
    return shadow.reshape(*(1,) * before, *shadow.shape, *(1,) * after)


def _same_ndim(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    ndim = max(left.ndim, right.ndim)
    return grown(left, ndim), grown(right, ndim)


RULES["embedding"] = lambda find, a, out: index(
    find, {"self": a["weight"], "indices": [a["indices"]]}, out
)


@_rule("index_select")
def index_select(find: Find, a: Arguments, out: Tensor) -> Found:
    """`x[:, i]`."""
    if out.ndim == 0:
        return _all_ids(find, a["self"])
    return index(find, {"self": a["self"], "indices": _only(a["index"], a["dim"], out.ndim)}, out)


def _only(chosen: Tensor, dim: int, ndim: int) -> list[Tensor | None]:
    """Indices that choose rows of one dimension."""
    return [*(None for _ in range(dim % ndim)), chosen if chosen.ndim else chosen.reshape(1)]


@_rule("gather")
def gather(find: Find, a: Arguments, out: Tensor) -> Found:
    """`gather`: each element by its own number."""
    x, dim, chosen = a["self"], a["dim"], a["index"]
    ids = _all_ids(find, x)
    is_moved = ids.ndim > 0 and ids.shape[dim] > 1
    if is_moved:
        ids = ids.expand(x.shape).gather(dim, chosen)
    else:
        ids = ids[tuple(slice(0, n) for n in chosen.shape)]
    return _chosen(ids, _all_ids(find, chosen), is_by_value=is_moved and find(chosen) is not None)


@_rule("sort", "topk", "argsort", "msort")
def sort(find: Find, a: Arguments, out: Sequence[Tensor]) -> list[Found]:
    """`sort` and `topk`: values and their numbers."""
    x = a["self"]
    ids, dim = _all_ids(find, x), a.get("dim", -1)
    order = out[1]
    if x.ndim and ids.shape[dim] > 1:
        ids = ids.expand(x.shape).gather(dim, order)
        moved = RowSamples(ids, is_by_value=True)
        return [moved, moved]
    return [ids, ids]


@_rule("nonzero")
def nonzero(find: Find, a: Arguments, out: Tensor) -> Found:
    """Where elements are: one row for each."""
    x = a["self"]
    ids = _all_ids(find, x).expand(x.shape)
    return RowSamples(ids[tuple(out.unbind(1))].reshape(-1, 1), is_by_value=True)


@_rule("masked_select")
def masked_select(find: Find, a: Arguments, out: Tensor) -> Found:
    """Elements where a mask is true."""
    x, mask = torch.broadcast_tensors(a["self"], a["mask"])
    ids = grown(_all_ids(find, a["self"]), x.ndim).expand(x.shape)[mask]
    own = grown(_all_ids(find, a["mask"]), x.ndim).expand(x.shape)[mask]
    return _chosen(ids, own, is_by_value=True)


def _put(
    before: Tensor,
    values: Tensor,
    *,
    get: Callable[[Tensor], Tensor],
    put: Callable[[Tensor], Tensor],
    is_added: bool,
) -> Tensor | None:
    """Write ids into others; None where several samples write to one place.

    Args:
        before: Whose all elements were.
        values: Whose what was written is.
        get: Reads where it was written.
        put: Writes values into `before`.
        is_added: Whether what was there counts too.
    """
    there, values = _same_ndim(get(before), values)
    after = combined(there, values) if is_added else filled(values, there)
    if after.shape == there.shape and torch.equal(after, there):
        return before
    made = put(after)
    return made if torch.equal(get(made), after.expand(there.shape)) else None


@_rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(find: Find, a: Arguments, out: Tensor, *, is_by_chooser: bool = True) -> Found:
    """`x[i] = y`."""
    x, indices, values = a["self"], list(a["indices"]), a["values"]
    ids, value_ids = _all_ids(find, x), _all_ids(find, values)
    used = sum(each.ndim if _is_mask(each) else 1 for each in indices)
    before = ids.expand(x.shape)
    num_left_out = 0  # features along which nothing changes need not be written one by one
    for back in range(1, x.ndim - used + 1):
        if ids.shape[-back] != 1 or (values.ndim >= back and value_ids.shape[-back] != 1):
            break
        num_left_out += 1
    for _ in range(num_left_out):
        before = before.select(-1, 0)
        value_ids = value_ids.select(-1, 0) if value_ids.ndim else value_ids
    there = torch.ops.aten.index.Tensor(before, indices)
    value_ids = value_ids.expand(there.shape)
    shadow = _index_shadow(find, before, indices, there)
    if shadow is not None and is_by_chooser:  # what nobody made is of whoever chose the place
        shadow = torch.where(shadow == MIXED, NOBODY, shadow)
        value_ids = filled(value_ids, shadow.expand(there.shape))
    made = _put(
        before,
        value_ids,
        get=lambda ids: torch.ops.aten.index.Tensor(ids, indices),
        put=lambda new: torch.ops.aten.index_put(before, indices, new),
        is_added=bool(a.get("accumulate")),
    )
    if made is None or made is before:
        return None if made is None else ids
    made = compressed(made)
    return made.reshape(*made.shape, *(1 for _ in range(num_left_out)))


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@_rule("index_add", "index_copy", "index_reduce")
def index_add(find: Find, a: Arguments, out: Tensor) -> Found:
    """`x.index_add(dim, i, y)`."""
    x = a["self"]
    if x.ndim == 0:
        return combined(*(_all_ids(find, each) for each in (x, a["source"])))
    indices = _only(a["index"], a["dim"], x.ndim)
    given = {"self": x, "indices": indices, "values": a["source"], "accumulate": "alpha" in a}
    return index_put(find, given, out, is_by_chooser=False)


@_rule("scatter")
def scatter(find: Find, a: Arguments, out: Tensor, *, is_added: bool = False) -> Found:
    """`x.scatter(dim, i, y)`: each element to its own number, beside its own place elsewhere."""
    x, dim, chosen, source = a["self"], a["dim"], a["index"], a.get("src")
    ids, own = _all_ids(find, x), _all_ids(find, chosen)
    own = torch.where(own == MIXED, NOBODY, own) if own.numel() else own
    if isinstance(source, Tensor):
        values = _all_ids(find, source)
        values = values[tuple(slice(0, n) for n in chosen.shape)]
        own = (
            filled(*torch.broadcast_tensors(values, own))
            if source.is_floating_point()
            else (combined(values, own))
        )
    if x.ndim == 0:
        return combined(ids, own)
    if ids.shape[dim] == 1 and own.shape[dim] == 1:
        for d, (n, m) in enumerate(zip(x.shape, chosen.shape, strict=True)):
            if d != dim % x.ndim and n != m and own.shape[d] > 1:
                return None
        return combined(ids, own)
    before = ids.expand(x.shape)
    made = _put(
        before,
        own.expand(chosen.shape),
        get=lambda ids: ids.gather(dim, chosen),
        put=lambda new: before.scatter(dim, chosen, new),
        is_added=is_added,
    )
    if made is None or made is before:
        return None if made is None else ids
    return compressed(made)


RULES["scatter_add"] = RULES["scatter_reduce"] = partial(scatter, is_added=True)


@_rule("masked_scatter")
def masked_scatter(find: Find, a: Arguments, out: Tensor) -> Found:
    """`x.masked_scatter(mask, y)`: elements of y in their order."""
    x, mask = a["self"], a["mask"].expand(a["self"].shape)
    ids = _all_ids(find, x)
    before = ids.expand(x.shape)
    values = _all_ids(find, a["source"]).expand(a["source"].shape).reshape(-1)
    there = before[mask]
    agreed = combined(there, values[: len(there)])
    if torch.equal(agreed, there):
        return ids
    return compressed(before.masked_scatter(mask, agreed))


@_rule("slice_scatter", "select_scatter")
def written_part(find: Find, a: Arguments, out: Tensor) -> Found:
    """A part of a tensor, written into a copy of it."""
    ids, own, dim = _all_ids(find, a["self"]), _all_ids(find, a["src"]), a.get("dim", 0)
    if "index" in a:
        own = own.unsqueeze(dim)
    return combined(ids, own) if ids.shape[dim] == own.shape[dim] == 1 else None


# --- sequences and bags ------------------------------------------------------------------------


@_rule("_pack_padded_sequence")
def pack(find: Find, a: Arguments, out: Sequence[Tensor]) -> list[Found]:
    """The steps of sequences that have not ended, step by step."""
    x = a["input"]
    ids = _all_ids(find, x)
    ids = ids.expand([*x.shape[:2], *ids.shape[2:]]).contiguous()
    moved = torch.ops.aten._pack_padded_sequence(ids, a["lengths"], a["batch_first"])[0]
    return [RowSamples(moved, is_by_value=True), None]


@_rule("_pad_packed_sequence")
def unpack(find: Find, a: Arguments, out: Sequence[Tensor]) -> list[Found]:
    """Back to [time, batch]: the padding is its sequence's."""
    data = a["data"]
    ids = _all_ids(find, data)
    ids = ids.expand(len(data), *ids.shape[1:]).contiguous()
    padded, _ = torch.ops.aten._pad_packed_sequence(
        ids, a["batch_sizes"], a["batch_first"], NOBODY, a["total_length"]
    )
    return [reduced(padded, [1 if a["batch_first"] else 0], keepdim=True), None]


@_rule("_embedding_bag", "_embedding_bag_forward_only")
def bags(find: Find, a: Arguments, out: Sequence[Tensor]) -> list[Found]:
    """One row per bag: whose its ids are, or else its place."""
    ids, places = a["indices"], a["offsets"]
    if _ids(find, a["weight"]) is not None:
        return [None for _ in out]
    num_bags = len(out[0])
    steps = torch.arange(len(ids), device=ids.device)
    bag = torch.searchsorted(places.contiguous(), steps, right=True) - 1
    own = _all_ids(find, ids).expand(len(ids))
    none = torch.iinfo(torch.int64).max
    low = torch.full((num_bags,), none, device=ids.device)
    high = torch.full((num_bags,), NOBODY, device=ids.device)
    low.scatter_reduce_(0, bag, torch.where(own == NOBODY, none, own), "amin")
    high.scatter_reduce_(0, bag, own, "amax")
    found = torch.where(low == none, NOBODY, torch.where(low == high, high, MIXED))
    where = _all_ids(find, places)
    where = where.expand(len(places))[:num_bags]
    found = filled(found, torch.where(where == MIXED, NOBODY, where))
    return [found.reshape(-1, 1), *(None for _ in out[1:])]
