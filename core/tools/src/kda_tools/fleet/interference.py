"""Measure, before the benches of a fleet, how runs on several GPUs of one host change each other's wall times (walls).

On every node with two or more workers the first worker times two rows, one bound by the host and one by the device. It
does so in turns: while its neighbours are idle, and while they all time the same rows. Each turn is a generation of an
interval. The noise floor is A/A within the turns with idle neighbours. If walls change by more than that, no run
beside these neighbours is published, and a recorded bench continues with fewer workers (`run_fleet`). In the loaded
turns all boards time the same rows, so a board slower than the others shows. If this cannot be measured, the fleet ends
and says why: what it would measure could not be published.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from math import log
from statistics import median

from kda_judge.contract.errors import ArmFailed
from kda_judge.contract.tasks import Task
from kda_judge.evidence import stats
from kda_judge.evidence.neighbours import disturbed
from kda_judge.evidence.run_record import Metric, Neighbours, Repeat, RunRecord, SharedHost
from kda_judge.judge.open_row import footprint
from kda_tools.fleet.drive import POLL_S, Pool, Worker
from kda_tools.fleet.pieces import Order, Piece, Question
from kda_tools.fleet.plan_pieces import rows_of
from kda_tools.lab.compare_runs import MARGIN

TURNS = 3
"""Turns with idle neighbours, and as many with loaded ones: the fewest generations that a published run has."""
DEVICE_BOUND = 32_000_000
"""Bytes of a row that takes the GPU longer than the host. Larger ones only cost more time, in each of six turns."""
Turn = Mapping[str, RunRecord]
"""Worker -> the record of its run."""


def probe_rows(tasks: Sequence[Task], patterns: Sequence[str]) -> tuple[Task, tuple[str, ...]]:
    """The task that is probed, and two of its rows: the one that moves the fewest bytes, and one bound by the device.

    The latter is the smallest such row of all tasks; if no task has any, the largest row.
    """
    found = []
    for task, some in rows_of(tasks, patterns):
        sizes = {row.id: footprint(task.config.ops[row.op], row) for row in some}
        rows = sorted(sizes, key=sizes.__getitem__)
        large = next((row for row in rows if sizes[row] >= DEVICE_BOUND), rows[-1])
        found.append((sizes[large], task, tuple(dict.fromkeys((rows[0], large)))))
    _, task, chosen = min(found, key=lambda one: (one[0] < DEVICE_BOUND, abs(one[0] - DEVICE_BOUND)))
    return task, chosen


def measure(
    pool: Pool, order: Order, tasks: Sequence[Task], timeout_s: float
) -> tuple[dict[str, SharedHost], list[str]]:
    """Node -> its interference, for nodes with several workers; and a line for each board that stands out.

    Raises:
        ArmFailed: a node's first worker, or all others, failed or took too long.
    """
    task, rows = probe_rows(tasks, order.rows)
    piece = Piece(id=f"{task.op} beside neighbours", subject=task.op, items=rows)
    nodes: dict[str, list[Worker]] = {}
    for worker in pool.alive():
        nodes.setdefault(worker.node, []).append(worker)
    several = {node: workers for node, workers in nodes.items() if len(workers) > 1}
    first = [workers[0] for workers in several.values()]
    every = [worker for workers in several.values() for worker in workers]
    idle, loaded, failures = list[Turn](), list[Turn](), list[str]()
    for number in range(TURNS):
        # Idle, loaded, loaded, idle, ...: drift hits both.
        for turns, workers in ((idle, first), (loaded, every))[:: 1 if number % 2 == 0 else -1]:
            turns.append(_turn(pool, order, piece, workers, timeout_s, failures))
    shared = {}
    for node, workers in several.items():
        name = workers[0].name
        quiet = [turn[name] for turn in idle if name in turn]
        noisy = [turn[name] for turn in loaded if name in turn]
        worked = min(len(turn.keys() & {worker.name for worker in workers}) for turn in loaded)
        if worked < 2 or not (changes := interference(quiet, noisy)):
            why = failures[0] if failures else "no row was measured in all turns"
            raise ArmFailed(f"{node}: what neighbours do to walls could not be measured: {why}")
        shared[node] = SharedHost(neighbours=worked - 1, rows=changes)
    return shared, outliers(loaded)


def _turn(
    pool: Pool, order: Order, piece: Piece, workers: Sequence[Worker], timeout_s: float, failures: list[str]
) -> dict[str, RunRecord]:
    """Worker -> its run in one turn; for a run that failed or did not end in time, `failures` gets the reason."""
    names = {worker.name for worker in workers}
    waiting = {worker.name: worker for worker in pool.idle() if worker.name in names}
    for worker in waiting.values():
        question = Question(
            order=order, piece=piece, node=worker.node, slot=worker.slot, slots=worker.slots, probe=True
        )
        pool.give(worker, question)
    found: dict[str, RunRecord] = {}
    until = time.monotonic() + timeout_s
    while waiting and time.monotonic() < until:
        for came in pool.wait(POLL_S):
            waiting.pop(came.worker.name)
            if came.answer is not None and came.answer.line is not None and came.answer.complete:
                found[came.worker.name] = RunRecord.model_validate_json(came.answer.line)
            elif came.answer is None:
                failures.append(f"{came.worker.name}: {came.why}")
            elif why := came.answer.refused or came.answer.failed:
                failures.append(f"{came.worker.name}: {why}")
    for worker in waiting.values():
        failures.append(f"{worker.name}: no answer within {timeout_s:g} s")
        pool.kill(worker)
    return found


def interference(idle: Sequence[RunRecord], loaded: Sequence[RunRecord]) -> dict[str, Neighbours]:
    """The interference by row, without rows that a turn lacks; empty unless idle and loaded turns are equally many."""
    if len(idle) != len(loaded) or not idle:
        return {}
    found = {}
    for name in idle[0].noise_floor:
        if not all(name in run.noise_floor for run in (*idle, *loaded)):
            continue
        first = tuple(part for run in idle for part in run.noise_floor[name].first)
        again = tuple(part for run in idle for part in run.noise_floor[name].second)
        beside = tuple(part for run in loaded for part in run.noise_floor[name].first)
        found[f"{idle[0].task} {name}"] = Neighbours(alone=_repeat(first, again), beside=_repeat(first, beside))
    return found


def _repeat(first: tuple[tuple[float, ...], ...], second: tuple[tuple[float, ...], ...]) -> Repeat:
    return Repeat(first=first, second=second, ratio=stats.speedup(first, second))


def marked(record: RunRecord, shared: SharedHost | None) -> RunRecord:
    """The record of a run on a node, with what is known of its neighbours."""
    if shared is None:
        return record
    why = disturbed(shared)
    return record.model_copy(
        update={"shared_host": shared, "noisy": (*record.noisy, *([why] if why is not None else []))}
    )


def outliers(turns: Sequence[Turn]) -> list[str]:
    """Boards whose device times of a row differ from the other boards', while all of them time the same rows.

    A board stands out if its median over the turns is further from the boards' median than `MARGIN`, by which two
    boards of one kind may differ. With only two boards, nobody can tell which is the odd one: both are named.
    """
    times: dict[str, dict[str, list[float]]] = {}
    boards: dict[str, str] = {}
    for turn in turns:
        for worker, run in turn.items():
            boards[worker] = run.machine.before.uuid if run.machine.before else ""
            for row in run.rows:
                summary = row.arms[run.settings.against[0]].summary.get(Metric.DEVICE)
                if summary is not None:
                    times.setdefault(row.id, {}).setdefault(worker, []).append(summary.median)
    found = []
    for name, by_worker in times.items():
        own = {worker: median(values) for worker, values in by_worker.items()}
        usual = median(own.values())
        found += [
            f"{worker} ({boards[worker]}): {name} takes its GPU {time / usual:.3f} times the boards' median"
            for worker, time in own.items()
            if abs(log(time / usual)) > log(1 + MARGIN)
        ]
    return found
