"""Runs the suite on several GPUs: one process for each GPU, which has a share of the processor cores to itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, as_completed
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Lock, Thread

from kda_judge.arms.process_tree import die_with_parent
from kda_judge.contract.errors import ExitCode, KdaError
from kda_judge.evidence import gpu_state
from kda_tools.lab.adversaries import suite
from kda_tools.lab.adversaries.table import Adversary, Kind

VISIBLE = "CUDA_VISIBLE_DEVICES"
STOP_S = 15
"""Seconds for a process to end its workers and remove its folders; then it is killed, and its workers with it."""

# Two threads ask for a child's state: its collector and the one that started it. multiprocessing does not provide for
# that: if two threads wait for one pid, the one that gets "no such child" from the system takes the child for alive.
_reaping = Lock()


class ShareDied(KdaError):
    """The process of one GPU ended before its adversaries did."""

    exit_code = ExitCode.INTERNAL


def devices() -> list[str]:
    """A value of CUDA_VISIBLE_DEVICES for each visible GPU: its entry in that variable if it is set, else its number.

    At most as many GPUs as there are cores.
    """
    with gpu_state._nvml() as nvml:
        count = len(gpu_state._visible(nvml))
    given = os.environ.get(VISIBLE)
    names = map(str, range(count)) if given is None else map(str.strip, given.split(","))
    return list(names)[: min(count, len(os.sched_getaffinity(0)))]


@contextlib.contextmanager
def started(adversaries: list[Adversary], kind: Kind, names: list[str]) -> Iterator[dict[str, Future[suite.JudgedRow]]]:
    """As `suite.started`, but dealt out in turn to one process per device in `names`, each with cores of its own."""
    spawn = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    each = len(cores) // len(names)
    futures: dict[str, Future[suite.JudgedRow]] = {one.name: Future() for one in adversaries}
    children = []
    try:
        for number, name in enumerate(names):
            mine, ours = adversaries[number :: len(names)], cores[number * each : (number + 1) * each]
            results, theirs = spawn.Pipe(duplex=False)
            child = spawn.Process(
                target=_child, args=(theirs, name, ours, mine, kind), name=f"of device {name}", daemon=True
            )
            with _reaping:  # start() also collects children that have ended
                child.start()
            children.append(child)
            theirs.close()
            shared = {one.name: futures[one.name] for one in mine}
            Thread(target=_collect, args=(child, results, shared), daemon=True).start()
        yield futures
    except BaseException:
        with _reaping:
            for child in children:
                child.terminate()
        raise
    finally:
        for child in children:
            wait([child.sentinel], STOP_S)
            with _reaping:
                child.kill()
                child.join()


def _child(results: Connection, name: str, cores: list[int], adversaries: list[Adversary], kind: Kind) -> None:
    """Run `adversaries` on one device; send the name of each as it begins, and each result."""
    die_with_parent(signal.SIGKILL)
    # Ctrl-C reaches the whole process group. Only the parent handles it, and ends its children by SIGTERM.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    os.environ[VISIBLE] = name
    os.sched_setaffinity(0, cores)
    lock = Lock()

    def send(message: str | suite.JudgedRow) -> None:
        with lock:
            results.send(message)

    with contextlib.suppress(KeyboardInterrupt), suite.started(adversaries, kind, began=send) as futures:
        for future in as_completed(futures.values()):
            send(future.result())


def _collect(child: BaseProcess, results: Connection, futures: dict[str, Future[suite.JudgedRow]]) -> None:
    """Pass on what a child sends; after it has ended, fail the adversaries whose results are missing."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            message = results.recv()
            if isinstance(message, str):
                futures[message].set_running_or_notify_cancel()
            else:
                futures[message.adversary.name].set_result(message)
    wait([child.sentinel])
    with _reaping:
        child.join()
    begun = [name for name, future in futures.items() if future.running()]
    what = ", ".join(begun) or "nothing"
    for future in futures.values():
        if not future.done():
            future.set_exception(
                ShareDied(f"the process {child.name} ended with exit code {child.exitcode} while it ran {what}")
            )
