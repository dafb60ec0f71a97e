"""`kda rerun` and `kda compare`: find a recorded run by its id, and set up the same run once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task
from kda_judge.evidence import gpu_state, ledger, provenance
from kda_judge.evidence.run_record import RunRecord
from kda_judge.session import Request, Session, open_session
from kda_tools.lab.compare_runs import circumstances, obstacles


def find_run(tasks: Sequence[Task], name: str) -> tuple[Task, RunRecord]:
    """The recorded run whose id is `name`, or begins with it.

    Raises:
        UsageError: no such run, or several; names them.
        LedgerError: a ledger on the way is broken.
    """
    runs = {record.run_id: (task, record) for task in tasks for record in ledger.read(task.ledger)}
    if name in runs:
        return runs[name]
    found = [run_id for run_id in runs if name and run_id.startswith(name)]
    if len(found) == 1:
        return runs[found[0]]
    if found:
        raise UsageError(f"run {name!r}: expected the beginning of one run id, got that of {', '.join(sorted(found))}")
    where = ", ".join(task.op for task in tasks)
    close = f"nearest: {', '.join(nearest(name, runs))}" if runs else "the ledgers are empty"
    raise UsageError(f"run {name!r}: no such run in the ledger of {where}; {close}")


def same_session(task: Task, record: RunRecord, allow_busy: bool, anyway: bool, ports: Mapping[str, Path]) -> Session:
    """A session with the record's own settings, if the files and the kind of GPU are those of the record.

    Raises:
        MissingRequirement: no GPU here.
        UsageError: the record measured nothing, or (unless `anyway`) something that decides its numbers has changed.
    """
    if record.machine.kind != "cuda" or record.machine.before is None:
        raise UsageError(f"run {record.run_id} was made without a GPU and measured nothing that could be repeated")
    there = record.machine.before.name
    if not gpu_state.has_gpu():
        raise MissingRequirement(
            f"run {record.run_id} was measured on an {there}: to repeat it takes one, and no NVIDIA GPU is visible here"
        )
    if not anyway and (found := _obstacles(task, record)):
        raise UsageError(
            "\n".join(
                [
                    f"run {record.run_id} cannot be repeated here, what it measured is not what is here:",
                    *(f"  {line}" for line in found),
                    f"check out its commit {record.provenance.commit[:10]} on an {there}, or compare with --anyway",
                ]
            )
        )
    settings = record.settings
    session = open_session(
        Request(
            task=task,
            rows=list(settings.rows),
            subject=settings.subject,
            against=list(settings.against),
            device="cuda",
            again=bool(record.noise_floor),
            allow_busy=allow_busy,
            ports=ports,
        )
    )
    # Seeds and sample lengths come from the record, too: config.toml may have changed.
    return replace(session, settings=settings)


def comparison_notes(old: RunRecord, new: RunRecord) -> list[str]:
    """Notes for the reader of a comparison: everything in which the two runs differ, and their noise."""
    gpus = [record.machine.before.name if record.machine.before else None for record in (old, new)]
    found = obstacles(old.provenance, new.provenance, *gpus) + circumstances(old.provenance, new.provenance)
    for name, was in old.settings:
        if was != (now := getattr(new.settings, name)):
            found.append(f"{name} was {was}, now {now}")
    return found + [f"{record.run_id} is noisy: {reason}" for record in (old, new) for reason in record.noisy]


def _obstacles(task: Task, record: RunRecord) -> list[str]:
    state = gpu_state.read_state(0)
    now = provenance.collect(task, [record.settings.subject, *record.settings.against], state.driver)
    assert record.machine.before is not None
    return obstacles(record.provenance, now, record.machine.before.name, state.name)
