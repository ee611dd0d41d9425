"""Every kernel compiles for an H100 or H200, which needs no GPU, and reads memory wide."""

import json

import pytest

from tests.kernels.interpreted import printed_by
from unison.kernels import factored

COMPILED = """
import json, re, sys, warnings
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

warnings.simplefilter("ignore")
POINTERS = {
    "table": "*i64", "tensors": "*i32", "first_tiles": "*i64", "weights": "*fp32",
    "recipes": "*i64", "coefficients": "*fp64", "parts": "*fp32",
    "keys": "*i64", "order": "*i64", "layers": "*i32", "squares": "*fp32", "masses": "*fp32",
    "out": "*fp32",
    "g": "*bf16", "x": "*bf16", "left": "*bf16", "right": "*bf16",
}
FLOATS = ("divisor", "factor", "eps")

def compiled(kernel, options, types=(), **constants):
    types = {**POINTERS, **dict.fromkeys(FLOATS, "fp32"), **dict(types)}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    # Pointers and strides as they are: multiples of 16. Addresses in tables are none of them.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in ("rows", "columns", "features")
        or re.fullmatch("s[lrgxot]*[bt]", name)
    }
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, places, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)

def many_cases():
    from unison.kernels import multi_tensor_triton as k
    plain = {"enable_fp_fusion": False}
    for aligned in (True, False):
        at_once = {"AT_ONCE": k._SAMPLES_AT_ONCE, "IS_ONCE": aligned}
        yield f"squares {aligned}", k.squares_kernel, {"num_warps": 8}, {}, {
            "VALUE": tl.bfloat16, "ALIGNED": aligned, "TILE": k._SQUARE_TILE}
        yield f"release sum {aligned}", k.release_kernel, {"num_warps": 8, **plain}, {}, {
            "VALUE": tl.bfloat16, "DTYPE": tl.bfloat16, "ADD": False, "ALIGNED": aligned,
            "TILE": k._COMBINE_TILE, **at_once}
        yield f"release noisy {aligned}", k.noisy_kernel, {"num_warps": 1, **plain}, {}, {
            "VALUE": tl.int32, "DTYPE": tl.bfloat16, "ALIGNED": aligned, "HAS_SUM": True,
            "ADAMW": aligned, **at_once}
        yield f"release open {aligned}", k.open_kernel, {"num_warps": 4, **plain}, {}, {
            "VALUE": tl.bfloat16, "DTYPE": tl.bfloat16, "HAS_SUM": aligned, "ADAMW": aligned,
            "AT_ONCE": k._OPEN_AT_ONCE}
    yield "add", k.release_kernel, {"num_warps": 8, **plain}, {}, {
        "VALUE": tl.float32, "DTYPE": tl.float32, "ADD": True, "ALIGNED": True,
        "TILE": k._COMBINE_TILE, **at_once}
    yield "add integers", k.release_kernel, {"num_warps": 8, **plain}, {}, {
        "VALUE": tl.float32, "DTYPE": tl.int32, "ADD": True, "ALIGNED": True,
        "TILE": k._COMBINE_TILE, **at_once}
    yield "total", k.total_kernel, {"num_warps": 4}, {"out": "*fp64"}, {"BLOCK": 256}

def other_cases():
    import torch
    from unison.kernels import multi_tensor_triton as affine
    from unison.kernels import lookup_triton as lookup
    from unison.kernels import products_triton as products
    for add in (True, False):
        yield f"rows {add}", lookup.rows_kernel, {"num_warps": 4}, {
            "table": "*bf16" if add else "*fp32"}, {"ADD": add, "FEATURES": 2048}
    for name, kind in (("weighted rows", "*fp32"), ("weighted rows integers", "*i32")):
        yield name, lookup.weighted_kernel, {"num_warps": 4}, {"out": kind}, {"FEATURES": 2048}
    yield "affine", affine._sums_kernel, {"num_warps": 8}, {}, {
            "CENTRED": True, "OFFSET": True, "TOKENS": affine._TOKENS, "ROWS": affine._ROWS,
            "FEATURES": 2048}
    yield "columns", affine._columns_kernel, {"num_warps": 8}, {}, {
        "TOKENS": 128, "STEPS": 4, "FEATURES": affine._COLUMNS}
    yield "split", products.split_kernel, {"num_warps": 4}, {
        "value": "*fp32", "high": "*fp32", "low": "*fp32"}, {"BLOCK": 1024}
    for dtype, pointer in ((torch.bfloat16, "*bf16"), (torch.float32, "*fp32")):
        sides = {"left": pointer, "right": pointer}
        tiles = products.choose_tiles(1280, 5120, dtype) | {"TMA_L": False,
                 "TMA_R": False, "EVEN_L": False, "EVEN_R": False, "PRECISION": "ieee"}
        options = {name: tiles.pop(name) for name in ("num_warps", "num_stages")}
        for store in (True, False):
            yield f"per sample {pointer} {store}", products._per_sample_kernel, options, {
                **sides, "out": pointer}, {**tiles, "STORE": store}
        for kind in ("*fp32", "*i32"):
            yield f"weighted {pointer} {kind}", products._weighted_kernel, options, {
                **sides, "out": kind}, {**tiles, "ADD": kind == "*i32"}
        is_half = dtype == torch.bfloat16
        yield f"gram {pointer}", products._gram_kernel, {"num_warps": 8 if is_half else 4}, {
            **sides, "squares": "*fp64"}, {
            "PRECISION": "ieee", "RUN": products.run_of(dtype), "BT": 128 if is_half else 64,
            "BK": 64 if is_half else 32}

def factored_cases():
    from unison.kernels import factored_triton as k
    tiles = {"BM": k._ROWS, "BN": k._COLUMNS, "BK": k._TOKENS}
    for total, add in ((tl.float32, False), (tl.int32, False), (tl.int32, True)):
        yield f"factored weighted {total} {add}", k._weighted_kernel, {
            "num_warps": 8, "num_stages": 3}, {}, {
            "DTYPE": tl.bfloat16, "TOTAL": total, "ADD": add, **tiles}
    wide = {"parts": "*fp64"}
    for tokens, num_warps in ((128, 8), (64, 4)):
        options = {"num_warps": num_warps, "num_stages": 4}
        yield f"factored gram {tokens}", k._gram_kernel, options, wide, {
            "DTYPE": tl.bfloat16, "BT": tokens, "BK": k._STEP}

found, wanted = {}, sys.argv[1:]
for cases in (many_cases, other_cases, factored_cases):
    for name, kernel, options, types, constants in cases():
        if not any(name == each or each.endswith("*") and each[:-1] in name for each in wanted):
            continue
        made = compiled(kernel, options, types.items(), **constants)
        ptx = made.asm["ptx"]
        counts = {"wide": "ld.global.v4", "tensor": "wgmma.mma_async", "atomic": "atom.",
                  "described": "cp.async.bulk.tensor"}
        found[name] = {key: ptx.count(text) for key, text in counts.items()}
        found[name]["fused"] = len(re.findall(r"fma[.a-z]*\\.f64", ptx))
        found[name]["shared"] = made.metadata.shared
print(json.dumps(found))
"""


