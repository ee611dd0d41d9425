"""What is done otherwise on a GPU gives the same results; here on a CPU that is taken for one."""

import copy

import pytest
import torch
import torch.nn.functional as F

import unison
from tests.kfac.common import Transformer, relative
from tests.kfac.test_stacks import take_for_gpu
from tests.kfac.test_step import batches, train
from unison.kfac import KFACConfig, linalg, precondition
from unison.kfac.linalg import full_float32, gram_of_lower, invert_lower_
from unison.kfac.precondition import Graft, multiply_all


@pytest.fixture
def as_gpu(monkeypatch):
    take_for_gpu(monkeypatch, is_gpu=True)
    monkeypatch.setattr(linalg, "LEAF", 128)
    monkeypatch.setattr(linalg, "LEAST_SPLIT", 64)


@pytest.mark.parametrize("n", [1, 127, 129, 193, 400])
def test_inverses_from_blocks(monkeypatch, n):
    monkeypatch.setattr(linalg, "LEAF", 128)
    u = torch.randn(n, 2 * n).double()
    matrix = u @ u.T / n + 0.1 * torch.eye(n).double()
    found = gram_of_lower(invert_lower_(torch.linalg.cholesky(matrix)))
    assert relative(found, torch.linalg.inv(matrix)) <= 1e-11
    assert torch.equal(found, found.T) or n > 128 or relative(found, found.T) <= 1e-14


@pytest.mark.parametrize("graft", ["adam", "none"])
@pytest.mark.parametrize("fisher", ["mc", "forward"])
def test_a_run_is_the_same(monkeypatch, fisher, graft):
    model = Transformer(d=13, d_ff=140).double()
    twin = copy.deepcopy(model)
    config = KFACConfig(update_every=2, min_layer_size=0, fisher=fisher, graft=graft)

    def run(each):
        kfac = unison.KFAC(each, config)
        train(each, kfac, torch.optim.SGD(each.parameters(), lr=1e-3), batches(5))
        return kfac

    run(model)
    take_for_gpu(monkeypatch, is_gpu=True)
    monkeypatch.setattr(linalg, "LEAF", 128)
    monkeypatch.setattr(precondition, "BYTES_AT_ONCE", 2000)  # a few layers
    kfac = run(twin)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert relative(b.detach(), a.detach()) <= 1e-7  # torch's fused Adam counts in float32
    stored = kfac.state_dict()
    other = unison.KFAC(twin, config)
    other.load_state_dict(stored)
    for a, b in zip(other.state_dict()["layers"], stored["layers"], strict=True):
        assert a["tensors"].keys() == b["tensors"].keys()
        for key, value in b["tensors"].items():
            assert torch.equal(a["tensors"][key], value)
    layer = next(each for each in stored["layers"] if each["layer"]["name"] == "f1.weight")
    assert layer["tensors"]["inverse.a"].shape == (14, 14)  # stored without the padding


