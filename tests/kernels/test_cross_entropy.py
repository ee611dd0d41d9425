"""Linear map and cross-entropy in one: against torch's own, against float64, on odd shapes."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import unison
from tests.harness import assert_close
from tests.harness.largest import Largest
from tests.kernels.interpreted import interpreted, printed_by
from unison.errors import BadInput, UnsupportedOperation
from unison.kernels import cross_entropy
from unison.kernels.cross_entropy import (
    ROW_MULTIPLE,
    cut,
    gradient_reference,
    statistics,
    statistics_reference,
)

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# batch, tokens, d, vocab: odd, one token, one sample, none, more than one block of columns
SHAPES = [(3, 7, 13, 57), (2, 1, 5, 3), (1, 19, 8, 128), (0, 4, 5, 11), (2, 0, 5, 11),
          (2, 3, 4, 5003), (1, 1, 1, 1)]  # fmt: skip
IGNORED = -100


def inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, *, has_bias: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Hidden states, weight, labels (a whole sample and a third of the rest ignored), bias."""
    batch, tokens, d, vocab = shape
    gen = torch.Generator().manual_seed(batch + 10 * tokens + 100 * vocab)
    draw = lambda *size: torch.randn(size, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
    labels = torch.randint(0, vocab, (batch, tokens), generator=gen)
    labels[:, 1::3] = IGNORED
    if batch > 1:
        labels[1] = IGNORED
    bias = draw(vocab).requires_grad_() if has_bias else None
    return (
        draw(batch, tokens, d).requires_grad_(),
        (draw(vocab, d) / d**0.5).requires_grad_(),
        labels,
        bias,
    )


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None) -> Tensor:
    """Token losses as anybody writes them, with all logits in float32."""
    logits = F.linear(hidden, weight, bias)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape)


def with_gradients(losses: Tensor, *leaves: Tensor | None) -> list[Tensor]:
    """Token losses, and gradients of a sum in which each token has another weight."""
    weights = torch.linspace(0.3, 1.7, losses.numel(), dtype=losses.dtype, device=losses.device)
    found = [each for each in leaves if each is not None]
    total = (losses * weights.view_as(losses)).sum()
    return [losses.detach(), *torch.autograd.grad(total, found)]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    if expected.numel() == 0:
        return 0.0
    scale = float(expected.double().abs().max()) or 1.0
    return float((actual.double() - expected.double()).abs().max()) / scale


# ---- values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("chunk", [None, 4, 5, 16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_the_unchunked(dtype, shape, chunk, has_bias):
    hidden, weight, labels, bias = inputs(shape, dtype, has_bias=has_bias)
    found = unison.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    expected = with_gradients(plain(hidden, weight, labels, bias), hidden, weight, bias)
    for a, e in zip(with_gradients(found, hidden, weight, bias), expected, strict=True):
        assert a.shape == e.shape
        if dtype == torch.float32:
            assert relative_error(a, e) <= 1e-6
        else:
            assert_close(a, e, dtype=dtype)


@pytest.mark.parametrize("chunk", [None, 4])
def test_float32_against_float64(chunk):
    shape = (2, 9, 33, 5003)
    leaves = inputs(shape, torch.float32)
    wide = [each.detach().double().requires_grad_() for each in (leaves[0], leaves[1], leaves[3])]
    hidden, weight, labels, bias = leaves
    losses = unison.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)
    expected = plain(wide[0], wide[1], labels, wide[2])
    pairs = zip(
        with_gradients(losses, hidden, weight, bias), with_gradients(expected, *wide), strict=True
    )
    assert max(relative_error(a, e) for a, e in pairs) <= 1e-6


def test_one_token_at_a_time():
    """In float64: a product with one row is another BLAS routine, whose sums err more."""
    hidden, weight, labels, bias = inputs((2, 3, 4, 503), torch.float64)
    found = unison.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=1)
    expected = with_gradients(plain(hidden, weight, labels, bias), hidden, weight, bias)
    for a, e in zip(with_gradients(found, hidden, weight, bias), expected, strict=True):
        assert_close(a, e)


def test_gradcheck():
    hidden, weight, labels, bias = inputs((2, 3, 4, 7), torch.float64)
    run = lambda *x: unison.linear_cross_entropy(  # noqa: E731
        x[0], x[1], labels, bias=x[2], chunk=2, reduction="sample_mean"
    )
    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def test_losses_of_logits_have_a_gradient():
    labels = torch.tensor([2, IGNORED, 0])
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    run = lambda x: statistics(x, labels, IGNORED)[1]  # noqa: E731
    assert torch.autograd.gradcheck(run, logits)
    expected = F.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(run(logits), expected)
    (gradient,) = torch.autograd.grad(run(logits).sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="autograd"):
        gradient.sum().backward()


