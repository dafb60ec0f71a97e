"""Find what a worker runs on and with, and which workers differ from the others."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import checkout_root, find_task
from kda_judge.evidence import gpu_state, provenance
from kda_tools.fleet.pieces import Job, NodeFacts, Order

BY_TASK = (Job.BENCH, Job.VALIDATE, Job.TUNE)
"""Jobs whose names are ops."""


def node_facts(order: Order) -> NodeFacts:
    """Facts of this process; a UsageError or MissingRequirement if one cannot be read, as of a GPU that has gone."""
    state = gpu_state.read_state(0) if order.kind == "cuda" else None
    git = provenance.git_state(checkout_root())
    return NodeFacts(
        host=socket.gethostname(),
        kind=order.kind,
        gpu=state.name if state else None,
        uuid=state.uuid if state else None,
        commit=git.commit,
        dirty=git.dirty,
        versions=provenance.versions(state.driver if state else None),
        files=file_digests(order),
        cores=len(os.sched_getaffinity(0)),
        cpu=provenance.processor(),
    )


def file_digests(order: Order) -> dict[str, str]:
    """Op -> digest of all that decides its numbers; empty if the names of the job are not ops."""
    names = order.names if order.job in BY_TASK else ()
    return {name: _digest(provenance.hashes(find_task(name))) for name in names}


def _digest(parts: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def refuse_odd(workers: Mapping[str, NodeFacts], driver: NodeFacts) -> None:
    """Refuse workers whose results could not be put together with the others'.

    GPU, its driver and versions are compared among the workers; files and commit with those of the fleet's driver.

    Raises:
        UsageError: names every worker that differs, in what, and what to do.
    """
    wrong = [f"{name}: {words}" for name, words in differing_workers(workers, driver).items()]
    if wrong:
        raise UsageError("\n".join(["the workers differ, so that no work was begun:", *wrong]))


def differing_workers(workers: Mapping[str, NodeFacts], driver: NodeFacts) -> dict[str, str]:
    """Worker -> how it differs from most workers, or from the fleet's driver; empty if all are alike."""
    found: dict[str, list[str]] = {}
    asked: dict[str, Callable[[NodeFacts], str]] = {"GPU": lambda one: str(one.gpu)}
    for name in sorted({name for one in workers.values() for name in one.versions}):
        asked[name] = lambda one, name=name: one.versions.get(name, provenance.ABSENT)  # type: ignore[misc]
    for what, ask in asked.items():
        counts = Counter(map(ask, workers.values()))
        usual = counts.most_common(1)[0][0] if counts else ""
        for name, one in workers.items():
            if ask(one) != usual:
                words = f"{what} is {ask(one)}, {counts[usual]} of {len(workers)} have {usual}; leave it out"
                found.setdefault(name, []).append(words)
    for name, one in workers.items():
        if (one.commit, one.dirty) != (driver.commit, driver.dirty):
            now, want = (f"{it.commit[:10]}{' with changes' * it.dirty}" for it in (one, driver))
            found.setdefault(name, []).append(f"its checkout is at {now}, the driver's at {want}")
        if changed := [op for op, digest in driver.files.items() if one.files.get(op) != digest]:
            found.setdefault(name, []).append(f"its files of {', '.join(changed)} are not the driver's")
    return {name: "; ".join(words) for name, words in found.items()}


def changed_facts(now: NodeFacts, before: NodeFacts) -> str:
    """How a worker differs from its former facts; empty if it merely has another GPU of its node."""
    compared = [
        {
            **one.model_dump(exclude={"uuid", "versions", "files"}),
            **one.versions,
            **{f"digest of {op}": digest for op, digest in one.files.items()},
        }
        for one in (now, before)
    ]
    pairs = {name: [one.get(name, provenance.ABSENT) for one in compared] for name in compared[0] | compared[1]}
    return "; ".join(f"{name} is {is_now}, was {was}" for name, (is_now, was) in pairs.items() if is_now != was)


def demand_workers(workers: Sequence[object], kind: str) -> None:
    """Refuse to begin without a worker.

    Raises:
        MissingRequirement: there is no worker.
    """
    if not workers:
        wanted = "a GPU that Ray knows of" if kind == "cuda" else "a CPU that Ray knows of"
        raise MissingRequirement(f"no worker came up: expected {wanted}; `ray status` shows what the cluster has")
