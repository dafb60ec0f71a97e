"""`kda fleet run`: do an order on all workers, and record the results."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kda_judge.contract.errors import ArmFailed, KdaError, MissingRequirement
from kda_judge.contract.tasks import checkout_root, find_task
from kda_judge.evidence import gpu_state
from kda_judge.evidence.neighbours import disturbed
from kda_judge.evidence.run_record import RunRecord, SharedHost
from kda_tools.fleet import fleet_record, interference, ray_pool
from kda_tools.fleet.checkout import Baggage
from kda_tools.fleet.deliver import Appended, deliver
from kda_tools.fleet.drive import Driver, Pool, Worker
from kda_tools.fleet.live_view import progress_printer, summary
from kda_tools.fleet.node_facts import demand_workers, node_facts, refuse_odd
from kda_tools.fleet.open_run import RunOptions, baggage_of, check_options, folder_of, known_plan, new_plan, resume_plan
from kda_tools.fleet.past_runs import seconds_of_rows
from kda_tools.fleet.pieces import Job, Kind, NodeFacts, Order, Piece, Question, remaining
from kda_tools.fleet.places import Place, kind_of, places
from kda_tools.fleet.run_folder import Plan, RunFolder
from kda_tools.fleet.schedule import Schedule
from kda_tools.terminal import say

START_S = 120.0
"""Seconds for the workers to come up; the fleet begins without those that take longer."""


@dataclass
class FleetOutcome:
    """How a run ended."""

    folder: RunFolder
    plan: Plan
    schedule: Schedule
    interrupted: bool
    line: str
    """What the run cost, in one line."""
    recorded: list[Appended] = field(default_factory=list)


def run(wish: RunOptions) -> FleetOutcome:
    """Do what `wish` asks, as far as possible.

    Raises:
        UsageError: a wrong name or wish, workers that are not alike, a run that cannot be resumed.
        MissingRequirement: no ray, no cluster, no worker, or no GPU for work that needs one.
        ArmFailed: no worker is left.
    """
    check_options(wish)
    until = math.inf if wish.limit_s is None else time.monotonic() + wish.limit_s
    with RunFolder(folder_of(wish)).open() as folder, baggage_of(wish) as baggage:
        plan = known_plan(folder, wish)  # refused before Ray is started
        with ray_pool.cluster(wish.address, wish.most, baggage) as ray:
            nodes = ray.nodes()
            kind = kind_of(nodes)
            seats = places(nodes, kind, wish.most, wish.per_node)
            demand_workers(seats, kind)
            plan = resume_plan(folder, plan, kind) if plan else new_plan(folder, wish, kind, len(seats))
            say(f"pieces: {len(plan.pieces)}, workers: {len(seats)}; events and results: {folder.path}")
            return _run(ray, folder, plan, seats, baggage, wish, until)


def _run(
    ray: Any, folder: RunFolder, plan: Plan, seats: Sequence[Place], baggage: Baggage, wish: RunOptions, until: float
) -> FleetOutcome:
    order, begin = plan.order, time.monotonic()
    pieces = [remaining(piece, folder.results) for piece in plan.pieces]
    schedule = Schedule.of(pieces, folder.complete_pieces, folder.attempts, wish.attempts)
    pool = ray_pool.RayPool(ray, order, seats, baggage, folder)
    # This process may be on a machine without a GPU, since only its commit and files are compared.
    here = node_facts(order if gpu_state.has_gpu() else order.model_copy(update={"kind": "cpu"}))
    complete, at_limit = True, False
    error: KdaError | None = None
    try:
        _await_workers(pool, here, order.kind)
        shared = _measured(pool, folder, order, wish.timeout_s) if not schedule.over else {}

        def mark(line: str, worker: Worker) -> str:
            if order.job is not Job.BENCH or order.kind == "cpu":
                return line
            return _marked(line, _beside(pool, worker, shared.get(worker.node)))

        with progress_printer(folder, pool.alive, len(plan.pieces)) as look:
            driver = Driver(
                folder,
                pool,
                _asking(order),
                wish.timeout_s,
                mark,
                look,
                until,
                divisible=bool(order.missing),
                expected_s={} if until == math.inf else seconds_of_rows(order),
            )
            complete = driver.run(schedule)
            at_limit = driver.at_limit(schedule)
    except KeyboardInterrupt:
        complete = False
    except ArmFailed as failed:  # no worker is left; the results so far are kept
        error = failed
    except (ray.exceptions.RayError, ConnectionError) as lost:
        error = MissingRequirement(f"Ray answers no more: {lost}; go on by --resume {folder.path}")
    finally:
        ran_on = next((worker.facts for worker in pool.alive()), here)
        pool.close()  # also on a cluster that stays up
    held = time.monotonic() - begin
    line = summary(folder.events[_session(folder) :], len(seats), held, order.kind)
    folder.note("ended", why=line)
    ended = FleetOutcome(folder, plan, schedule, not complete, line)
    if order.record:
        whole = complete and error is None
        ended.recorded = deliver(folder, plan, ran_on, whole=whole)
        ran = at_limit or (whole and len(folder.complete_pieces) == len(plan.pieces))
        made = fleet_record.recorded(folder, plan, ran_on) if ran else None
        if made is not None and (root := checkout_root()) is not None:
            fleet_record.append(root, made)
    if error is not None:
        raise error
    return ended


def _session(folder: RunFolder) -> int:
    """Index of the first event of this process."""
    begun = [number for number, event in enumerate(folder.events) if event.event in ("planned", "resumed")]
    return begun[-1]


def _asking(order: Order) -> Any:
    def ask(piece: Piece, attempt: int, worker: Worker) -> Question:
        return Question(
            order=order, piece=piece, node=worker.node, attempt=attempt, slot=worker.slot, slots=worker.slots
        )

    return ask


def _beside(pool: Pool, worker: Worker, measured: SharedHost | None) -> SharedHost | None:
    """What is known of the neighbours that a worker has now: nothing, if it has more of them than were measured."""
    now = sum(one.node == worker.node for one in pool.alive()) - 1
    return SharedHost(neighbours=now, rows={}) if now > (measured.neighbours if measured else 0) else measured


def _marked(line: str, shared: SharedHost | None) -> str:
    from kda_judge.evidence import ledger

    if shared is None:
        return line
    return ledger.encode(interference.marked(RunRecord.model_validate_json(line), shared)).decode()


def _await_starting(pool: Pool) -> None:
    until = time.monotonic() + START_S
    while pool.starting() and time.monotonic() < until:
        pool.wait(1.0)


def _await_workers(pool: ray_pool.RayPool, here: NodeFacts, kind: Kind) -> None:
    _await_starting(pool)
    if late := pool.starting():
        say(f"begun without {', '.join(late)}: nothing heard for {START_S:.0f} s; another job may hold what they need")
    workers = pool.alive()
    demand_workers(workers, kind)
    refuse_odd({worker.name: worker.facts for worker in workers}, here)
    pool.driver = here


def _measured(pool: Pool, folder: RunFolder, order: Order, timeout_s: float) -> dict[str, SharedHost]:
    """Node -> what neighbours do to walls there; empty unless walls are measured. ArmFailed if they could not be.

    If the workers of a node disturb each other in a recorded bench, half of them are retired until they do not.
    """
    if order.job is not Job.BENCH or order.kind == "cpu":
        return {}
    while True:
        shared, standing_out = interference.measure(pool, order, [find_task(op) for op in order.names], timeout_s)
        for node, found in shared.items():
            folder.note("measured", node=node, shared=found, why=disturbed(found))
            say(f"{node}: {disturbed(found) or 'neighbours change walls by no more than the noise floor'}")
        for line in standing_out:
            folder.note("measured", why=line)
            say(f"stands out: {line}")
        _await_starting(pool)  # a worker that failed in the probe comes up again, and is a neighbour then
        crowded = {node: why for node, found in shared.items() if (why := disturbed(found))}
        if not (order.record and crowded):
            return shared
        for node, why in crowded.items():
            several = [worker for worker in pool.alive() if worker.node == node]
            say(f"{node}: goes on with {len(several) // 2} of {len(several)} workers")
            for worker in several[len(several) // 2 :]:
                pool.retire(worker, why)
