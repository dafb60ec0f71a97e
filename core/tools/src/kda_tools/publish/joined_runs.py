"""A run recorded in parts: runs of some rows each, of one state of the files on one kind of machine, as one run."""

import json
from collections.abc import Collection, Sequence

from kda_judge.evidence.derive import MEASURED, recompute
from kda_judge.evidence.run_record import Provenance, RowResult, RunRecord, Settings


def joined(records: Sequence[RunRecord], frozen: Collection[str]) -> list[RunRecord]:
    """For each state that was measured in parts the run that these make; of a row measured twice the later result.

    One part alone makes one where it has all the `frozen` rows. Every interval belongs to one row, and stays as it is.
    The geometric means take the rows of all parts together.
    """
    states: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: (record.utc, record.run_id)):
        if record.settings.rows and _counts(record):
            states.setdefault(_state_of(record), []).append(record)
    return [_join(parts) for parts in states.values() if len(parts) > 1 or _rows(parts).keys() >= set(frozen)]


def measured(records: Sequence[RunRecord], source: Provenance, gpu: str, settings: Settings) -> set[str]:
    """The rows of which a run of this state has results already that can be published."""
    wanted = _state(source, gpu, settings)
    kept = (one for one in records if _counts(one) and _state_of(one) == wanted)
    return {row.id for record in kept for row in record.rows if row.verdict in MEASURED}


def _counts(record: RunRecord) -> bool:
    """Whether its rows need not be measured again: a noisy part would make all of the joined run noisy for good."""
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
