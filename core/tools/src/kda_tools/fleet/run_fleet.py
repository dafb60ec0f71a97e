"""`kda fleet run`: from an order to what is in the logs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kda_judge.contract.config import Pin
from kda_judge.contract.errors import ArmFailed, KdaError, MissingRequirement, UsageError
from kda_judge.contract.tasks import checkout_root, find_task
from kda_judge.evidence import gpu_state, provenance
from kda_judge.evidence.run_record import RunRecord, SharedHost
from kda_tools.fleet import interference, plan_pieces, ray_pool
from kda_tools.fleet.checkout import Baggage, in_place, packed
from kda_tools.fleet.deliver import Said, deliver
from kda_tools.fleet.drive import Driver, Worker
from kda_tools.fleet.live_view import showing, summary
from kda_tools.fleet.node_facts import BY_TASK, demand, facts, files, refuse_odd
from kda_tools.fleet.pieces import Job, Kind, NodeFacts, Order, Piece, Question, remaining
from kda_tools.fleet.run_folder import Plan, RunFolder
from kda_tools.fleet.schedule import Schedule
from kda_tools.terminal import say

START_S = 120.0
"""For the workers to come up; the fleet begins without those that take longer."""


@dataclass(frozen=True)
class Wish:
    """What the user asks of `kda fleet run`, beside the order."""

    job: Job
    names: Sequence[str] = ()
    rows: Sequence[str] = ()
    full: bool = False
    quick: bool = False
    parts: int = 1
    record: bool = False
    command: str = ""
    address: str | None = None
    most: int | None = None
    """GPUs, or without any CPU workers."""
    per_node: int | None = None
    attempts: int = 3
    timeout_s: float = 3600.0
    resume: Path | None = None
    out: Path | None = None


@dataclass
class Ended:
    """What a run came to."""

    folder: RunFolder
    plan: Plan
    schedule: Schedule
    interrupted: bool
    line: str
    """What it cost."""
    recorded: list[Said] = field(default_factory=list)


def run(wish: Wish) -> Ended:
    """Do what is wished, as far as it goes.

    Raises:
        UsageError: a wrong name or wish, workers that are not alike, a run that cannot be resumed.
        MissingRequirement: no ray, no cluster, no worker, or no GPU where only one makes sense.
        ArmFailed: all workers have gone.
    """
    _check(wish)
    with RunFolder(_folder(wish)).open() as folder, _baggage(wish) as baggage:
        plan = _known(folder, wish)  # what is wrong with it is told before Ray is started
        with ray_pool.cluster(wish.address, wish.most, baggage) as ray:
            nodes = ray.nodes()
            kind = ray_pool.kind_of(nodes)
            seats = ray_pool.places(nodes, kind, wish.most, wish.per_node)
            demand(seats, kind)
            plan = _resumed(folder, plan, kind) if plan else _planned(folder, wish, kind, len(seats))
            say(f"pieces: {len(plan.pieces)}, workers: {len(seats)}; events and results: {folder.path}")
            return _run(ray, folder, plan, seats, baggage, wish)


def _run(
    ray: Any, folder: RunFolder, plan: Plan, seats: Sequence[ray_pool.Place], baggage: Baggage, wish: Wish
) -> Ended:
    order, begin = plan.order, time.monotonic()
    pieces = [remaining(piece, folder.results) for piece in plan.pieces]
    schedule = Schedule.of(pieces, folder.done, folder.attempts, wish.attempts)
    pool = ray_pool.RayPool(ray, order, seats, baggage, folder)
    here = _driver_facts(order)
    complete = True
    error: KdaError | None = None
    try:
        _await_workers(pool, here)
        shared = _measured(pool, folder, order, wish.timeout_s) if not schedule.over else {}

        def mark(line: str, worker: Worker) -> str:
            return _marked(line, shared.get(worker.node)) if order.job is Job.BENCH else line

        with showing(folder, pool.alive, len(plan.pieces)) as look:
            complete = Driver(folder, pool, _asking(order), wish.timeout_s, mark, look).run(schedule)
    except KeyboardInterrupt:
        complete = False
    except ArmFailed as failed:  # the workers have gone; what came is kept all the same
        error = failed
    except (ray.exceptions.RayError, ConnectionError) as lost:
        error = MissingRequirement(f"Ray answers no more: {lost}; go on by --resume {folder.path}")
    finally:
        told = next((worker.facts for worker in pool.alive()), here)
        pool.close()  # on a cluster that goes on, too
    held = time.monotonic() - begin
    line = summary(folder.events[_session(folder) :], len(seats), held, order.kind)
    folder.note("ended", why=line)
    ended = Ended(folder, plan, schedule, not complete, line)
    if order.record:
        ended.recorded = deliver(folder, plan, told, whole=complete and error is None)
    if error is not None:
        raise error
    return ended


def _session(folder: RunFolder) -> int:
    """Where the events of this process begin."""
    begun = [number for number, event in enumerate(folder.events) if event.event in ("planned", "resumed")]
    return begun[-1]


def _asking(order: Order) -> Any:
    def ask(piece: Piece, attempt: int, worker: Worker) -> Question:
        return Question(
            order=order, piece=piece, node=worker.node, attempt=attempt, slot=worker.slot, slots=worker.slots
        )

    return ask


def _marked(line: str, shared: SharedHost | None) -> str:
    from kda_judge.evidence import ledger

    if shared is None:
        return line
    return ledger.encode(interference.marked(RunRecord.model_validate_json(line), shared)).decode()


# ---- before the work ------------------------------------------------------------------------


def _check(wish: Wish) -> None:
    if wish.record and wish.quick:
        raise UsageError("--record: a task's ledger holds whole runs, and --quick is a first look; leave one out")
    if wish.quick and wish.job is not Job.BENCH:
        raise UsageError(f"--quick: expected with bench, got {wish.job.value}")
    if wish.parts > 1 and wish.job is not Job.BENCH:
        raise UsageError(f"--parts: expected with bench, got {wish.job.value}, which is split by itself")
    if wish.rows and wish.job not in BY_TASK:
        raise UsageError(f"--rows: expected with bench, validate or tune, got {wish.job.value}")
    if wish.full and wish.job is not Job.VALIDATE:
        raise UsageError(f"--full: expected with validate, got {wish.job.value}")
    if wish.resume and (wish.names or wish.rows or wish.record or wish.quick or wish.full or wish.out):
        raise UsageError("--resume: the run knows names, rows, and whether it records; leave them and --out out")
    plan_pieces.names(wish.job, wish.names, "cuda")  # a wrong one is told before Ray is started


def _planned(folder: RunFolder, wish: Wish, kind: Kind, workers: int) -> Plan:
    if kind == "cpu" and wish.job is Job.TUNE:
        raise MissingRequirement("tune: no GPU in this cluster; without one `kda tune TASK` compiles the candidates")
    if kind == "cpu" and wish.record:
        raise MissingRequirement("--record: no GPU in this cluster; a run without one measures nothing")
    order = Order(
        job=wish.job,
        names=plan_pieces.names(wish.job, wish.names, kind),
        kind=kind,
        rows=tuple(wish.rows),
        full=wish.full,
        quick=wish.quick,
        parts=wish.parts,
        record=wish.record,
        command=wish.command,
    )
    made = Plan(
        order=order,
        pieces=plan_pieces.plan(order, workers),
        commit=provenance.git_state(checkout_root()).commit,
        files=files(order),
    )
    folder.note("planned", plan=made)
    return made


def _known(folder: RunFolder, wish: Wish) -> Plan | None:
    """The plan of a run that is resumed; None for a new one."""
    plan = folder.plan
    if wish.resume is None:
        if plan is not None:
            raise UsageError(f"--out {folder.path}: expected a new folder, got that of a run; go on by --resume")
        return None
    if plan is None:
        raise UsageError(f"--resume {folder.path}: expected the folder of a run, found no plan in {folder.events_file}")
    if plan.order.job is not wish.job:
        raise UsageError(f"--resume {folder.path}: this is a run of {plan.order.job.value}, got {wish.job.value}")
    now = files(plan.order)
    if changed := [op for op, digest in plan.files.items() if now.get(op) != digest]:
        raise UsageError(
            f"--resume {folder.path}: the files of {', '.join(changed)} are not those that it was begun with; go back "
            f"to commit {plan.commit[:10]}, or begin a new run"
        )
    if not plan.files and (commit := provenance.git_state(checkout_root()).commit) != plan.commit:
        raise UsageError(f"--resume {folder.path}: begun at commit {plan.commit[:10]}, this is {commit[:10]}")
    return plan


def _resumed(folder: RunFolder, plan: Plan, kind: Kind) -> Plan:
    if plan.order.kind != kind:
        raise UsageError(f"--resume {folder.path}: begun on {plan.order.kind}, this cluster has {kind}")
    folder.note("resumed")
    return plan


def _folder(wish: Wish) -> Path:
    if wish.resume is not None:
        if not (wish.resume / "events.jsonl").is_file():
            raise UsageError(f"--resume {wish.resume}: expected the folder of a run, found no events.jsonl in it")
        return wish.resume
    return wish.out or (checkout_root() or Path.cwd()) / ".cache" / "fleet" / provenance.run_id()


@contextmanager
def _baggage(wish: Wish) -> Iterator[Baggage]:
    if wish.address is None:
        yield in_place()
        return
    with tempfile.TemporaryDirectory(prefix="kda-fleet-") as folder:
        yield packed(Path(folder), _pins(wish))


def _pins(wish: Wish) -> list[Pin]:
    """What the nodes will need of upstream."""
    if wish.job is Job.MODEL:
        from kda_tools.models.known_models import load_models

        return list(load_models().releases.values())
    if wish.job not in BY_TASK:
        return []
    ops = plan_pieces.names(wish.job, wish.names, "cuda")
    return [pin for op in ops for pin in find_task(op).config.upstream.values()]


def _driver_facts(order: Order) -> NodeFacts:
    """Of this process, which may be on a machine without a GPU: what is compared is commit and files."""
    return facts(order if gpu_state.has_gpu() else order.model_copy(update={"kind": "cpu"}))


def _await_workers(pool: ray_pool.RayPool, here: NodeFacts) -> None:
    until = time.monotonic() + START_S
    while pool.starting() and time.monotonic() < until:
        pool.wait(1.0)
    if late := pool.starting():
        say(f"begun without {', '.join(late)}: nothing heard for {START_S:.0f} s; another job may hold what they need")
    workers = pool.alive()
    demand(workers, here.kind)
    refuse_odd({worker.name: worker.facts for worker in workers}, here)
    pool.driver = here


def _measured(pool: ray_pool.RayPool, folder: RunFolder, order: Order, timeout_s: float) -> dict[str, SharedHost]:
    """What neighbours do to walls, where walls are measured beside some."""
    if order.job is not Job.BENCH or order.kind == "cpu":
        return {}
    shared, standing_out = interference.measure(pool, order, find_task(order.names[0]), timeout_s)
    for node, found in shared.items():
        folder.note("measured", node=node, shared=found, why=interference.disturbed(found))
        say(f"{node}: {interference.disturbed(found) or 'neighbours change walls by no more than the noise floor'}")
    for line in standing_out:
        folder.note("measured", why=line)
        say(f"stands out: {line}")
    return shared
