"""Every backend against the reference, to the bit, for every distribution and both ciphers."""

import re
from dataclasses import replace

import pytest
import torch

from tests.kernels.interpreted import interpreted, printed_by
from unison.errors import BadInput
from unison.kernels import random
from unison.kernels.random import (
    OUTPUT_DTYPES,
    Cipher,
    Distribution,
    Recipe,
    fill_rows,
    secure_floats,
    using_backend,
)

NUMBERS: dict[Distribution, tuple[tuple[float, ...], tuple[int, ...]]] = {
    Distribution.WORDS: ((), ()),
    Distribution.UNIFORM24: ((-1.0, 2.5, -1.0, 1.375), ()),
    Distribution.UNIFORM53: ((-1.0, 2.5, -1.0, 1.375), ()),
    Distribution.NORMAL: ((0.1, 1.3), ()),
    Distribution.TRUNCATED: ((0.1, 1.3, -2.0, 2.0), (123456789, 3123456789)),
    # One value in 150 is decided by more bits; usually it is one in 400.
    Distribution.SECURE_NORMAL: ((0.7 * 2.0**20, 2.0**-20, 0.4995), ()),
    Distribution.BERNOULLI: ((), (2**60,)),
    Distribution.INTEGERS: ((), (-5, 2**62 + 12345)),
}
CASES = [(cipher, kind, dtype) for kind in Distribution for cipher in Cipher
         for dtype in OUTPUT_DTYPES[kind]
         if cipher is Cipher.CHACHA20 or kind is not Distribution.SECURE_NORMAL]  # fmt: skip
ROWS = [([0], 5003), ([5 + (1 << 40)], 2050), ([3, 1 << 34, 77], 123), ([9, 4, 1 << 50], 1)]


def recipe_of(cipher: Cipher, kind: Distribution) -> Recipe:
    key = tuple((i * 2654435761) % 2**32 for i in range(1, 1 + cipher.num_key_words))
    return Recipe(cipher, key, kind, *NUMBERS[kind])


def drawn(backend: str, recipe: Recipe, dtype: torch.dtype, starts: list[int], run: int):
    out = torch.empty(len(starts) * run, dtype=dtype)
    with using_backend(backend):
        fill_rows(out, recipe, torch.tensor(starts), run)
    return out


def test_every_distribution_is_covered():
    assert set(NUMBERS) == set(Distribution) == set(OUTPUT_DTYPES)


@pytest.mark.parametrize(("cipher", "kind", "dtype"), CASES)
def test_numba_equals_reference(cipher, kind, dtype):
    recipe = recipe_of(cipher, kind)
    for starts, run in ROWS:
        expected = drawn("reference", recipe, dtype, starts, run)
        assert torch.equal(drawn("numba", recipe, dtype, starts, run), expected)


# Elements of `recipe_of`'s stream that the table alone gets wrong on the finest grid: near to the
# middle of two values and, the last, so far in the tail that 31 bits say nothing.
OPEN_ONES = (13, 1013, 7803)


def fine_recipe(distance: float | None = None) -> Recipe:
    """The finest grid, with the usual distance unless another one is given."""
    scale, spacing, usual = secure_floats(1.0, 2.0**-31)
    floats = (scale, spacing, usual if distance is None else distance)
    return replace(recipe_of(Cipher.CHACHA20, Distribution.SECURE_NORMAL), floats=floats)


@pytest.mark.parametrize("element", OPEN_ONES)
def test_open_values_are_decided_exactly(element):
    recipe, starts = fine_recipe(), [element - 10]
    expected = drawn("reference", recipe, torch.float64, starts, 2000)
    words = random.element_words(recipe, torch.tensor([element]), 1)
    by_table, _ = random.coarse_steps(words[0] & 0x7FFFFFFF, 2.0**31, 0.5)
    assert float(by_table) * 2.0**-31 != float(expected[10].abs())
    # Many are open in the second case, all of them, too many for a list, in the last.
    for distance in (None, 0.48, -1.0):
        found = drawn("numba", fine_recipe(distance), torch.float64, starts, 2000)
        assert torch.equal(found, expected)


