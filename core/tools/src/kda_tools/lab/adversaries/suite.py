"""Runs an adversary through the real judge, with real workers, in a checkout of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.process_tree import trees
from kda_judge.arms.protocol import ArmSpec
from kda_judge.bench import CHANGED, run
from kda_judge.contract.tasks import Task
from kda_judge.evidence.run_record import RowResult, Verdict
from kda_judge.judge import verdict
from kda_judge.judge.idle_arms import busy
from kda_judge.judge.judge import Judge, Progress
from kda_judge.judge.oracle import load_reference
from kda_judge.judge.row_notes import RowNotes
from kda_judge.judge.run_setup import Setup
from kda_judge.session import Request, Session, frozen_rows, open_session
from kda_tools.lab.adversaries.table import ARMS, NOISY, PASSES, Adversary, Ending, Kind

TOY = Path(__file__).parent / "toy"
ROWS = Path(__file__).parent / "rows.toml"
SAMPLES = 3
LOOP_US = 60_000
"""Microseconds of a sample on a CPU if times are checked. If the machine was busy while calls were counted, samples are
shorter, and what an arm does in less than `IDLE_LEAST_S` is not judged."""
HANG_S = {"cpu": 2, "cuda": 10}
"""Timeout of a command in seconds if the adversary hangs; the opponent's first call on a GPU must fit."""
TRIES = 3
"""Most runs of an adversary whose times must not count: on a busy CPU the judge's clock may find it INVALID."""
MOST_TOGETHER = 4
POLL_S = 0.2
"""Seconds between two looks for workers of runs that must end."""


@dataclass(frozen=True)
class JudgedRow:
    """How the judge ended an adversary's row."""

    adversary: Adversary
    kind: Kind
    verdict: Verdict
    reason: str
    changed: str = ""
    """Which files changed during the run, if that prevents its publication."""
    phases: tuple[tuple[str, float], ...] = ()
    """The run's phases in order, and the seconds of each."""

    @property
    def seconds(self) -> float:
        """Seconds that the run took."""
        return sum(seconds for _, seconds in self.phases)

    @property
    def name(self) -> str:
        """The verdict; `passes` if it is that of an honest row, `noisy` if only the publication is prevented."""
        if self.verdict not in PASSES[self.kind]:
            return self.verdict.value
        return NOISY if self.changed else "passes"

    @property
    def deciding_words(self) -> str:
        """The text of the judge that decides."""
        return self.changed if self.name == NOISY else self.reason

    @property
    def wrong(self) -> str | None:
        """How this differs from what was expected, or None."""
        ending = self.adversary.on(self.kind)
        assert ending is not None
        if self.name != ending.name:
            return f"expected {ending.name}, got {self.verdict.value}: {self.deciding_words}"
        if not re.search(ending.words, self.deciding_words, re.DOTALL):
            return f"{self.name} as expected, but the reason lacks {ending.words!r}: {self.deciding_words}"
        return None


def place(root: Path) -> None:
    """Put the test task with the suite's rows and every adversary into `root`, an import root: `toys/k90_axpy`."""
    task = root / "toys" / "k90_axpy"
    nothing_compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(TOY, task, ignore=nothing_compiled)
    shutil.copytree(ARMS, task / "faulty", ignore=nothing_compiled)


@contextlib.contextmanager
def checkout(adversary: Adversary, kind: Kind) -> Iterator[Task]:
    """A task of its own for one adversary, under an import name that nothing else uses."""
    with TemporaryDirectory(prefix="kda-adversary-") as folder:
        root = Path(folder)
        place(root)
        task = root / "toys" / "k90_axpy"
        with (task / "bench" / "workloads.toml").open("a", encoding="utf-8") as rows:
            rows.write("\n" + ROWS.read_text(encoding="utf-8"))
        config = (task / "config.toml").read_text(encoding="utf-8")
        if adversary.name == "hangs":
            config = config.replace("timeout_s = 20", f"timeout_s = {HANG_S[kind]}")
        arm = f'\n[arms.{adversary.name}]\nmodule = "faulty.{adversary.name}"\ndevices = ["cuda", "cpu"]\n'
        (task / "config.toml").write_text(config + arm, encoding="utf-8")
        yield Task(task)


