"""The regression grid: correctness-only rows over the op's whole envelope.

Batch {1, 2, 4} x tokens {1, 33, 257, 1055} x columns (`COLUMNS`) x with or without shift x operands in one piece or as
chunks of a wider projection (`CHUNKS`). Columns: those of models, among them Sana's 2240, which the kernel does not
take, and small ones. Two more rows have a shift whose rows lie nearer to each other than those of scale.

Thinning for machines without a GPU (`thin`): batch 2, up to 33 tokens, 512 and 1024 columns.
"""

from collections.abc import Iterable, Iterator
from itertools import product

from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload

BATCHES = (1, 2, 4)
TOKENS = (1, 33, 257, 1055)
COLUMNS = (4, 260, 512, 1024, 1536, 2240, 2560, 3072, 4096, 5120, 6144, 8192)
CHUNKS = (1, 3, 6)
THIN_BATCH, THIN_TOKENS, THIN_COLUMNS = 2, 33, (512, 1024)


def grid() -> Iterator[Workload]:
    """All rows; ids name sizes, chunks, and whether there is a shift."""
    for batch, tokens, columns, chunks, shifts in product(BATCHES, TOKENS, COLUMNS, CHUNKS, (True, False)):
        yield _row(batch, tokens, columns, chunks, shifts)
    for columns in (512, 3072):
        yield _row(2, 33, columns, 6, True, shift_chunks=2)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    kept = []
    for row in rows:
        batch, tokens, columns = row.inputs["x"].shape
        if batch == THIN_BATCH and tokens <= THIN_TOKENS and columns in THIN_COLUMNS:
            kept.append(row)
    return kept


def _row(batch: int, tokens: int, columns: int, chunks: int, shifts: bool, shift_chunks: int | None = None) -> Workload:
    """A row; shift is a chunk of the same projection as scale unless `shift_chunks` says of which other one."""

    def operand(chunks: int) -> TensorSpec:
        stride = None if chunks == 1 else (chunks * columns, 1)
        return TensorSpec(shape=(batch, columns), dtype="bfloat16", stride=stride)

    apart = f"-shift-of-{shift_chunks}" if shift_chunks else ""
    return Workload(
        id=f"{batch}x{tokens}x{columns}-of-{chunks}{apart}{'' if shifts else '-scale-only'}",
        op="fused_layernorm_modulate",
        inputs={"x": TensorSpec(shape=(batch, tokens, columns), dtype="bfloat16"), "scale": operand(chunks)}
        | ({"shift": operand(shift_chunks or chunks)} if shifts else {}),
        scalars={"eps": 1e-6},
    )
