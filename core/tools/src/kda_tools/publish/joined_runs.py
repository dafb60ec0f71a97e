"""A run recorded in parts: runs of some rows each, of one state of the files on one kind of machine, as one run."""

import json
from collections.abc import Collection, Sequence

from kda_judge.bench import source_of
from kda_judge.contract.errors import MissingRequirement
from kda_judge.evidence import gpu_state, ledger
from kda_judge.evidence.derive import MEASURED, recompute
from kda_judge.evidence.run_record import Provenance, RowResult, RunRecord, Settings
from kda_judge.session import Session, frozen_rows


def joined(records: Sequence[RunRecord], frozen: Collection[str]) -> list[RunRecord]:
    """For each state that was measured in parts the runs that these make; of a row measured twice the later result.

    One part alone makes one where it has all the `frozen` rows. Parts behind a whole run complete that one. Every
    interval belongs to one row, and stays as it is. The geometric means take the rows of all parts together.
    """
    found, latest = list[list[RunRecord]](), dict[str, list[RunRecord]]()
    for record in filter(_counts, sorted(records, key=lambda record: (record.utc, record.run_id))):
        state = _state_of(record)
        if state not in latest or not record.settings.rows:
            latest[state] = []
            found.append(latest[state])
        latest[state].append(record)
    restricted = (parts for parts in found if parts[-1].settings.rows)
    return [_join(parts) for parts in restricted if len(parts) > 1 or _rows(parts).keys() >= set(frozen)]


def measured(records: Sequence[RunRecord], source: Provenance, gpu: str, settings: Settings) -> dict[str, bool]:
    """The rows that runs of this state have measured, and whether there is a result that can be published."""
    wanted, found = _state(source, gpu, settings), dict[str, bool]()
    for record in records:
        if _counts(record) and _state_of(record) == wanted:
            for row in record.rows:
                found[row.id] = found.get(row.id, False) or row.verdict in MEASURED
    return found


def lacking(session: Session) -> tuple[list[str], str]:
    """The ids of the session's rows of which no recorded run of its state has a result, and the GPU's name.

    First those that were never tried: a row that fails again and again keeps no other one waiting.

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
    """Whether its rows count as measured. A noisy part would make the whole joined run noisy, for good."""
    return not (record.partial or record.noisy)


def _state_of(record: RunRecord) -> str:
    before = record.machine.before
    return _state(record.provenance, before.name if before else None, record.settings)


def _state(source: Provenance, gpu: str | None, settings: Settings) -> str:
    """What has to be equal: the files, the releases, the versions, the GPU's kind and the settings but for the rows.

    The commit need not be: all files that decide a number are among the hashes.
    """
    same = (source.dirty, source.hashes, source.pins, source.versions, gpu)
    return json.dumps([*same, settings.model_copy(update={"rows": ()}).model_dump(mode="json")], sort_keys=True)


def _rows(parts: Sequence[RunRecord]) -> dict[str, RowResult]:
    return {row.id: row for part in parts for row in part.rows}


def _join(parts: Sequence[RunRecord]) -> RunRecord:
    last = parts[-1]
    return recompute(
        last.model_copy(
            update={
                "seconds": sum(part.seconds for part in parts),
                "settings": last.settings.model_copy(update={"rows": ()}),
                "rows": tuple(_rows(parts).values()),
                "noise_floor": {row: repeat for part in parts for row, repeat in part.noise_floor.items()},
                "parts": tuple(part.run_id for part in parts),
            }
        )
    )
