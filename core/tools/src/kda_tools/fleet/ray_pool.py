"""The workers of a fleet as actors of Ray: one for each GPU, or on a cluster without any for each CPU."""

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
from kda_tools.fleet.drive import Came, Worker
from kda_tools.fleet.node_facts import changed, odd
from kda_tools.fleet.pieces import Answer, NodeFacts, Order, Question
from kda_tools.fleet.places import Place
from kda_tools.fleet.run_folder import RunFolder

CONNECTS = 3
"""Tries to reach a cluster: Ray starts a server for each client, and on a loaded node one may die as it comes up."""
COMMAND = ("-m", "kda_tools.fleet.piece_process")
"""What an actor has Python run for a question."""
CPU_WORKERS = 2
"""Of a machine without a GPU, where nobody says how many."""
STARTS = 4
"""Times in a row that a worker may fail to come up; then its place is given up."""
STORE_BYTES = 80 << 20
"""Of a Ray on this machine: only questions and answers go through it."""


@dataclass
class _Seat:
    """A place, and who holds it now."""

    place: Place
    actor: Any = None
    asked: Any = None
    """What is being answered; None: idle."""
    worker: Worker | None = None
    """None: it has not said yet what it is."""
    failures: int = 0
    """Starts in a row that came to nothing."""


@contextmanager
def cluster(address: str | None, workers: int | None, baggage: Baggage) -> Iterator[Any]:
    """The connected `ray`, of the cluster at `address` or one that lives as long as the block, on this machine.

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
        signal.signal(signal.SIGTERM, handler)  # `ray.init` takes it, and SIGTERM shall be as Ctrl-C
    try:
        yield ray
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


def _connect(ray: Any, options: dict[str, Any], tries: int) -> None:
    """`ray.init`; where the cluster answers and then gives up, again, until it was tried `tries` times."""
    for left in reversed(range(tries)):
        try:
            ray.init(**options)
            return
        except ConnectionAbortedError:
            if not left:
                raise
            ray.shutdown()


class RayPool:
    """A `Pool`: the actors, each of which is replaced when it dies, and asked what it is before it is given work."""

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
        self._command, self._starts = list(command), starts
        # By value: a node has no kda of its own, and the checkout's is on no path before the actor has put it there.
        ray.cloudpickle.register_pickle_by_value(gpu_worker)
        self._seats = [_Seat(place) for place in seats]
        self._accepted: dict[str, NodeFacts] = {}
        self.driver: NodeFacts | None = None
        """Once work has begun: what a worker that comes late has to be like, beside the others."""
        for seat in self._seats:
            self._start(seat)

    def idle(self) -> list[Worker]:
        """Those that wait for a question."""
        return [seat.worker for seat in self._seats if seat.worker is not None and seat.asked is None]

    def alive(self) -> list[Worker]:
        """Those, and the working ones."""
        return [seat.worker for seat in self._seats if seat.worker is not None]

    def give(self, worker: Worker, question: Question) -> None:
        """Have it work."""
        seat = self._seat(worker)
        seat.asked = seat.actor.run.remote(question.model_dump_json())

    def wait(self, seconds: float) -> list[Came]:
        """What came meanwhile; returns at once where something did."""
        asked = {seat.asked: seat for seat in self._seats if seat.asked is not None}
        if not asked:
            time.sleep(min(seconds, 0.05))
            return []
        ready, _ = self._ray.wait(list(asked), num_returns=1, timeout=seconds)
        if ready:
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=0)
        return [came for ref in ready if (came := self._received(asked[ref])) is not None]

    def kill(self, worker: Worker) -> None:
        """End it, and all that it started; a new one takes its place."""
        self._start(self._seat(worker))

    def retire(self, worker: Worker, why: str) -> None:
        """End it; none takes its place."""
        self._retire(self._seat(worker), why)

    def interrupt(self) -> None:
        """Ask all that work to hand over what they have."""
        for seat in self._seats:
            if seat.worker is not None and seat.asked is not None:
                seat.actor.interrupt.remote()

    def starting(self) -> list[str]:
        """Names of places whose worker has yet to come up."""
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
        """A new actor at this place, in which it is asked at once what it runs on."""
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
        """Have it say what it runs on; until then it is given no work."""
        seat.worker = None
        question = Question(order=self._order, slot=seat.place.slot, slots=seat.place.slots)
        seat.asked = seat.actor.run.remote(question.model_dump_json())

    def _received(self, seat: _Seat) -> Came | None:
        """What is to be told of an answer; nothing of one to the question what a worker runs on."""
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
            self._ask_facts(seat)  # whether its GPU is still there
        return Came(worker, answer, why)

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
        if changes := changed(facts, known):
            self._retire(seat, f"it came back as something else: {changes}")
            return
        if self.driver is not None and (differs := odd(self._accepted, self.driver).get(place.name)):
            self._retire(seat, differs)
            return
        seat.failures = 0
        seat.worker = Worker(place.name, place.node, place.slot, place.slots, facts)
        self._folder.note("joined", worker=place.name, node=place.node, gpu=facts.uuid)

    def _retire(self, seat: _Seat, why: str) -> None:
        self._folder.note("retired", worker=seat.place.name, node=seat.place.node, why=why)
        self._ray.kill(seat.actor)
        self._seats.remove(seat)