def test_sample_means_are_those_of_per_sample_loss():
    hidden, weight, labels, _ = inputs((4, 7, 5, 31), torch.float32)
    found = unison.linear_cross_entropy(hidden, weight, labels, reduction="sample_mean", chunk=9)
    expected = unison.per_sample_loss(F.linear(hidden, weight), labels)
    assert found.shape == (4,)
    assert float(found[1].detach()) == 0.0  # no token counts
    pairs = zip(
        with_gradients(found, hidden, weight),
        with_gradients(expected, hidden, weight),
        strict=True,
    )
    assert max(relative_error(a, e) for a, e in pairs) <= 1e-6


def test_another_ignore_index_and_narrow_labels():
    hidden, weight, labels, _ = inputs((2, 5, 4, 11), torch.float32)
    labels = labels.masked_fill(labels == IGNORED, 3)
    found = unison.linear_cross_entropy(hidden, weight, labels.int(), ignore_index=3)
    assert torch.equal(found == 0, labels == 3)


def test_ignored_tokens_give_nothing_whatever_they_hold():
    hidden, weight, labels, bias = inputs((2, 6, 4, 11), torch.float32)
    with torch.no_grad():
        hidden[labels == IGNORED] = torch.inf
    losses, *gradients = with_gradients(
        unison.linear_cross_entropy(hidden, weight, labels, bias=bias), hidden, weight, bias
    )
    assert losses.isfinite().all()
    assert gradients[0][labels == IGNORED].eq(0).all()
    assert gradients[2].isfinite().all()


def test_a_sure_prediction_keeps_its_digits():
    """`lse - logit` would be 0 or 2⁻¹⁹: both are near 30."""
    logits = torch.zeros(1, 3)
    logits[0, 1] = 30.0
    _, losses = statistics_reference(logits, torch.tensor([1]), IGNORED)
    expected = F.cross_entropy(logits.double(), torch.tensor([1]))
    assert float(losses) == pytest.approx(float(expected), rel=1e-6)


def test_only_what_is_asked_for_has_a_gradient():
    hidden, weight, labels, bias = inputs((2, 5, 4, 11), torch.float64)
    for leaves in ([hidden], [weight], [bias], [weight, bias]):
        args = [
            each if any(each is leaf for leaf in leaves) else each.detach()
            for each in (hidden, weight, bias)
        ]
        losses = unison.linear_cross_entropy(args[0], args[1], labels, bias=args[2], chunk=3)
        expected = plain(args[0], args[1], labels, args[2])
        assert_close(
            dict(enumerate(with_gradients(losses, *leaves))),
            dict(enumerate(with_gradients(expected, *leaves))),
        )


def test_hidden_states_that_are_not_contiguous():
    hidden, weight, labels, _ = inputs((3, 8, 5, 17), torch.float64)
    for view in (hidden[:, :-1], hidden[:, ::2], hidden.mT.contiguous().mT):
        some = labels[:, : view.shape[1]]
        found = with_gradients(unison.linear_cross_entropy(view, weight, some, chunk=4), hidden)
        assert_close(found[1], with_gradients(plain(view, weight, some, None), hidden)[1])


def test_autocast_casts_as_for_linear():
    hidden, weight, labels, bias = inputs((2, 5, 16, 33), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = unison.linear_cross_entropy(hidden, weight, labels, bias=bias)
        expected = plain(hidden, weight, labels, bias)
    assert found.dtype == torch.float32
    for a, e in zip(
        with_gradients(found, hidden, weight, bias),
        with_gradients(expected, hidden, weight, bias),
        strict=True,
    ):
        assert a.dtype == torch.float32
        assert_close(a, e, dtype=torch.bfloat16)


def test_a_backward_pass_inside_of_autocast_computes_as_the_forward_did():
    hidden, weight, labels, bias = inputs((2, 5, 16, 33), torch.float32)
    losses = unison.linear_cross_entropy(hidden, weight, labels, bias=bias)
    expected = plain(hidden, weight, labels, bias)
    with torch.autocast("cpu", torch.bfloat16):
        found = with_gradients(losses, hidden, weight, bias)
    for a, e in zip(found, with_gradients(expected, hidden, weight, bias), strict=True):
        assert relative_error(a, e) <= 1e-6


def test_halves_are_added_up_in_float32():
    """256 chunks of equal contributions: a bf16 sum would stand still at 256 · the last place."""
    hidden = torch.ones(1, 1024, 2, dtype=torch.bfloat16)
    weight = torch.zeros(5, 2, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(1, 1024, dtype=torch.int64)
    unison.linear_cross_entropy(hidden, weight, labels, chunk=1).sum().backward()
    expected = torch.full((5, 2), 1024 * 0.2)
    expected[0] = -1024 * 0.8
    assert_close(weight.grad, expected, dtype=torch.bfloat16)


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "tokens"), [(16, 8), (1, 128), (4, 32)])
def test_logits_of_the_batch_never_exist(batch, tokens):
    d, vocab, chunk = 3, 1000, 16
    hidden, weight, labels, bias = inputs((batch, tokens, d, vocab), torch.float32)
    with Largest() as largest:
        losses = unison.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)
        losses.sum().backward()
    assert largest.numel <= chunk * (vocab + ROW_MULTIPLE)
    with Largest() as largest:
        plain(hidden, weight, labels, bias)
    assert largest.numel == batch * tokens * vocab


