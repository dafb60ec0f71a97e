"""The regression grid: correctness-only rows over the envelope that upstream and we share.

Shapes: batch {1, 2, 4} x tokens {6, 33, 128, 257} x channels {512, 1024, 1536, 3072} x {float16, bfloat16, float32}.

- Scale and shift: 12 pairs of layouts (`LAYOUTS`), the frames where they divide the tokens; scale_constant alternates
  between 1 and 0. Mixed dtypes and strided operands, the scale alone and the shift alone: batch {1, 2} x the tokens,
  1536 channels.
- select01, both ops: index {int32, int64, bool} x with and without weight and bias. Rows of one modulation table
  (stride 6 * channels) at batch 1: with more, upstream makes the rows contiguous and still uses the old strides.

Two scalars occur together only as zeros with scale_constant 1: upstream reads on the host, without waiting, whether
both are zero (docs/dispatch.md), so that its own result for other scalars depends on timing. `tests/` has those.

Thinning for machines without a GPU (`thin`): 6 tokens, batch 2, 1536 channels (a tile and a half, so masked), bfloat16
and float32: 56 of 3544 rows, with every layout, index and affine, mixed dtypes and the strided scale. Batch and tokens
only set how many programs there are; `tests/` has float16.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

SCALE_SHIFT = "fuse_scale_shift_kernel"
SELECT01 = "fuse_layernorm_scale_shift_gate_select01_kernel"
RESIDUAL_SELECT01 = "fuse_residual_layernorm_scale_shift_gate_select01_kernel"
MODULATION = ("scale0", "shift0", "gate0", "scale1", "shift1", "gate1")
BATCHES = (1, 2, 4)
TOKENS = (6, 33, 128, 257)
CHANNELS = (512, 1024, 1536, 3072)
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
FRAMES = {6: 3, 33: 3, 128: 4, 257: 1}
"""Tokens -> frames of the [B, F, 1, C] layout. They also divide the tokens of rows shrunk for the CPU."""
LAYOUTS = (
    ("BC", "BC"),
    ("11C", "11C"),
    ("BLC", "BLC"),
    ("11C", "BLC"),
    ("BLC", "11C"),
    ("1C", "C"),
    ("B1C", "1LC"),
    ("BL1", "BLC"),
    ("scalar", "BLC"),
    ("BC", "one"),
    ("zero", "zero"),
    ("BF1C", "BLC"),
)
"""(scale, shift). `scalar` is 0-D, `one` is [1], `zero` is 0-D and zero."""
MIXED: tuple[tuple[DType, DType, int], ...] = (
    ("bfloat16", "float32", 1),
    ("float16", "float32", 1),
    ("float32", "bfloat16", 0),
)
"""(dtype of x, dtype of scale, scale_constant). Upstream rounds 1 + scale to bfloat16: too coarse for float32 x."""
THIN_BATCH, THIN_TOKENS, THIN_CHANNELS = 2, 6, 1536


def grid() -> Iterator[Workload]:
    """All rows; ids name the op's short form, the shape, the dtype and what varies."""
    for batch, tokens, channels, dtype in product(BATCHES, TOKENS, CHANNELS, DTYPES):
        for number, layouts in enumerate(LAYOUTS):
            yield _scale_shift(batch, tokens, channels, dtype, layouts, constant=1 if "zero" in layouts else number % 2)
        for op, index, affine in product((SELECT01, RESIDUAL_SELECT01), ("int32", "int64", "bool"), (False, True)):
            yield _select01(op, batch, tokens, channels, dtype, index, affine=affine)
    for batch, tokens in product((1, 2), TOKENS):
        for x, other, constant in MIXED:
            for layouts in (("11C", "BLC"), ("BLC", "BLC"), ("BF1C", "BLC")):
                yield _scale_shift(batch, tokens, THIN_CHANNELS, x, layouts, constant=constant, scale_dtype=other)
        yield _scale_shift(
            batch, tokens, THIN_CHANNELS, "bfloat16", ("chunk", "BLC"), constant=0, scale_dtype="float32"
        )
        yield _scale_shift(batch, tokens, THIN_CHANNELS, "bfloat16", ("BLC", "chunk"), constant=1)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    shape = (THIN_BATCH, THIN_TOKENS, THIN_CHANNELS)
    return [row for row in rows if row.inputs["x"].shape == shape and row.inputs["x"].dtype != "float16"]


def _scale_shift(
    batch: int,
    tokens: int,
    channels: int,
    dtype: DType,
    layouts: tuple[str, str],
    *,
    constant: int,
    scale_dtype: DType | None = None,
) -> Workload:
    def operand(layout: str, dtype: DType) -> TensorSpec:
        if layout == "zero":
            return TensorSpec(shape=(), dtype=dtype, fill="randint", high=1)
        if layout == "chunk":  # one of the six chunks of a [B, L, 6, C] tensor
            strides = (tokens * 6 * channels, 6 * channels, 1)
            return TensorSpec(shape=(batch, tokens, channels), dtype=dtype, stride=strides)
        if layout in ("scalar", "one"):
            return TensorSpec(shape=() if layout == "scalar" else (1,), dtype=dtype)
        sizes = {"B": batch, "L": tokens, "C": channels, "F": FRAMES[tokens], "1": 1}
        return TensorSpec(shape=tuple(sizes[letter] for letter in layout), dtype=dtype)

    scale, shift = layouts
    parts = [f"{batch}x{tokens}x{channels}", scale, shift, f"constant{constant}", dtype]
    return Workload(
        id="-".join(parts + ([f"scale.{scale_dtype}"] if scale_dtype else [])),
        op=SCALE_SHIFT,
        inputs={
            "x": TensorSpec(shape=(batch, tokens, channels), dtype=dtype),
            "scale": operand(scale, scale_dtype or dtype),
            "shift": operand(shift, dtype),
        },
        scalars={"scale_constant": constant},
    )


def _select01(op: str, batch: int, tokens: int, channels: int, dtype: DType, index: DType, *, affine: bool) -> Workload:
    stride = (6 * channels, 1) if batch == 1 else None
    row = TensorSpec(shape=(batch, tokens, channels), dtype=dtype)
    inputs = {"x": row} | ({"residual": row, "residual_gate": row} if op == RESIDUAL_SELECT01 else {})
    inputs |= {name: TensorSpec(shape=(channels,), dtype=dtype) for name in ("weight", "bias") if affine}
    inputs |= {name: TensorSpec(shape=(batch, channels), dtype=dtype, stride=stride) for name in MODULATION}
    inputs["index"] = TensorSpec(shape=(batch, tokens), dtype=index, fill="randint", high=2)
    parts = ["residual-select01" if op == RESIDUAL_SELECT01 else "select01", f"{batch}x{tokens}x{channels}", dtype]
    parts += [index] + ["affine"] * affine
    return Workload(id="-".join(parts), op=op, inputs=inputs, scalars={"eps": 1e-6})