@pytest.mark.full
@pytest.mark.parametrize(("cipher", "kind", "dtype"), CASES)
def test_numba_equals_reference_on_many(cipher, kind, dtype):
    recipe = recipe_of(cipher, kind)
    starts, run = [(1 << 33) + 1], 2_000_003
    expected = drawn("reference", recipe, dtype, starts, run)
    assert torch.equal(drawn("numba", recipe, dtype, starts, run), expected)


@pytest.mark.parametrize("cipher", Cipher)
@pytest.mark.parametrize(("starts", "run"), [([11], 300_001), (list(range(0, 900_000, 700)), 333)])
def test_threads_do_not_change_a_bit(cipher, starts, run):
    recipe = recipe_of(cipher, Distribution.NORMAL)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(drawn("numba", recipe, torch.float32, starts, run))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_half_precision_is_float32_rounded_once_more():
    recipe = recipe_of(Cipher.PHILOX, Distribution.NORMAL)
    wide = drawn("reference", recipe, torch.float32, [7], 4000)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(drawn("numba", recipe, dtype, [7], 4000), wide.to(dtype))


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.full)])
@interpreted
def test_triton_equals_reference_in_the_interpreter(is_full):
    for element in OPEN_ONES if is_full else OPEN_ONES[:1]:
        recipe = fine_recipe()
        expected = drawn("reference", recipe, torch.float64, [element - 3], 7)
        assert torch.equal(drawn("triton", recipe, torch.float64, [element - 3], 7), expected)
    seen = set()
    for cipher, kind, dtype in CASES:
        if dtype == torch.bfloat16:
            continue  # Triton's interpreter truncates float32 to bfloat16; hardware rounds
        if not is_full and (cipher, kind) in seen:
            continue
        seen.add((cipher, kind))
        rows = [([5 + (1 << 40)], 701), ([32], 400), ([3, 1 << 34, 77], 23)]
        for starts, run in rows if is_full else [([5 + (1 << 40), 16], 53)]:
            recipe = recipe_of(cipher, kind)
            expected = drawn("reference", recipe, dtype, starts, run)
            found = drawn("triton", recipe, dtype, starts, run)
            assert torch.equal(found, expected), (cipher, kind, dtype, starts)


COMPILED = """
import re, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from unison.kernels.random import Cipher, Distribution, Recipe
from unison.kernels import random_triton as kernels
for cipher, kind in [(Cipher.PHILOX, Distribution.NORMAL), (Cipher.PHILOX, Distribution.UNIFORM24)]:
    recipe = Recipe(cipher, tuple(range(cipher.num_key_words)), kind, (1.0, 1.0, 1.0))
    constants = kernels.compile_options(recipe, 1 << 20, True)
    options = {name: constants.pop(name) for name in ("enable_fp_fusion", "num_warps")}
    signature = {"out": "*fp32", "numbers": "*i64", "starts": "*i64", "coefficients": "*fp64",
                 "run": "i32", "tiles_per_row": "i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernels._fill, signature=signature, constexprs=constants)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    counts = [len(re.findall(name + r"[.a-z]*\\.f64", ptx)) for name in ("fma", "mul")]
    print(kind.name, *counts)
"""


def test_triton_compiles_without_fused_multiply_adds():
    lines = printed_by(COMPILED).splitlines()
    assert len(lines) == 2
    for line in lines:
        _, num_fused, num_products = line.split()
        assert int(num_fused) == 0
        assert int(num_products) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("cipher", "kind", "dtype"), CASES)
def test_triton_equals_reference_on_the_gpu(cipher, kind, dtype):
    recipe = recipe_of(cipher, kind)
    for starts, run in [*ROWS, ([1 << 35], 1_000_003)]:
        out = torch.empty(len(starts) * run, dtype=dtype, device="cuda")
        fill_rows(out, recipe, torch.tensor(starts), run)
        assert torch.equal(out.cpu(), drawn("reference", recipe, dtype, starts, run))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("element", OPEN_ONES)
def test_open_values_are_decided_exactly_on_the_gpu(element):
    expected = drawn("reference", fine_recipe(), torch.float64, [element - 10], 2000)
    for distance in (None, 0.2):
        out = torch.empty(2000, dtype=torch.float64, device="cuda")
        fill_rows(out, fine_recipe(distance), torch.tensor([element - 10]), 2000)
        assert torch.equal(out.cpu(), expected)