def test_the_default_chunk_is_bounded():
    for batch, tokens, rows in [(7, 300, 1000), (3, 1000, 300), (5, 1, 4), (1, 1, 1)]:
        seen = torch.zeros(batch, tokens)
        for chunk in cut(batch, tokens, rows):
            assert 0 < seen[chunk].numel() <= rows
            seen[chunk] += 1
        assert seen.eq(1).all()


# ---- what is refused -----------------------------------------------------------------------------


def test_double_backward_is_refused():
    hidden, weight, labels, _ = inputs((2, 3, 4, 7), torch.float64)
    loss = unison.linear_cross_entropy(hidden, weight, labels).sum()
    with pytest.raises(UnsupportedOperation, match="no second derivative"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(6, 4)}, r"hidden \[6, 4\]"),
        ({"weight": torch.zeros(7, 5)}, r"weight \[7, 5\]"),
        ({"labels": torch.zeros(2, 2, dtype=torch.int64)}, r"labels \[2, 2\]"),
        ({"labels": torch.zeros(2, 3)}, "torch.float32"),
        ({"bias": torch.zeros(6)}, r"bias \[6\]"),
        ({"weight": torch.zeros(7, 4, dtype=torch.float64)}, "one floating-point dtype"),
        ({"reduction": "mean"}, "'none', 'sample_mean'"),
        ({"chunk": 0}, "chunk must be above 0"),
        ({"labels": torch.full((2, 3), 7)}, "from 0 to 6, or -100.*found 7"),
        ({"labels": torch.full((2, 3), -1)}, "found -1"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(2, 3, 4),
        "weight": torch.zeros(7, 4),
        "labels": torch.zeros(2, 3, dtype=torch.int64),
    }
    with pytest.raises(BadInput, match=message):
        unison.linear_cross_entropy(**(arguments | change))


def test_an_unknown_label_that_nobody_looked_at_is_nan():
    labels = torch.tensor([2, 9, IGNORED])
    lse, losses = statistics_reference(torch.zeros(3, 5), labels, IGNORED)
    assert losses.isnan().tolist() == [False, True, False]
    logits = torch.zeros(3, 5)
    gradient_reference(logits, labels, lse, torch.ones(3), IGNORED, logits)
    assert logits.isnan().all(1).tolist() == [False, True, False]


# ---- without memory, and compiled ----------------------------------------------------------------


def test_meta_tensors_have_shapes():
    hidden = torch.empty(2, 3, 4, device="meta", requires_grad=True)
    weight = torch.empty(10**6, 4, device="meta", requires_grad=True)
    labels = torch.empty(2, 3, dtype=torch.int64, device="meta")
    unison.linear_cross_entropy(hidden, weight, labels).sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert weight.grad.shape == weight.shape


# ---- Triton --------------------------------------------------------------------------------------

# rows, vocab, gap between rows: unaligned, one block, several, a tail, one column, none
ROWS = [(3, 57, 0), (5, 123, 5), (2, 5003, 0), (2, 8192, 0), (4, 1, 3), (0, 9, 0), (1, 4097, 15)]


