"""The regression grid: correctness-only rows over the op's whole envelope.

- Shapes: rows {1, 2, 3, 16, 33, 64, 129} x vocabularies {1, 7, 1000, 1001, 32000, 50257, 102400, 128256, 129280,
  151936, 200064} x {float32, bfloat16}, a temperature for every row: 154 rows.
- Layouts: rows {1, 3, 33} x vocabularies {1001, 32000, 151936} x {float32, bfloat16} x {logits with gaps of 8 elements,
  of 3, one temperature for all}: 54 rows.
- float16, and float32 without temperatures: rows {1, 3, 33} x the same vocabularies: 18 rows.
- Many short rows, which get clusters of few blocks: 1025 rows x vocabularies {1000, 4100, 8200, 16500} x {float32,
  bfloat16}: 8 rows.

Thinning for machines without a GPU (`thin`): up to 3 rows and 1001 columns. There only the Triton kernels run; the
cluster's kernel is executed by the task's own tests.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

ROWS = (1, 2, 3, 16, 33, 64, 129)
VOCABULARIES = (1, 7, 1000, 1001, 32000, 50257, 102400, 128256, 129280, 151936, 200064)
SOME_ROWS, SOME_VOCABULARIES = (1, 3, 33), (1001, 32000, 151936)
MANY_ROWS, SHORT_VOCABULARIES = 1025, (1000, 4100, 8200, 16500)
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
GAPS = (8, 3)
"""Elements between the rows of logits: with the first the next row's vectors are aligned, with the second not."""
THIN_ROWS, THIN_VOCABULARY = 3, 1001


def grid() -> Iterator[Workload]:
    """All rows; ids name the shape, the dtype, and whatever else is not the usual."""
    for rows, vocabulary, dtype in product(ROWS, VOCABULARIES, DTYPES):
        yield _row(rows, vocabulary, dtype)
    for rows, vocabulary, dtype in product(SOME_ROWS, SOME_VOCABULARIES, DTYPES):
        for gap in GAPS:
            yield _row(rows, vocabulary, dtype, gap=gap)
        yield _row(rows, vocabulary, dtype, temperatures=(1,))
    for rows, vocabulary in product(SOME_ROWS, SOME_VOCABULARIES):
        yield _row(rows, vocabulary, "float16")
        yield _row(rows, vocabulary, "float32", temperatures=None)
    for vocabulary, dtype in product(SHORT_VOCABULARIES, DTYPES):
        yield _row(MANY_ROWS, vocabulary, dtype)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    limits = (THIN_ROWS, THIN_VOCABULARY)
    return [row for row in rows if all(n <= most for n, most in zip(row.inputs["logits"].shape, limits, strict=True))]


def _row(
    rows: int, vocabulary: int, dtype: DType, *, gap: int = 0, temperatures: tuple[int, ...] | None = (0, 1)
) -> Workload:
    shape = (rows, vocabulary)
    inputs = {"logits": TensorSpec(shape=shape, dtype=dtype, stride=(vocabulary + gap, 1) if gap else None)}
    if temperatures is not None:
        places = tuple(n or rows for n in temperatures)
        inputs["temperatures"] = TensorSpec(shape=places, dtype="float32", fill="scale")
    parts = [f"{rows}x{vocabulary}", dtype] + [f"gap{gap}"] * bool(gap)
    parts += {None: ["without"], (1,): ["one"]}.get(temperatures, [])
    outputs = {"p": OutputSpec(shape=shape, dtype="float32")}
    return Workload(id="-".join(parts), op="softmax", inputs=inputs, outputs=outputs)