def test_products_of_halves_are_those_of_wide_copies(monkeypatch):
    model = Transformer()
    x = torch.randint(0, 11, (4, 5))

    def factors():
        sizes = {"min_layer_size": 0, "max_factor_size": 8}
        kfac = unison.KFAC(model, KFACConfig(**sizes, policy="small_only"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(x)
            kfac.sample(logits).backward()
            logits.float().log_softmax(-1)[..., 0].sum().backward()
            kfac.step()  # inside of autocast, which must not reach it
        kfac.detach()
        return kfac.factors()

    expected = factors()
    take_for_gpu(monkeypatch, is_gpu=True)
    found = factors()
    assert {side for each in expected.values() for side in each} == {"a", "g", "d"}
    for name, sides in expected.items():
        for side, value in sides.items():
            assert value.dtype == torch.float32
            assert relative(found[name][side], value) <= 1e-6


def test_autocast_does_not_round_the_sums():
    # Inputs that bfloat16 holds exactly, and whose sum of squares it does not.
    model = torch.nn.Linear(2, 3, bias=False)
    kfac = unison.KFAC(model, KFACConfig(min_layer_size=0))
    x = torch.tensor([[1.0, 2.0]] * 256 + [[3.0, 1.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(x)
        kfac.sample(logits).backward()
        logits.float().log_softmax(-1)[..., 0].sum().backward()
        kfac.step()
    assert relative(kfac.factors()["weight"]["a"], x.T @ x / len(x)) <= 1e-6


def test_the_fused_adam_is_the_other_one(as_gpu):
    config = KFACConfig(betas=(0.8, 0.9))
    fused, plain = Graft(config), torch.zeros(7, 3)
    plain.requires_grad_()
    adam = torch.optim.Adam([plain], lr=1.0, betas=(0.8, 0.9))
    for _ in range(4):
        plain.grad = torch.randn(7, 3)
        before = plain.detach().clone()
        adam.step()
        own, _, _ = fused.step({"w": plain.grad})
        assert own is not None
        assert relative(own["w"], before - plain.detach()) <= 1e-5


def test_inverses_are_never_made_in_tf32():
    matmul, unset = torch.backends.cuda.matmul, torch.backends.cuda.matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        with full_float32():
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = unset
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with full_float32():
            assert matmul.fp32_precision == "ieee"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("n", [1, 7, 64, 129, 200, 400])
def test_many_inverses_at_once(monkeypatch, as_gpu, n):
    monkeypatch.setattr(linalg, "BATCH_LEAF", 128)
    u = torch.randn(3, n, 2 * n).double()
    matrices, dampings = list(u @ u.mT / n), [0.1, 1.0, 0.01]
    matrices[1] = matrices[1][: n - 1, : n - 1]  # padded to the size of the others
    found, is_right = linalg.inverses_of_positive(matrices, dampings, n + 3)
    assert is_right.tolist() == [True] * 3
    for own, matrix, damping in zip(found, matrices, dampings, strict=True):
        damped = matrix + damping * torch.eye(len(matrix)).double()
        assert own.shape == damped.shape
        assert not damped.numel() or relative(own, torch.linalg.inv(damped)) <= 1e-11


def test_one_of_many_without_an_inverse_is_told_apart(monkeypatch, as_gpu):
    monkeypatch.setattr(linalg, "BATCH_LEAF", 128)
    matrices = [torch.eye(300), torch.diag(torch.tensor([1.0] * 299 + [-1.0])), torch.eye(300)]
    found, is_right = linalg.inverses_of_positive(matrices, [1.0, 0.0, 0.0], 300)
    assert is_right.tolist() == [True, False, True]
    assert relative(found[0], 0.5 * torch.eye(300)) <= 1e-6
    assert torch.equal(found[2], torch.eye(300))


def test_rounding_of_many_inverses_is_that_of_one(as_gpu, monkeypatch):
    # A condition number of 1e5, and eigenvectors that no block shares.
    monkeypatch.setattr(linalg, "BATCH_LEAF", 128)
    q = torch.linalg.qr(torch.randn(600, 600).double())[0]
    exact = q @ torch.diag(torch.logspace(0, -5, 600).double()) @ q.T
    expected = q @ torch.diag(torch.logspace(0, 5, 600).double()) @ q.T
    alone, _ = linalg.inverse_of_positive(exact.float())
    together, is_right = linalg.inverses_of_positive([exact.float()] * 2, [0.0, 0.0], 600)
    assert is_right.all()
    assert relative(together[1].double(), expected) <= 3 * relative(alone.double(), expected)


ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("shapes", [[(3, 5), (7,), (0, 2), ()], [(16, 8), (64,)]])
def test_each_tensor_is_multiplied_with_its_number(shapes, where):
    values = [torch.randn(shape, device=where) for shape in shapes]
    scales = torch.randn(len(values), device=where)
    expected = [value * scale for value, scale in zip(values, scales, strict=True)]
    places = [torch.full_like(value, torch.nan) for value in values]
    found = multiply_all([value.clone() for value in values], scales, places)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert where == "cpu" or all(a is b for a, b in zip(found, places, strict=True))
    turned = [value.T if value.ndim == 2 else value for value in values]
    apart = [F.pad(each, (0, 1))[:, :-1] if each.ndim == 2 else each.clone() for each in turned]
    for own in (turned, apart):
        found = multiply_all(own, scales, [torch.full_like(each, torch.nan) for each in own])
        for each, value in zip(found, expected, strict=True):
            assert torch.equal(each, value.T if value.ndim == 2 else value)


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
def test_three_products_are_as_good_as_one(monkeypatch, where):
    """A CPU multiplies the parts in float32: what is seen there is that they are the whole."""
    take_for_gpu(monkeypatch, is_gpu=True)
    left, right = (torch.randn(n, m, device=where) for n, m in ((700, 900), (900, 530)))
    exact = left.double() @ right.double() - 1
    found = linalg._multiply_into(-torch.ones(700, 530, device=where), left, right, beta=1)
    with full_float32():
        one = left @ right - 1
    assert relative(found.double(), exact) <= 8 * relative(one.double(), exact)
    high, low = linalg._split(left)
    assert torch.equal(high + low, left)
    assert not (high.view(torch.int32) & 0x1FFF).any()


@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("zeros", ["lower left", "upper left", "lower right", "symmetric"])
@pytest.mark.parametrize("shape", [(590,), (2, 1100)])
def test_strips_of_a_triangle_are_its_product(monkeypatch, where, zeros, shape):
    take_for_gpu(monkeypatch, is_gpu=True)
    left, right = (torch.randn(*shape, shape[-1], device=where) for _ in range(2))
    match zeros:
        case "lower left":
            left = left.tril()
        case "upper left":
            left = left.mT.tril().mT  # not in one piece
        case "lower right":
            right = right.tril()
        case "symmetric":
            right = left.mT
    out = torch.randn_like(left)
    expected = 2 * out.double() - left.double() @ right.double()
    linalg._multiply_into(out, left, right, alpha=-1, beta=2, zeros=zeros)
    if zeros == "symmetric":
        out, expected = out.tril(), expected.tril()
    assert relative(out.double(), expected) <= 1e-5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("where", [pytest.param("cuda", marks=ON_CUDA)])
def test_a_step_without_an_update_reads_nothing_of_the_gpu(where):
    model = Transformer(d=16, d_ff=24).to(where)
    kfac = unison.KFAC(model, KFACConfig(update_every=10, burn_in=0, min_layer_size=0))
    for number in range(4):
        logits = model(torch.randint(0, 11, (4, 5), device=where))
        if kfac.wants_statistics:
            kfac.sample(logits).backward()
        labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], device=where)
        F.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
        torch.cuda.set_sync_debug_mode("error" if number == 3 else "default")
        try:
            kfac.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