def rows_of(rows: int, vocab: int, gap: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    gen = torch.Generator().manual_seed(rows + vocab)
    logits = (4 * torch.randn(rows, vocab + gap, generator=gen)).to(dtype)[:, :vocab]
    labels = torch.randint(0, vocab, (rows,), generator=gen)
    labels[1::4] = IGNORED
    if rows > 2:
        labels[2] = vocab  # unknown
        logits[0, : vocab // 2] = -torch.inf  # whole blocks of it
    return logits, labels, torch.randn(rows, generator=gen)


def compare(backend, rows: int, vocab: int, gap: int, dtype: torch.dtype) -> None:
    """Hold a backend against the reference."""
    logits, labels, g = rows_of(rows, vocab, gap, dtype)
    whole = logits if logits._base is None else logits._base
    expected = statistics_reference(logits, labels, IGNORED)
    found = backend.statistics(logits, labels, IGNORED)
    for a, e in zip(found, expected, strict=True):
        assert_close(a, e, dtype=torch.float32)
    copy = whole.clone()
    other = copy[:, :vocab]
    apart = torch.full_like(copy, 7.0)
    backend.gradient(other, labels, expected[0], g, IGNORED, apart[:, :vocab])
    assert torch.equal(copy, whole)
    gradient_reference(logits, labels, expected[0], g, IGNORED, logits)
    backend.gradient(other, labels, expected[0], g, IGNORED, other)
    assert_close(apart[:, :vocab], other, dtype=torch.float64)
    assert bool((apart[:, vocab:] == 7.0).all())
    if dtype == torch.bfloat16:  # Triton's interpreter truncates; hardware rounds
        torch.testing.assert_close(other, logits, rtol=2**-7, atol=1e-30, equal_nan=True)
    else:
        assert_close(other, logits, dtype=dtype)
    assert torch.equal(copy[:, vocab:], whole[:, vocab:])  # nothing is written between rows


@interpreted
def test_triton_equals_reference_in_the_interpreter():
    from unison.kernels import cross_entropy_triton as kernels

    for rows, vocab, gap in ROWS:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            compare(kernels, rows, vocab, gap, dtype)
    hidden, weight, labels, bias = inputs((3, 5, 4, 131), torch.float32)
    results = []
    for uses_triton in (True, False):
        with mock.patch.object(cross_entropy, "_uses_triton", return_value=uses_triton):
            losses = unison.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=7)
            results.append(with_gradients(losses, hidden, weight, bias))
    assert max(map(relative_error, *results)) <= 1e-6


COMPILED = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from unison.kernels import cross_entropy_triton as kernels
for kernel, last in ((kernels._statistics, "losses"), (kernels._gradient, "g")):
    for dtype in ("*bf16", "*fp16", "*fp32"):
        constants = kernels.launch_options(50257)
        options = {name: constants.pop(name) for name in ("enable_fp_fusion", "num_warps")}
        signature = {"logits": dtype, "labels": "*i64", "lse": "*fp32", last: "*fp32",
                     **({"out": dtype, "out_stride": "i32"} if last == "g" else {}),
                     "num_columns": "i32", "row_stride": "i32", "ignore_index": "i32",
                     "BLOCK": "constexpr"}
        wide = [i for i, name in enumerate(signature)
                if name in ("logits", "out", "out_stride", "row_stride")]
        aligned = {(i,): [["tt.divisibility", 16]] for i in wide}
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
        print(kernel.__name__, "ld.global.v4" in ptx, "st.global.v4" in ptx)
"""


def test_triton_reads_and_writes_wide():
    """With rows as `ChunkedHead.empty_logits` lays them out, and a vocabulary of odd length."""
    lines = [line.split() for line in printed_by(COMPILED).splitlines()]
    assert len(lines) == 6
    for name, reads_wide, writes_wide in lines:
        assert reads_wide == "True"
        assert writes_wide == str(name == "_gradient")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [None, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_on_the_gpu(dtype, chunk):
    leaves = inputs((3, 16, 64, 5003), dtype)
    hidden, weight, labels, bias = (each.detach().cuda() for each in leaves)
    for each in (hidden, weight, bias):
        each.requires_grad_()
    results = []
    for uses_triton in (True, False):
        with mock.patch.object(cross_entropy, "_uses_triton", return_value=uses_triton):
            losses = unison.linear_cross_entropy(hidden, weight, labels, bias=bias, chunk=chunk)
            results.append(with_gradients(losses, hidden, weight, bias))
    for a, e in zip(*results, strict=True):
        assert_close(a, e, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_per_sample_loss_on_the_gpu(dtype):
    hidden, weight, labels, _ = inputs((3, 16, 64, 5003), torch.float64)
    logits = (F.linear(hidden, weight).detach()).to(dtype).cuda().requires_grad_()
    wide = logits.detach().double().cpu().requires_grad_()
    found = with_gradients(unison.per_sample_loss(logits[:, 1:], labels[:, 1:].cuda()), logits)
    expected = with_gradients(unison.per_sample_loss(wide[:, 1:], labels[:, 1:]), wide)
    for a, e in zip(found, expected, strict=True):
        assert_close(a.cpu().double(), e, dtype=dtype)
