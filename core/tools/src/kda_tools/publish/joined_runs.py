"""A run recorded in parts: runs of some rows each, of one state of the files on one kind of machine, as one run."""

import json
from collections.abc import Sequence

from kda_judge.evidence.derive import recompute
from kda_judge.evidence.run_record import RunRecord


def joined(records: Sequence[RunRecord]) -> list[RunRecord]:
    """For each state that was measured in parts the run that these make; of a row measured twice the later result.

    Every interval belongs to one row, and stays as it is. The geometric means take the rows of all parts together.
    """
    states: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: (record.utc, record.run_id)):
        if record.settings.rows and not record.partial:
            states.setdefault(_state(record), []).append(record)
    return [_join(parts) for parts in states.values() if len(parts) > 1]


def _state(record: RunRecord) -> str:
    """What has to be equal: the code, the releases, the versions, the GPU's kind and the settings but for the rows."""
    settings = record.settings.model_copy(update={"rows": ()})
    source, gpu = record.provenance, record.machine.before
    same = (record.task, source.commit, source.dirty, source.hashes, source.pins, source.versions, gpu and gpu.name)
    return json.dumps([*same, settings.model_dump(mode="json")], sort_keys=True)


def _join(parts: Sequence[RunRecord]) -> RunRecord:
    last = parts[-1]
    rows = {row.id: row for part in parts for row in part.rows}
    return recompute(
        last.model_copy(
            update={
                "seconds": sum(part.seconds for part in parts),
                "settings": last.settings.model_copy(update={"rows": ()}),
                "rows": tuple(rows.values()),
                "noise_floor": {row: repeat for part in parts for row, repeat in part.noise_floor.items()},
                "noisy": tuple(dict.fromkeys(reason for part in parts for reason in part.noisy)),
                "parts": tuple(part.run_id for part in parts),
            }
        )
    )
