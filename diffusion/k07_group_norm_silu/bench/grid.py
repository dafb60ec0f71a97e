"""The regression grid: correctness-only rows over the envelope that upstream and we share.

- Upstream's own test: [2, 64, 32, 32], [1, 64, 4, 16, 16], [4, 128], [1, 128, 20, 256, 256] in 32 groups x dtypes: 12.
- Dimensions: 96 channels and spatial sizes of 2 to 5 dimensions that 1, 2, 4 and 8 divide, in 1, 3, 32 and 96 groups x
  batch {1, 3} x dtypes: 144 rows. With 96 groups and no spatial size a group has one element.
- Parts: groups of 32 761 to 2 097 120 elements, whole vectors and not, 2 batches, so that programs share them: 30 rows.
- Layouts: channels last, gaps between batches and channels, and a broadcast batch x dtypes: 12 rows, which are copied.
- eps of 0.5: 3 rows.

Thinning for machines without a GPU (`thin`): at most 16 groups in all and 8192 elements of x, 87 of 201 rows. Every
dtype, number of dimensions, vector and eps stays; how programs share a group is tested in `tests/` on small parts.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
UPSTREAM = ((2, 64, 32, 32), (1, 64, 4, 16, 16), (4, 128), (1, 128, 20, 256, 256))
SPATIAL = ((), (7,), (2, 3), (3, 2, 2), (1, 1, 8), (5, 1, 1))
"""Their products are divided by 1, 1, 2, 4, 8 and 1."""
GROUPS = (1, 3, 32, 96)
LARGE = ((181, 181), (3, 128, 128), (5, 96, 80), (17, 96, 80), (2, 257, 255))
"""Spatial sizes of large groups: 32 761 to 131 070 elements a channel."""
THIN_ELEMENTS = 8192
THIN_GROUPS = 16


def grid() -> Iterator[Workload]:
    """All rows; ids name the shape, the groups, the dtype and whatever else is not the usual."""
    for shape, dtype in product(UPSTREAM, DTYPES):
        yield _row(shape, 32, dtype)
    for spatial, groups, batch, dtype in product(SPATIAL, GROUPS, (1, 3), DTYPES):
        yield _row((batch, 96, *spatial), groups, dtype)
    for spatial, per_group, dtype in product(LARGE, (1, 16), DTYPES):
        yield _row((2, 2 * per_group, *spatial), 2, dtype)
    for dtype in DTYPES:
        yield _row((2, 96, 4, 6), 3, dtype, "last", stride=(96 * 24, 1, 96 * 6, 96))
        yield _row((2, 96, 4, 6), 3, dtype, "apart", stride=(96 * 40, 40, 6, 1))
        yield _row((2, 96, 2, 2, 6), 3, dtype, "last", stride=(96 * 24, 1, 96 * 12, 96 * 6, 96))
        yield _row((3, 96, 8), 3, dtype, "broadcast", stride=(0, 8, 1))
        yield _row((2, 96, 4, 6), 3, dtype, "eps", eps=0.5)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    return [row for row in rows if _groups(row) <= THIN_GROUPS and prod(row.inputs["x"].shape) <= THIN_ELEMENTS]


def _groups(row: Workload) -> int:
    return row.inputs["x"].shape[0] * int(row.scalars["num_groups"])


def _row(
    shape: tuple[int, ...],
    groups: int,
    dtype: DType,
    name: str = "",
    *,
    stride: tuple[int, ...] | None = None,
    eps: float = 1e-5,
) -> Workload:
    vector = TensorSpec(shape=shape[1:2], dtype=dtype)
    parts = ["x".join(map(str, shape)), f"{groups}-groups", *([name] if name else []), dtype]
    return Workload(
        id="-".join(parts),
        op="triton_group_norm_silu",
        inputs={"x": TensorSpec(shape=shape, dtype=dtype, stride=stride), "weight": vector, "bias": vector},
        scalars={"num_groups": groups, "eps": eps},
    )
