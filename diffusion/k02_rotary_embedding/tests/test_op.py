"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch

from kda_runtime.checks import given

from ..baseline import eager
from ..bench import grid
from ..solution import (
    apply_ltx2_split_rotary_emb,
    apply_rotary_embedding,
    common,
    launches,
    ltx2_rotary,
    rotary,
    why_not,
)
from .cases import assert_matches, halves, pairs

PAIRS, HALVES = "apply_rotary_embedding", "apply_ltx2_split_rotary_emb"
MODULES = {PAIRS: rotary, HALVES: ltx2_rotary}


# --- the plain path and the eager arm


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [64, 128, 192])
@pytest.mark.parametrize("interleaved", [False, True])
def test_plain_path_and_eager_arm_of_pairs(dtype, columns, interleaved):
    for shape in ((5, 6, 128), (2, 5, 3, 128)):
        tensors = pairs(shape, dtype, columns=columns, rows=8)
        assert_matches(apply_rotary_embedding, tensors, interleaved=interleaved)
        assert_matches(eager.apply_rotary_embedding, tensors, interleaved=interleaved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("view", [True, False])
def test_plain_path_and_eager_arm_of_halves(dtype, view):
    tensors = halves(dtype=dtype, view=view)
    assert_matches(apply_ltx2_split_rotary_emb, tensors)
    assert_matches(eager.apply_ltx2_split_rotary_emb, tensors)


def test_every_other_element():
    tensors = pairs((5, 6, 256))
    tensors[0] = tensors[0][..., ::2]
    tensors[1:] = [table[:, :64] for table in tensors[1:]]
    assert_matches(apply_rotary_embedding, tensors)


# --- what the kernels do not cover


def gap(tensors):
    tensors[0] = torch.stack((tensors[0], tensors[0]), dim=-1)[..., 0]


def wide(tensors):
    tensors[0] = tensors[0].double()


def recording(tensors):
    tensors[1] = torch.nn.Parameter(tensors[1])


def negated(tensors):
    tensors[2] = torch._neg_view(tensors[2])


def huge_head(tensors):
    tensors[:] = pairs((1, 1, 8192))


def huge_batch(tensors):
    tensors[:] = pairs((65_536, 1, 1, 2))


def table_gap(tensors):
    tensors[2] = torch.stack((tensors[2], tensors[2]), dim=-1)[..., 0]


def mixed(tensors):
    tensors[1:] = [table.half() for table in tensors[1:]]


@pytest.mark.parametrize(
    ("op", "change", "reason"),
    [
        (PAIRS, gap, "x has stride 2 in its last dimension"),
        (HALVES, gap, "x has stride 2 in its last dimension"),
        (PAIRS, wide, "x has dtype torch.float64"),
        (PAIRS, recording, "cos requires gradients"),
        (HALVES, recording, "cos requires gradients"),
        (PAIRS, negated, "sin is a negated or conjugated view"),
        (HALVES, negated, "sin is a negated or conjugated view"),
        (PAIRS, huge_head, "the head size is 8192"),
        (PAIRS, huge_batch, "the batch is 65536"),
        (HALVES, table_gap, "sin has stride 2 in its last dimension"),
        (HALVES, mixed, "x has dtype torch.bfloat16 and cos torch.float16"),
    ],
)
def test_what_the_kernels_do_not_cover(op, change, reason):
    tensors = pairs() if op == PAIRS else halves()
    change(tensors)
    call = MODULES[op].Call(*tensors)
    assert reason in MODULES[op]._uncovered(call)
    assert launches(op, given(call), {}) == []


# --- what has no meaning


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(6, 128), r"x: expected \[tokens, heads, head size\] or \[batch, ...\], got \[6, 128\]"),
        (0, torch.zeros(1, 1, 5, 6, 128), r"x: expected .*, got \[1, 1, 5, 6, 128\]"),
        (0, torch.zeros(5, 6, 127), r"x: expected an even head size, got 127"),
        (1, torch.zeros(4, 64), r"cos: expected at least 5 rows, one per token, got 4"),
        (1, torch.zeros(5, 32), r"cos: expected at least 64 columns, one per pair, got 32"),
        (1, torch.zeros(1, 5, 64), r"cos: expected two dimensions \[tokens, columns\], got \[1, 5, 64\]"),
        (2, torch.zeros(5, 128), r"sin: expected shape \[5, 64\], as cos, got \[5, 128\]"),
    ],
)
def test_meaningless_pairs_are_named(position, value, message):
    tensors = pairs()
    tensors[position] = value
    for call in (apply_rotary_embedding, lambda *args: why_not(PAIRS, *args)):
        with pytest.raises(ValueError, match=message):
            call(*tensors)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (
            0,
            torch.zeros(5, 2048),
            r"x: expected three dimensions \[batch, tokens, heads \* head size\], got \[5, 2048\]",
        ),
        (0, torch.zeros(2, 5, 1024), r"x: expected shape \[2, 5, 2048\], from cos, got \[2, 5, 1024\]"),
        (1, torch.zeros(2, 32, 5), r"cos: expected four dimensions .*, got \[2, 32, 5\]"),
        (1, torch.zeros(2, 32, 4, 32), r"x: expected shape \[2, 4, 2048\], from cos, got \[2, 5, 2048\]"),
        (2, torch.zeros(2, 32, 5, 64), r"sin: expected shape \[2, 32, 5, 32\], as cos, got \[2, 32, 5, 64\]"),
    ],
)
def test_meaningless_halves_are_named(position, value, message):
    tensors = halves()
    tensors[position] = value
    for call in (apply_ltx2_split_rotary_emb, lambda *args: why_not(HALVES, *args)):
        with pytest.raises(ValueError, match=message):
            call(*tensors)