def test_operation_passes_opcheck():
    recipe = recipe_of(Cipher.PHILOX, Distribution.NORMAL)
    out = torch.empty(20)
    arguments = (out, recipe.pack(), torch.tensor([3, 50]), 10)
    torch.library.opcheck(torch.ops.unison.random_fill.default, arguments)


def test_fake_tensors_are_left_alone():
    from torch._subclasses.fake_tensor import FakeTensorMode

    recipe = recipe_of(Cipher.PHILOX, Distribution.NORMAL)
    packed, starts = recipe.pack(), torch.tensor([0])
    with FakeTensorMode(allow_non_fake_inputs=True):
        out = torch.empty(1 << 40)
        torch.ops.unison.random_fill(out, packed, starts, 1 << 40)
    assert out.shape == (1 << 40,)


def test_meta_tensors_are_left_alone():
    out = torch.empty(1 << 40, device="meta")
    fill_rows(out, recipe_of(Cipher.PHILOX, Distribution.NORMAL), torch.tensor([0]), 1 << 40)


def test_missing_numba_is_said_once_and_changes_nothing(monkeypatch):
    recipe = recipe_of(Cipher.PHILOX, Distribution.NORMAL)
    expected = drawn("reference", recipe, torch.float32, [0], 100)
    monkeypatch.setattr(random, "find_spec", lambda package: None)
    monkeypatch.setattr(random, "PATIENCE", 0)
    random._is_installed.cache_clear()
    try:
        out = torch.empty(100)
        with pytest.warns(RuntimeWarning, match="pip install numba"):
            fill_rows(out, recipe, torch.tensor([0]), 100)
        fill_rows(out, recipe, torch.tensor([0]), 100)  # a second warning would be an error
        assert torch.equal(out, expected)
    finally:
        random._is_installed.cache_clear()


def test_small_requests_do_not_wait_for_the_compiler(monkeypatch):
    monkeypatch.setattr(random, "_num_served", 0)
    assert not random.is_numba_chosen(1000)
    assert random.is_numba_chosen(random.PATIENCE)


def test_nor_are_many_small_requests_left_to_the_reference(monkeypatch):
    monkeypatch.setattr(random, "_num_served", 0)
    num_waited = next(i for i in range(random.PATIENCE) if random.is_numba_chosen(1))
    assert 100 < num_waited < 1000


@pytest.mark.parametrize(("kind", "dtype"), [
    (Distribution.NORMAL, torch.int64), (Distribution.SECURE_NORMAL, torch.bfloat16),
    (Distribution.BERNOULLI, torch.float32), (Distribution.UNIFORM24, torch.float64),
])  # fmt: skip
def test_wrong_dtype_is_named(kind, dtype):
    with pytest.raises(BadInput, match=re.escape(str(dtype))):
        fill_rows(torch.empty(4, dtype=dtype), recipe_of(Cipher.PHILOX, kind), torch.tensor([0]), 4)


def test_wrong_shapes_raise():
    recipe = recipe_of(Cipher.PHILOX, Distribution.NORMAL)
    with pytest.raises(BadInput, match="2 rows of 3"):
        fill_rows(torch.empty(5), recipe, torch.tensor([0, 9]), 3)
    with pytest.raises(BadInput, match="contiguous"):
        fill_rows(torch.empty(4, 4).t()[:, :2], recipe, torch.tensor([0]), 8)
    with pytest.raises(BadInput, match="int64"):
        fill_rows(torch.empty(4), recipe, torch.tensor([0.0]), 4)


def test_recipe_hides_its_key():
    recipe = recipe_of(Cipher.CHACHA20, Distribution.NORMAL)
    assert not any(str(word) in repr(recipe) for word in recipe.key)
    again = Recipe.unpack(recipe.pack())
    assert again.key == recipe.key
    assert again.floats[:2] == recipe.floats


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of torch 2.11
def test_profiler_does_not_see_the_key():
    recipe = recipe_of(Cipher.CHACHA20, Distribution.NORMAL)
    with torch.profiler.profile(record_shapes=True, with_stack=False) as profile:
        fill_rows(torch.empty(8), recipe, torch.tensor([0]), 8)
    for event in profile.events() or []:
        for word in recipe.key:
            assert str(word) not in str(event.concrete_inputs)