def run_adversary(adversary: Adversary, kind: Kind) -> JudgedRow:
    """Run the adversary once, and return how the judge ended its row."""
    ending = adversary.on(kind)
    assert ending is not None
    marks = [("start", time.monotonic())]

    def enter(_row: str, phase: str) -> None:
        marks.append((phase, time.monotonic()))

    with checkout(adversary, kind) as task:
        request = Request(
            task=task,
            rows=[(kind == "cuda" and adversary.cuda_row) or adversary.row],
            subject=adversary.name,
            against=["eager"],
            device=kind,
            # A run may see the load of the run before it; that is no reason to refuse.
            allow_busy=True,
            generations=adversary.generations,
            samples=SAMPLES if kind == "cuda" or adversary.loops else None,
        )
        session = open_session(request)
        if kind == "cpu" and not adversary.opponent:
            # A request may not set an arm against itself; here that saves a process for every adversary.
            settings = session.settings.model_copy(update={"against": (adversary.name,)})
            session = replace(session, settings=settings)
        changed = ""
        if kind == "cpu" and adversary.loops:
            ended, reason = _looped(session, ending, enter)
        else:
            record = run(session, frozen_rows(session), measure=True, progress=enter)
            changed = "; ".join(words for words in record.noisy if CHANGED in words)
            ended, reason = record.rows[0].verdict, record.rows[0].reason
        marks.append(("", time.monotonic()))
    phases = tuple((phase, end - begin) for (phase, begin), (_, end) in pairwise(marks))
    return JudgedRow(adversary, kind, ended, reason, changed, phases)


def _looped(session: Session, ending: Ending, progress: Progress) -> tuple[Verdict, str]:
    """Run on a CPU, with samples longer than a GPU's. The checks of times count only if INVALID is expected.

    Otherwise they do not, because on a busy machine the judge's clock finds honest samples too long. It may find even
    long loops so, and then the row is INVALID at once; such a run is made again, up to `TRIES` times in all.
    """
    for _ in range(TRIES):
        notes, found = _judged(session, progress)
        if ending.verdict is Verdict.INVALID or found.verdict is not Verdict.INVALID:
            break
    if ending.verdict is Verdict.INVALID and found.verdict in PASSES["cpu"]:
        name = session.settings.subject
        words = busy(name, notes.arms[name]) or verdict._clocks_differ(notes.arms[name], {})
        return (Verdict.INVALID, str(words)) if words else (found.verdict, found.reason)
    return found.verdict, found.reason


def _judged(session: Session, progress: Progress) -> tuple[RowNotes, RowResult]:
    """The notes and the verdict of one run with long samples."""
    settings = session.settings.model_copy(update={"target_sample_us": LOOP_US})
    task, names = session.request.task, dict.fromkeys((*settings.against, settings.subject))
    specs = [
        ArmSpec(name=name, folder=str(task.path), module=session.config.arms[name].module, device="cpu")
        for name in names
    ]
    arms = {spec.name: ArmProcess(spec, session.config.bench.timeout_s, {}) for spec in specs}
    judge = Judge(Setup(session.config, load_reference(task), arms, settings, "cpu"), progress)
    try:
        judge.run(frozen_rows(session), measure=True)
    finally:
        judge.stop()
    (notes,) = judge.notes.values()
    return notes, verdict.result(notes, settings, "cpu", 0)


def chosen(kind: Kind, names: tuple[str, ...], adversaries: tuple[Adversary, ...]) -> list[Adversary]:
    """The adversaries that `kind` can run, in the table's order; all of them, or those named."""
    return [one for one in adversaries if one.on(kind) is not None and (not names or one.name in names)]


@contextlib.contextmanager
def started(
    adversaries: list[Adversary], kind: Kind, began: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Future[JudgedRow]]]:
    """Run all. Those whose verdict depends on no time run in parallel; on a GPU the others follow, one by one.

    `began` gets the name of each as it begins. Leaving the block ends those that run and drops the rest.
    """

    def run_one(one: Adversary) -> JudgedRow:
        began(one.name)
        return run_adversary(one, kind)

    together = [one for one in adversaries if kind == "cpu" or _timeless(one.on(kind))]
    pool, alone = ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), MOST_TOGETHER)), ThreadPoolExecutor(1)
    futures = {one.name: pool.submit(run_one, one) for one in together}
    alone.submit(wait, list(futures.values()))
    futures |= {one.name: alone.submit(run_one, one) for one in adversaries if one not in together}
    pool.shutdown(wait=False)
    alone.shutdown(wait=False)
    try:
        yield futures
    finally:
        running = [future for future in futures.values() if not future.cancel()]
        while wait(running, timeout=POLL_S).not_done:
            _kill_workers()


def _kill_workers() -> None:
    """End this process's workers. A judge without workers soon ends, though it may start some once more before."""
    for process in trees([os.getpid()])[os.getpid()]:
        with contextlib.suppress(OSError):
            if b"kda_judge.arms.arm_worker" in Path(f"/proc/{process}/cmdline").read_bytes():
                os.kill(process, signal.SIGTERM)  # the supervisor takes its worker's tree along


def _timeless(ending: Ending | None) -> bool:
    return ending is not None and ending.verdict in (Verdict.INCORRECT, Verdict.ERROR, Verdict.TIMEOUT)
