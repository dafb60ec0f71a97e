"""Chooses the rows for a memory checker: few, because it is up to a hundred times slower, and as unlike as possible.

1. The smallest production row of every op.
2. Up to `FROZEN_ROWS` more production rows. Each step adds the row whose launches have most constants that no chosen
   row has, the smallest of equals. The solution's hook `launches` names kernel and variant (`aot.py`).
3. Up to `GRID_ROWS` rows of the regression grid. Each step adds the row with most traits that no chosen row has, then
   with most new pairs of traits, the smallest of equals. Traits are dtypes, strided and absent inputs, scalars,
   kernels, the plain path, and sizes that are odd or no multiple of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from math import prod
from types import ModuleType

from kda_judge.contract.config import Op
from kda_judge.contract.tensor_spec import ITEM_SIZE
from kda_judge.contract.workloads import Workload
from kda_judge.session import Session
from kda_tools.lab.grid.grid_rows import grid_rows, grid_session
from kda_tools.lab.inspect.aot import meta_tensors
from kda_tools.lab.sanitize.sanitize_record import CheckedRow

FROZEN_ROWS = 6
"""Most production rows of step 2. If sizes are constants of a task's kernels, every row has a variant of its own."""
GRID_ROWS = 12
LARGEST_FROZEN = 256 << 20
"""Most bytes of a row's inputs. They are drawn on the CPU, twice for every tool: 256 MiB of bfloat16 take seconds."""
LARGEST_GRID = 64 << 20
"""The same for rows of the grid; larger ones show nothing that smaller ones do not."""
VECTOR_BYTES = 16

Variants = Callable[[Workload], tuple[tuple[str, str], ...]]
"""Kernel and variant of each launch of a row; empty on the plain path."""


def choose(session: Session) -> list[tuple[Workload, CheckedRow]]:
    """The rows by the rule above; if the request names patterns, every frozen or grid row that fits one."""
    task = session.request.task
    module = task.load(session.config.arms[session.settings.subject].module)
    # An arm of the lab may have only some of the ops.
    rows = [row for row in grid_rows(grid_session(session), full=True) if hasattr(module, row.op)]
    if session.request.rows:
        return [(row, CheckedRow(id=row.id, op=row.op, why="asked for")) for row in rows]
    production = {row.id for row in task.workloads if row.production}
    frozen = sorted((row for row in rows if row.id in production), key=_bytes)
    grid = sorted((row for row in rows if row.id not in production and _bytes(row) <= LARGEST_GRID), key=_bytes)
    return representative(frozen, grid, session.config.ops, _variants(module))


def representative(
    frozen: Sequence[Workload], grid: Sequence[Workload], ops: dict[str, Op], variants: Variants
) -> list[tuple[Workload, CheckedRow]]:
    """Apply the rule to rows that are sorted by size."""
    chosen: list[tuple[Workload, CheckedRow]] = []
    known: set[tuple[str, str]] = set()

    def take(row: Workload, why: str) -> None:
        chosen.append((row, CheckedRow(id=row.id, op=row.op, why=why)))

    for row in frozen:
        if row.op not in {other.op for other, _ in chosen}:
            take(row, "smallest production row")
            known |= _constants(variants(row))
    constants = {row.id: _constants(variants(row)) for row in frozen}
    rest = [row for row in frozen if _bytes(row) <= LARGEST_FROZEN]
    for _ in range(min(FROZEN_ROWS, len(rest))):
        best = max(rest, key=lambda row: len(constants[row.id] - known))  # the first, hence the smallest, of equals
        kernel, _ = min(constants[best.id] - known, default=("", ""))
        if not kernel:
            break
        take(best, f"variant of {kernel}")
        known |= constants[best.id]
    traits = {row.id: _traits(row, ops[row.op], variants(row)) for row in (*frozen, *grid)}
    shown: set[str] = set().union(*(traits[row.id] for row, _ in chosen))
    pairs = set().union(*(_pairs(traits[row.id]) for row, _ in chosen))
    for _ in range(min(GRID_ROWS, len(grid))):
        # The first, hence the smallest, of equals.
        best = max(grid, key=lambda row: (len(traits[row.id] - shown), len(_pairs(traits[row.id]) - pairs)))
        new = sorted(traits[best.id] - shown)
        new_pairs = _pairs(traits[best.id]) - pairs
        if not new_pairs:
            break
        more = f" and {len(new) - 3} more" if len(new) > 3 else ""
        take(best, f"grid: {', '.join(new[:3])}{more}" if new else f"grid: {len(new_pairs)} new combinations")
        shown |= traits[best.id]
        pairs |= new_pairs
    return chosen


def _constants(variants: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    """Kernel and one part of its variant, such as `BLOCK=1024` or `num_warps=4`, for every part."""
    return {(name, part) for name, variant in variants for part in variant.split()}


def _traits(row: Workload, op: Op, variants: Sequence[tuple[str, str]]) -> frozenset[str]:
    """The traits of a row."""
    found = {row.op, *(f"kernel {name}" for name, _ in variants)}
    if not variants:
        found.add(f"plain path of {row.op}")
    found |= {f"no {name}" for name in op.inputs if name not in row.inputs}
    found |= {f"{name} = {value}" for name, value in row.scalars.items()}
    for name, spec in row.inputs.items():
        found.add(f"{name} {spec.dtype}")
        contiguous = spec.model_copy(update={"stride": None}).strides
        if spec.strides != contiguous:
            found.add(f"strided {name}")
        if spec.shape and spec.shape[-1] * ITEM_SIZE[spec.dtype] % VECTOR_BYTES:
            found.add(f"ragged {name}")
        if prod(spec.shape[:-1]) % 2 and len(spec.shape) > 1:
            found.add(f"odd rows of {name}")
    return frozenset(found)


def _pairs(traits: frozenset[str]) -> set[tuple[str, str]]:
    return set(combinations(sorted(traits), 2))


def _bytes(row: Workload) -> int:
    return sum(spec.nbytes for spec in row.inputs.values())


def _variants(module: ModuleType) -> Variants:
    """The hook `launches` of the arm's module; an arm without one has no variants."""
    hook = getattr(module, "launches", None)

    def variants(row: Workload) -> tuple[tuple[str, str], ...]:
        launches = hook(row.op, meta_tensors(row), row.scalars) if hook is not None else ()
        return tuple((launch.name, launch.variant) for launch in launches)

    return variants
