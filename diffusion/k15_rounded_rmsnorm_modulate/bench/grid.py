"""The regression grid: correctness-only rows over the ops' whole envelope.

- Forms (`FORMS`: each op, with and without gate and modulation) x batch {1, 2} x tokens {1, 33, 257} x columns
  (`COLUMNS`) x {operands in one piece, chunks of a wider projection}, bfloat16: 588 rows. Of the columns, the kernel
  does not take 96 and 2568.
- Operands with gaps of their own, that no vector divides: batch 2, 33 tokens, 512 and 4096 columns: 14 rows.
- float16: batch 2, 33 tokens, 512 and 2568 columns, chunks: 14 rows.
- x with gaps between tokens, which neither the kernel nor upstream's take: batch 2, 33 tokens, 512 columns: 7 rows.

Thinning for machines without a GPU (`thin`): batch 2, 33 tokens, 96 and 512 columns, 49 of 623. Batches and tokens only
set how many programs there are; every form, layout and dtype stays.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

SINGLE, RESIDUAL, TWO = (
    "rounded_rmsnorm_modulate",
    "rounded_residual_rmsnorm_modulate",
    "rounded_residual_rmsnorm_modulate2",
)
PAIR, OTHER = ("scale", "shift"), ("other_scale", "other_shift")
FORMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "modulate": (SINGLE, PAIR),
    "add": (RESIDUAL, ()),
    "add-modulate": (RESIDUAL, PAIR),
    "gate": (RESIDUAL, ("gate",)),
    "gate-modulate": (RESIDUAL, ("gate", *PAIR)),
    "add-two": (TWO, (*PAIR, *OTHER)),
    "gate-two": (TWO, ("gate", *PAIR, *OTHER)),
}
"""Name -> the op, and the operands that the row gives."""
BATCHES = (1, 2)
TOKENS = (1, 33, 257)
COLUMNS = (96, 512, 2048, 2560, 2568, 4096, 8192)
CHUNKS = 6
THIN_BATCH, THIN_TOKENS, THIN_COLUMNS = 2, 33, (96, 512)


def grid() -> Iterator[Workload]:
    """All rows; ids name the form, sizes, dtype and layout."""
    for form, batch, tokens, columns, layout in product(FORMS, BATCHES, TOKENS, COLUMNS, ("", "packed")):
        yield _row(form, batch, tokens, columns, layout)
    for form, columns in product(FORMS, (512, 4096)):
        yield _row(form, 2, 33, columns, "apart")
    for form, columns in product(FORMS, (512, 2568)):
        yield _row(form, 2, 33, columns, "packed", "float16")
    for form in FORMS:
        yield _row(form, 2, 33, 512, "gaps")


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    kept = []
    for row in rows:
        batch, tokens, columns = row.inputs["x"].shape
        if (batch, tokens) == (THIN_BATCH, THIN_TOKENS) and columns in THIN_COLUMNS:
            kept.append(row)
    return kept


def _row(form: str, batch: int, tokens: int, columns: int, layout: str, dtype: DType = "bfloat16") -> Workload:
    op, operands = FORMS[form]
    streams = ("x",) if op == SINGLE else ("residual", "x")
    inputs = {name: TensorSpec(shape=(batch, tokens, columns), dtype=dtype) for name in streams}
    if layout == "gaps":
        inputs["x"] = inputs["x"].model_copy(update={"stride": (tokens * (columns + 8), columns + 8, 1)})
    for number, name in enumerate(operands):
        # A row of a batch to the next: nothing between, the other chunks, or a gap of its own.
        step = {"packed": CHUNKS * columns, "apart": CHUNKS * columns + 2 * number + 1}.get(layout)
        stride = (step, columns, 1) if step else None
        inputs[name] = TensorSpec(shape=(batch, 1, columns), dtype=dtype, stride=stride)
    parts = [form, f"{batch}x{tokens}x{columns}", dtype, *filter(None, [layout])]
    return Workload(id="-".join(parts), op=op, inputs=inputs, scalars={"eps": 1e-6})
