"""The workers of a fleet as actors of Ray: one for each GPU, or for each CPU on a cluster without GPUs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kda_judge.contract.errors import MissingRequirement
from kda_tools.fleet import gpu_worker
from kda_tools.fleet.checkout import Baggage
from kda_tools.fleet.drive import Worker, WorkerReport
from kda_tools.fleet.node_facts import changed_facts, differing_workers
from kda_tools.fleet.pieces import Answer, NodeFacts, Order, Question
from kda_tools.fleet.places import Place
from kda_tools.fleet.run_folder import RunFolder

CONNECTS = 3
"""Tries to reach a cluster. Ray starts a server for each client, which may die as it comes up on a loaded node."""
COMMAND = ("-m", "kda_tools.fleet.piece_process")
"""Arguments with which an actor starts Python for a question; the job and a descriptor follow."""
CPU_WORKERS = 2
"""Workers on a machine without a GPU, if no number is given."""
STARTS = 4
"""Failed starts in a row after which the place of a worker is given up."""
STORE_BYTES = 80 << 20
"""Size of the object store of a Ray on this machine: only questions and answers go through it."""


@dataclass
class _Seat:
    """A place, and the actor that holds it now."""

    place: Place
    actor: Any = None
    asked: Any = None
    """Ray's reference to the answer that is awaited; None: idle."""
    worker: Worker | None = None
    """None: the actor has not reported its facts yet."""
    failures: int = 0
    """Failed starts in a row."""


