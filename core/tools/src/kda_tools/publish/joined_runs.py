"""Join runs of some rows each into one run, if files, versions, settings and the kind of GPU are the same."""

import json
from collections.abc import Sequence

from kda_judge.bench import source_of
from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence import gpu_state, ledger
from kda_judge.evidence.derive import MEASURED, with_rows
from kda_judge.evidence.run_record import Provenance, RowResult, RunRecord, Settings
from kda_judge.session import Session, frozen_rows


def joined(records: Sequence[RunRecord], frozen: Sequence[str]) -> list[RunRecord]:
    """The runs that can be joined from parts of one state; if a row was measured twice, the later result counts.

    A single part is a run if it has all `frozen` rows. Parts that follow a whole run are joined with that run. Each
    row's interval stays as it is. The geometric means are over the rows of all parts, which come in the order of
    `frozen`: several GPUs measure them in any.
    """
    found, latest = list[list[RunRecord]](), dict[str, list[RunRecord]]()
    for record in filter(_counts, sorted(records, key=lambda record: (record.utc, record.run_id))):
        state = _state_of(record)
        if state not in latest or not record.settings.rows:
            latest[state] = []
            found.append(latest[state])
        latest[state].append(record)
    restricted = (parts for parts in found if parts[-1].settings.rows)
    return [_join(parts, frozen) for parts in restricted if len(parts) > 1 or _rows(parts).keys() >= set(frozen)]


def measured(records: Sequence[RunRecord], source: Provenance, gpu: str, settings: Settings) -> dict[str, bool]:
    """Row id -> whether some run of this state has a measured result for it; rows that no run tried are absent."""
    wanted, found = _state(source, gpu, settings), dict[str, bool]()
    for record in records:
        if _counts(record) and _state_of(record) == wanted:
            for row in record.rows:
                found[row.id] = found.get(row.id, False) or row.verdict in MEASURED
    return found


def rows_without_result(session: Session) -> tuple[list[str], str]:
    """The ids of the session's rows for which no recorded run of its state has a result, and the GPU's name.

    Rows that were never tried come first, so that a row that always fails does not delay the others.

    Raises:
        MissingRequirement: the session has no GPU.
    """
    if session.gpu is None:
        raise MissingRequirement("--missing: needs a GPU; a run without one measures nothing")
    gpu, records = gpu_state.read_state(session.gpu), ledger.read(session.request.task.ledger)
    done = measured(records, source_of(session, gpu.driver), gpu.name, session.settings)
    rows = (row.id for row in frozen_rows(session) if not done.get(row.id))
    return sorted(rows, key=done.__contains__), gpu.name


def _counts(record: RunRecord) -> bool:
    """Whether the record's rows count as measured. One noisy part would make the whole joined run noisy for good."""
    return not (record.partial or record.noisy)


def _state_of(record: RunRecord) -> str:
    before = record.machine.before
    return _state(record.provenance, before.name if before else None, record.settings)


def _state(source: Provenance, gpu: str | None, settings: Settings) -> str:
    """What joined runs must share: files, releases, versions, kind of GPU, and all settings except the rows.

    The commit may differ, and the checkout may have changes: the hashes cover all files that decide a number.
    """
    same = (source.hashes, source.pins, source.versions, gpu)
    return json.dumps([*same, settings.model_copy(update={"rows": ()}).model_dump(mode="json")], sort_keys=True)


def _rows(parts: Sequence[RunRecord]) -> dict[str, RowResult]:
    return {row.id: row for part in parts for row in part.rows}


def _join(parts: Sequence[RunRecord], frozen: Sequence[str]) -> RunRecord:
    last, rows, place = parts[-1], _rows(parts), {row: at for at, row in enumerate(frozen)}
    update = {
        "seconds": sum(part.seconds for part in parts),
        "settings": last.settings.model_copy(update={"rows": ()}),
        "provenance": last.provenance.model_copy(update={"dirty": any(part.provenance.dirty for part in parts)}),
        "noise_floor": {row: repeat for part in parts for row, repeat in part.noise_floor.items()},
        "parts": tuple(part.run_id for part in parts),
    }
    return with_rows(
        last.model_copy(update=update), sorted(rows.values(), key=lambda row: place.get(row.id, len(place)))
    )
