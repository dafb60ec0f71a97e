"""Join sweeps of some rows each, measured by the GPUs of a fleet, into one sweep."""

from __future__ import annotations

from collections.abc import Sequence

from kda_judge.contract.errors import LedgerError
from kda_tools.fleet.pieces import Result
from kda_tools.lab.tune.sweep_record import SweepPart, SweepRecord, TableTimes

SAME = ("command", "commit", "dirty", "solution", "capability", "device", "versions", "rounds")
"""Fields in which all parts agree."""


def join_sweeps(results: Sequence[Result], rows: Sequence[str], whole: bool) -> SweepRecord:
    """One record of all results, its rows in the order of `rows`; partial unless `whole` is set and no row is missing.

    If two results have the same row (an interrupted attempt and a later one), the later one counts.

    Raises:
        LedgerError: parts that differ in a field of `SAME`, or in a table's candidates.
    """
    parts = [SweepRecord.model_validate_json(result.line) for result in results]
    for name in SAME:
        if len(values := {repr(getattr(part, name)) for part in parts}) > 1:
            raise LedgerError(f"the sweep's parts differ in {name}: {' and '.join(sorted(values))}; it is not recorded")
    place = {row: number for number, row in enumerate(rows)}
    tables: dict[str, TableTimes] = {}
    for part in parts:
        for table in part.tables:
            known = tables.setdefault(table.table, table.model_copy(update={"rows": ()}))
            if known.candidates != table.candidates:
                raise LedgerError(f"the sweep's parts differ in the candidates of {table.table}; it is not recorded")
            new = {row.row for row in table.rows}
            kept = [*(row for row in known.rows if row.row not in new), *table.rows]
            kept.sort(key=lambda row: place[row.row])
            tables[table.table] = known.model_copy(update={"rows": tuple(kept)})
    covered = [_items(result, part) for result, part in zip(results, parts, strict=True)]
    return parts[0].model_copy(
        update={
            "utc": min(part.utc for part in parts),
            "seconds": round(sum(part.seconds for part in parts), 1),
            "partial": not (whole and {row for items in covered for row in items} >= set(rows)),
            "noisy": tuple(dict.fromkeys(reason for part in parts for reason in part.noisy)),
            "tables": tuple(tables.values()),
            "parts": tuple(
                SweepPart(rows=items, node=result.node, gpu=result.gpu or "", attempt=result.attempt, utc=part.utc)
                for result, part, items in zip(results, parts, covered, strict=True)
            ),
        }
    )


def _items(result: Result, part: SweepRecord) -> tuple[str, ...]:
    """Rows that the part has finished, in all tables that need them."""
    measured = tuple(dict.fromkeys(row.row for table in part.tables for row in table.rows))
    return measured if result.complete else tuple(row for row in measured if row in result.items)
