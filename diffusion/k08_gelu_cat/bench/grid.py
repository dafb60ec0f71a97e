"""The regression grid: correctness-only rows over the op's whole envelope.

Batch {1, 2, 4} x tokens {1, 33, 128, 257, 1055} x widths of attn and mlp (`WIDTHS`) x {float16, bfloat16, float32} x
layouts (`LAYOUTS`): mlp contiguous (flux), mlp after q, k and v in one projection (hunyuanvideo), attn as a stretch of
columns of a wider tensor, and both of these. Also rows of two and four dimensions (`SHAPES`).

Widths: the models' own, 3072 + 12288; hunyuanvideo's shares of two GPUs; Hunyuan3D's; some that no vector divides.

Thinning for machines without a GPU (`thin`): batch 2, up to 33 tokens, and of the widths the four smallest; all dtypes
and layouts, and the rows of other dimensions.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

BATCHES = (1, 2, 4)
TOKENS = (1, 33, 128, 257, 1055)
WIDTHS = ((3072, 12288), (1536, 6144), (1024, 4096), (512, 2048), (1032, 24), (100, 1000), (7, 9))
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
LAYOUTS = ("whole", "packed", "wide", "both")
SHAPES = ((1,), (5,), (2, 3, 9))
"""Leading sizes of the rows that do not have three dimensions. `()`, a single row, is in the tests."""
THIN_BATCH, THIN_TOKENS, THIN_WIDTH = 2, 33, 2048


def grid() -> Iterator[Workload]:
    """All rows; ids name the leading sizes, the widths, the layout and the dtype."""
    for batch, tokens, widths, layout, dtype in product(BATCHES, TOKENS, WIDTHS, LAYOUTS, DTYPES):
        yield _row((batch, tokens), widths, layout, dtype)
    for leading, layout, dtype in product(SHAPES, LAYOUTS, DTYPES):
        yield _row(leading, (512, 2048), layout, dtype)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    kept = []
    for row in rows:
        *leading, width = row.inputs["mlp"].shape
        small = leading[0] == THIN_BATCH and leading[1] <= THIN_TOKENS if len(leading) == 2 else prod(leading) <= 54
        if small and width <= THIN_WIDTH:
            kept.append(row)
    return kept


def _row(leading: tuple[int, ...], widths: tuple[int, int], layout: str, dtype: DType) -> Workload:
    attn, mlp = widths
    within = {"attn": attn, "mlp": mlp}
    if layout in ("packed", "both"):
        within["mlp"] = 3 * attn + mlp
    if layout in ("wide", "both"):
        within["attn"] = attn + 40
    return Workload(
        id="-".join(["x".join(map(str, leading)), f"{attn}+{mlp}", layout, dtype]),
        op="fused_gelu_tanh_cat",
        inputs={
            name: TensorSpec(shape=(*leading, width), dtype=dtype, stride=_strides(leading, width, within[name]))
            for name, width in (("attn", attn), ("mlp", mlp))
        },
        outputs={"y": OutputSpec(shape=(*leading, attn + mlp), dtype=dtype)},
    )


def _strides(leading: tuple[int, ...], width: int, within: int) -> tuple[int, ...] | None:
    """Strides of `width` columns of a contiguous tensor that has `within` of them."""
    if width == within:
        return None
    return (*(within * prod(leading[place + 1 :]) for place in range(len(leading))), 1)