# --- how calls become launches

X = torch.empty(0, dtype=torch.bfloat16)  # 8 elements are a vector


@pytest.mark.parametrize(
    ("heads", "width", "config", "expected"),
    [
        # 4 warps hold 8 heads of 128 at 8 elements a thread: (warps, heads of a tile, tiles, parts)
        (24, 128, common.Config(4, 4), (4, 8, 3, 1)),
        (32, 128, common.Config(4, 3), (4, 8, 2, 2)),
        (30, 128, common.Config(4, 1), (4, 8, 1, 4)),
        (1, 128, common.Config(4, 4), (1, 2, 1, 1)),
        (3, 128, common.Config(4, 4), (2, 4, 1, 1)),
        (1, 4096, common.Config(4, 4), (4, 1, 1, 1)),
    ],
)
def test_how_heads_are_cut(heads, width, config, expected):
    cut = common.cut(config, rotary.rotary_kernel, X, tokens=7, heads=heads, width=width)
    assert (cut.warps, cut.heads, cut.tiles, cut.parts) == expected


@pytest.mark.parametrize(("tokens", "most", "expected"), [(27030, 4, 3), (24576, 4, 4), (7, 4, 1), (2, 4, 2)])
def test_tokens_of_a_program_divide_all_tokens(tokens, most, expected):
    cut = common.cut(common.Config(4, 1, tokens=most), rotary.rotary_kernel, X, tokens, heads=8, width=64)
    assert cut.tokens == expected


def test_token_counts_compile_nothing_new():
    def variant(op, make, **shape):
        tensors = [tensor.to("meta") for tensor in make(**shape)]
        (launch,) = launches(op.__name__, dict(zip(("x", "cos", "sin"), tensors, strict=True)), {})
        return launch.variant

    counts = (5, 6, 64, 77)
    assert len({variant(apply_rotary_embedding, pairs, shape=(2, n, 8, 128)) for n in counts}) == 1
    assert len({variant(apply_ltx2_split_rotary_emb, halves, tokens=n) for n in counts}) == 1


def test_the_thinned_grid_keeps_every_dim_layout_and_dtype():
    def kinds(rows):
        return {
            (row.op, row.inputs["x"].dtype, row.inputs["cos"].dtype, row.inputs["cos"].shape[-1], row.id.split("-")[-1])
            for row in rows
        }

    missing = kinds(grid.grid()) - kinds(grid.thin(grid.grid()))
    assert {kind for kind in missing if kind[3] != 3} == set()  # but LTX2's single head of 6


# --- on a GPU


@pytest.mark.gpu
class TestOnGpu:
    def test_flag_and_table_width_are_part_of_the_signature(self):
        tensors = pairs(columns=128, device="cuda")
        for interleaved in (False, True, False, True):
            assert_matches(apply_rotary_embedding, tensors, interleaved=interleaved)

    def test_more_elements_than_32_bits_count(self):
        x = torch.zeros(1, 2**15 + 1, 512, 128, dtype=torch.bfloat16, device="cuda")  # 2^31 + 2^16, 4 GiB
        x[0, -1] = 1
        cos = torch.full((2**15 + 1, 64), 0.5, device="cuda")
        out = apply_rotary_embedding(x, cos, torch.zeros_like(cos))
        assert torch.equal(out[0, -1], x[0, -1] * 0.5)
        assert not out[0, :-1:1024].any()
