"""How long the rows of a bench took in recorded runs: what is known of a task before its first piece comes back."""

from __future__ import annotations

from kda_judge.contract.tasks import find_task
from kda_judge.evidence import ledger
from kda_tools.fleet.drive import START_S
from kda_tools.fleet.pieces import Job, Order

NEWEST = 3
"""Runs of a task that are looked at. Older ones may have had other rows and arms."""


def seconds_of_rows(order: Order) -> dict[str, float]:
    """Task -> seconds of a row beyond the start of its run, in the slowest of its newest runs; others are absent."""
    found: dict[str, float] = {}
    if order.job is not Job.BENCH or order.quick or order.kind == "cpu":
        return found
    for name in order.names:
        runs = [run for run in ledger.read(find_task(name).ledger) if run.machine.before and not run.partial]
        if each := [max(run.seconds - START_S, 0.0) / len(run.rows) for run in runs[-NEWEST:] if run.rows]:
            found[name] = max(each)
    return found