@contextmanager
def cluster(address: str | None, workers: int | None, baggage: Baggage) -> Iterator[Any]:
    """Connect `ray` to the cluster at `address`, or to one on this machine that lives as long as the block.

    Raises:
        MissingRequirement: ray is not installed, or nothing answers at `address`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise MissingRequirement("ray is not installed: `pip install 'kda-tools[fleet]'`") from None
    handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        # Without "local" Ray would take a cluster that somebody else has started on this machine.
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES}
        options["num_cpus"] = workers or CPU_WORKERS
    else:
        options["address"] = address
    if baggage.archive is not None:
        options["runtime_env"] = {"working_dir": str(baggage.archive)}
    where = f"--address {address}" if address else "a Ray on this machine"
    try:
        _connect(ray, options, CONNECTS if address else 1)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MissingRequirement(f"{where}: {error}; `ray status` shows whether a cluster is up") from None
    finally:
        signal.signal(signal.SIGTERM, handler)  # `ray.init` replaces it, and SIGTERM must act like Ctrl-C
    try:
        yield ray
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


def _connect(ray: Any, options: dict[str, Any], tries: int) -> None:
    """Call `ray.init`, up to `tries` times if the cluster answers and then aborts the connection."""
    for left in reversed(range(tries)):
        try:
            ray.init(**options)
            return
        except ConnectionAbortedError:
            if not left:
                raise
            ray.shutdown()


class RayPool:
    """A `Pool` of actors. An actor that dies is replaced, and each has to report its facts before it gets work."""

    def __init__(
        self,
        ray: Any,
        order: Order,
        seats: Sequence[Place],
        baggage: Baggage,
        folder: RunFolder,
        command: Sequence[str] = COMMAND,
        starts: int = STARTS,
    ) -> None:
        self._ray, self._order, self._baggage, self._folder = ray, order, baggage, folder
        self._command, self._starts = [*command, order.job.value], starts
        # By value: a node has no kda of its own, and the checkout is on no path until the actor puts it there.
        ray.cloudpickle.register_pickle_by_value(gpu_worker)
        self._seats = [_Seat(place) for place in seats]
        self._accepted: dict[str, NodeFacts] = {}
        self.driver: NodeFacts | None = None
        """Facts of the fleet's driver, set when work begins; a worker that comes up later must agree with them, too."""
        for seat in self._seats:
            self._start(seat)

    def idle(self) -> list[Worker]:
        """Workers that wait for a question."""
        return [seat.worker for seat in self._seats if seat.worker is not None and seat.asked is None]

    def alive(self) -> list[Worker]:
        """All workers that are up, idle or working."""
        return [seat.worker for seat in self._seats if seat.worker is not None]

    def give(self, worker: Worker, question: Question) -> None:
        """Send the question to the worker."""
        seat = self._seat(worker)
        seat.asked = seat.actor.run.remote(question.model_dump_json())

    def wait(self, seconds: float) -> list[WorkerReport]:
        """What came back within `seconds`; returns as soon as there is something."""
        asked = {seat.asked: seat for seat in self._seats if seat.asked is not None}
        if not asked:
            time.sleep(min(seconds, 0.05))
            return []
        ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        return [came for ref in ready if (came := self._received(asked[ref])) is not None]

    def kill(self, worker: Worker) -> None:
        """End the worker and all that it started; a new one takes its place."""
        self._start(self._seat(worker))

    def retire(self, worker: Worker, why: str) -> None:
        """End the worker, and do not replace it."""
        self._retire(self._seat(worker), why)

    def interrupt(self) -> None:
        """Ask all working workers to hand over what they have."""
        for seat in self._seats:
            if seat.worker is not None and seat.asked is not None:
                seat.actor.interrupt.remote()

    def starting(self) -> list[str]:
        """Names of places whose worker is not up yet."""
        return [seat.place.name for seat in self._seats if seat.worker is None]

    def close(self) -> None:
        """End all workers."""
        for seat in self._seats:
            with suppress(self._ray.exceptions.RayError, ConnectionError, RuntimeError):  # it may have gone itself
                self._ray.kill(seat.actor)
        self._seats.clear()

    def _seat(self, worker: Worker) -> _Seat:
        return next(seat for seat in self._seats if seat.place.name == worker.name)

    def _start(self, seat: _Seat) -> None:
        """Start a new actor at this place, and ask it at once what it runs on."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if seat.actor is not None:
            self._ray.kill(seat.actor)
        on_gpu = self._order.kind == "cuda"
        made = self._ray.remote(gpu_worker.GpuWorker).options(
            num_gpus=1 if on_gpu else 0,
            num_cpus=0 if on_gpu else 1,
            max_restarts=0,
            max_concurrency=2,
            scheduling_strategy=NodeAffinitySchedulingStrategy(seat.place.node_id, soft=False),
        )
        seat.actor = made.remote(self._command, dict(self._baggage.environment), list(self._baggage.sources))
        self._ask_facts(seat)

    def _ask_facts(self, seat: _Seat) -> None:
        """Ask the actor what it runs on; until it answers it gets no work."""
        seat.worker = None
        question = Question(order=self._order, slot=seat.place.slot, slots=seat.place.slots)
        seat.asked = seat.actor.run.remote(question.model_dump_json())

    def _received(self, seat: _Seat) -> WorkerReport | None:
        """What the pool reports of an answer; None if the question was what the worker runs on."""
        ref, worker, seat.asked = seat.asked, seat.worker, None
        try:
            answer, why = Answer.model_validate_json(self._ray.get(ref)), ""
        except self._ray.exceptions.RayError as error:
            answer, why = None, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if worker is None:
            self._introduce(seat, answer, why)
            return None
        if answer is None:
            self._start(seat)
        elif answer.failed is not None:
            self._ask_facts(seat)  # checks whether its GPU is still there
        return WorkerReport(worker, answer, why)

    def _introduce(self, seat: _Seat, answer: Answer | None, why: str) -> None:
        place = seat.place
        if answer is None or answer.line is None:
            why = (answer.failed or answer.refused or why) if answer else why
            seat.failures += 1
            if seat.failures < self._starts:
                self._start(seat)
            else:
                self._retire(seat, f"{why} ({self._starts} times in a row)")
            return
        facts = NodeFacts.model_validate_json(answer.line)
        known = self._accepted.setdefault(place.name, facts)
        if changes := changed_facts(facts, known):
            self._retire(seat, f"it came back as something else: {changes}")
            return
        if self.driver is not None and (differs := differing_workers(self._accepted, self.driver).get(place.name)):
            self._retire(seat, differs)
            return
        seat.failures = 0
        seat.worker = Worker(place.name, place.node, place.slot, place.slots, facts)
        self._folder.note("joined", worker=place.name, node=place.node, gpu=facts.uuid)

    def _retire(self, seat: _Seat, why: str) -> None:
        self._folder.note("retired", worker=seat.place.name, node=seat.place.node, why=why)
        self._ray.kill(seat.actor)
        self._seats.remove(seat)