def compiled(*names: str) -> dict[str, dict[str, int]]:
    """Return what is in the code of the named kernels; a star stands for the rest of a name."""
    return json.loads(printed_by(COMPILED, *names).splitlines()[-1])


RELEASES = ("release sum True", "release noisy True", "columns")


@pytest.mark.parametrize(
    "names", [("squares True", "affine"), pytest.param(RELEASES, marks=pytest.mark.full)]
)
def test_aligned_tensors_are_read_wide(names):
    """The compiler has to believe what the table says, or it would load one by one."""
    found = compiled(*names)
    assert len(found) == len(names)
    for name, counts in found.items():
        assert counts["wide"] > 0, name


@pytest.mark.full
@pytest.mark.parametrize(
    ("names", "count"),
    [
        (("squares*", "total", "add*"), 5),
        (("release*",), 4),
        (("rows*", "affine", "split"), 6),
        (("columns",), 1),
        (("*bf16*",), 5),
        (("gram *fp32", "per sample *fp32*", "weighted *fp32*"), 5),
        (("factored*",), 5),
    ],
    ids=["squares", "release", "rows", "columns", "bf16", "fp32", "factored"],
)
def test_all_kernels_compile(names, count):
    found = compiled(*names)
    assert len(found) == count, found.keys()
    for name, counts in found.items():
        # A float that is added atomically is added in any order.
        assert counts["atomic"] == 0, name
        assert counts["shared"] <= 227 << 10, name
        if name.startswith("release"):
            # They round once where the definition rounds twice. The first look at noise has eight
            # for each of a thread's twelve elements, which its bound allows for.
            assert counts["fused"] == (96 if "noisy" in name else 0), name
        if name.endswith(("True", "False")) and name.startswith(("squares", "release")):
            assert (counts["wide"] > 0) == name.endswith("True"), name
        if "*bf16" in name or name.startswith("factored"):
            assert counts["tensor"] > 0, name
        if name.startswith("factored"):
            assert counts["described"] > 0, name  # the hardware loads whole tiles
            assert counts["shared"] <= factored._SHARED, name
