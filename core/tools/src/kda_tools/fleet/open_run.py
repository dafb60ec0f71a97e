"""Prepare a run of `kda fleet`: check what is asked, and make the plan or read that of the run to resume."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.config import Pin
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import checkout_root, find_task
from kda_judge.evidence import gpu_state, provenance
from kda_tools.fleet import plan_pieces
from kda_tools.fleet.checkout import Baggage, in_place, pack_checkout
from kda_tools.fleet.node_facts import BY_TASK, file_digests
from kda_tools.fleet.pieces import Job, Kind, Order
from kda_tools.fleet.run_folder import Plan, RunFolder


@dataclass(frozen=True)
class RunOptions:
    """The options of `kda fleet run`, from which the order is made."""

    job: Job
    names: Sequence[str] = ()
    rows: Sequence[str] = ()
    full: bool = False
    quick: bool = False
    parts: int = 1
    missing: int = 0
    record: bool = False
    command: str = ""
    address: str | None = None
    most: int | None = None
    """Most GPUs to use, or CPU workers if there is no GPU."""
    per_node: int | None = None
    attempts: int = 3
    timeout_s: float = 3600.0
    limit_s: float | None = None
    """Seconds after which no work should go on."""
    resume: Path | None = None
    out: Path | None = None


def check_options(wish: RunOptions) -> None:
    """Refuse what can be refused before Ray is started.

    Raises:
        UsageError: a wrong name or row pattern, or options that make no sense together.
        MissingRequirement: the job or an option needs a GPU, and there is none.
    """
    if wish.record and wish.quick:
        raise UsageError("--record: a task's ledger holds whole runs, and --quick is a first look; leave one out")
    if wish.quick and wish.job is not Job.BENCH:
        raise UsageError(f"--quick: expected with bench, got {wish.job.value}")
    if wish.parts > 1 and wish.job is not Job.BENCH:
        raise UsageError(f"--parts: expected with bench, got {wish.job.value}, which is split by itself")
    if wish.missing and (wish.job is not Job.BENCH or wish.parts > 1):
        raise UsageError(
            f"--missing: expected with bench and without --parts, got {wish.job.value}, --parts {wish.parts}"
        )
    if wish.rows and wish.job not in BY_TASK:
        raise UsageError(f"--rows: expected with bench, validate or tune, got {wish.job.value}")
    if wish.full and wish.job is not Job.VALIDATE:
        raise UsageError(f"--full: expected with validate, got {wish.job.value}")
    given = (wish.names, wish.rows, wish.record, wish.quick, wish.full, wish.parts > 1, wish.missing, wish.out)
    if wish.resume and any(given):
        raise UsageError("--resume: the run knows names, rows, parts, and whether it records; leave them and --out out")
    if wish.resume is None:
        # Whether a cluster at `address` has GPUs is not known yet.
        kind: Kind = "cuda" if wish.address is not None or gpu_state.has_gpu() else "cpu"
        order = _order(wish, kind)
        if wish.rows:
            plan_pieces.plan(order.model_copy(update={"missing": 0}), 1)


def _order(wish: RunOptions, kind: Kind) -> Order:
    """The order of a new run; refuses what `kind` cannot do."""
    if kind == "cpu" and wish.job is Job.TUNE:
        raise MissingRequirement(
            "tune: expected a GPU, there is none; without one `kda tune TASK` compiles the candidates"
        )
    if wish.missing and not gpu_state.has_gpu():
        raise MissingRequirement("--missing: expected a GPU on this machine, of the kind whose results are looked up")
    if kind == "cpu" and wish.record:
        raise MissingRequirement("--record: expected a GPU, there is none; a run without one measures nothing")
    return Order(
        job=wish.job,
        names=plan_pieces.names(wish.job, wish.names, kind),
        kind=kind,
        rows=tuple(wish.rows),
        full=wish.full,
        quick=wish.quick,
        parts=wish.parts,
        missing=wish.missing,
        record=wish.record,
        command=wish.command,
    )


def new_plan(folder: RunFolder, wish: RunOptions, kind: Kind, workers: int) -> Plan:
    """Split a new order for so many workers, and note the plan; raises as `check_options` does."""
    order = _order(wish, kind)
    made = Plan(
        order=order,
        pieces=plan_pieces.plan(order, workers),
        commit=provenance.git_state(checkout_root()).commit,
        files=file_digests(order),
    )
    folder.note("planned", plan=made)
    return made


def known_plan(folder: RunFolder, wish: RunOptions) -> Plan | None:
    """The plan of the run to resume; None for a new run."""
    plan = folder.plan
    if wish.resume is None:
        if plan is not None:
            raise UsageError(f"--out {folder.path}: expected a new folder, got that of a run; go on by --resume")
        return None
    if plan is None:
        raise UsageError(f"--resume {folder.path}: expected the folder of a run, found no plan in {folder.events_file}")
    if plan.order.job is not wish.job:
        raise UsageError(f"--resume {folder.path}: this is a run of {plan.order.job.value}, got {wish.job.value}")
    now = file_digests(plan.order)
    if changed := [op for op, digest in plan.files.items() if now.get(op) != digest]:
        raise UsageError(
            f"--resume {folder.path}: the files of {', '.join(changed)} are not those that it was begun with; go back "
            f"to commit {plan.commit[:10]}, or begin a new run"
        )
    if not plan.files and (commit := provenance.git_state(checkout_root()).commit) != plan.commit:
        raise UsageError(f"--resume {folder.path}: begun at commit {plan.commit[:10]}, this is {commit[:10]}")
    return plan


def resume_plan(folder: RunFolder, plan: Plan, kind: Kind) -> Plan:
    """Go on with a plan; a UsageError if it was begun on another kind of device."""
    if plan.order.kind != kind:
        raise UsageError(f"--resume {folder.path}: begun on {plan.order.kind}, this cluster has {kind}")
    folder.note("resumed")
    return plan


def folder_of(wish: RunOptions) -> Path:
    """The folder of the run that is resumed, or of a new one."""
    if wish.resume is not None:
        if not (wish.resume / "events.jsonl").is_file():
            raise UsageError(f"--resume {wish.resume}: expected the folder of a run, found no events.jsonl in it")
        return wish.resume
    return wish.out or (checkout_root() or Path.cwd()) / ".cache" / "fleet" / provenance.run_id()


@contextmanager
def baggage_of(wish: RunOptions) -> Iterator[Baggage]:
    """What the workers are started with: an archive if they are on a cluster."""
    if wish.address is None:
        yield in_place()
        return
    with tempfile.TemporaryDirectory(prefix="kda-fleet-") as folder:
        yield pack_checkout(Path(folder), _pins(wish))


def _pins(wish: RunOptions) -> list[Pin]:
    """The upstream packages that the nodes will need."""
    if wish.job is Job.MODEL:
        from kda_tools.models.known_models import load_models

        return list(load_models().releases.values())
    if wish.job not in BY_TASK:
        return []
    ops = plan_pieces.names(wish.job, wish.names, "cuda")
    return [pin for op in ops for pin in find_task(op).config.upstream.values()]
