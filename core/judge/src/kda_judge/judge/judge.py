"""The judge: takes every row through generations of fresh workers. Imports no arm.

For one row it lays out an arena, lets every arm verify (`checker.py`), and then times them sample by sample
(`sampler.py`). After all timing comes an audit: unseen values, inputs replaced while a loop runs, kernels counted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from kda_judge.arms.arm_process import ArmProcess, Fault, Refusal, processes
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.protocol import Chosen, Counted, Ready
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import LIMIT_ARM, Verdict
from kda_judge.judge.checker import Checker
from kda_judge.judge.idle_arms import alone
from kda_judge.judge.open_row import Case, footprint, traffic
from kda_judge.judge.replaced_inputs import replace_under_way
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.run_setup import Setup
from kda_judge.judge.sampler import Sampler

PROFILED_CALLS = 20

Progress = Callable[[str, str], None]
"""Called with a row id and the phase it enters."""


class Judge:
    """Runs rows on arms and notes what happened."""

    def __init__(self, setup: Setup, progress: Progress, timed: Callable[[RowNotes], None] = lambda _: None) -> None:
        self._setup = setup
        self._progress = progress
        self._timed = timed
        self._checker = Checker(setup)
        self._sampler = Sampler(setup, self._checker)
        self._cannot_start: dict[str, Fault] = {}
        self.notes: dict[str, RowNotes] = {}

    def run(self, rows: Sequence[Workload], measure: bool, until: float | None = None) -> None:
        """Verify every row, and with `measure` time it in every generation; `notes` grow as it goes.

        Without `measure`, no row but the first begins after `until`, a time of the monotonic clock.
        """
        for generation in range(self._setup.settings.generations if measure else 1):
            self._start_all()
            for number, row in enumerate(rows):
                if number and not measure and until is not None and time.monotonic() > until:
                    return
                self._isolate(number)
                self._generation(row, generation, measure)
        if measure:
            for number, row in enumerate(rows):
                self._isolate(number)
                self._audit(row)

    def pids(self) -> list[int]:
        """Process ids of the judge and its workers, which may hold the GPU."""
        return [os.getpid(), *chain.from_iterable(processes(self._setup.arms).values())]

    def stop(self) -> None:
        """End every worker."""
        for step in (ArmProcess.end, ArmProcess.stop):
            for arm in self._setup.arms.values():
                step(arm)

    # ---- one row ----------------------------------------------------------------------------

    def _generation(self, row: Workload, generation: int, measure: bool) -> None:
        settings = self._setup.settings
        if row.id not in self.notes:
            op = self._setup.config.ops[row.op]
            # A row that is neither timed nor of production asks only whether the subject is right.
            excused = set() if measure or row.production else set(settings.against) - {settings.subject}
            excused |= set(settings.beside)
            arms = {name: ArmNotes(excused=name in excused) for name in self._setup.arms}
            self.notes[row.id] = RowNotes(row, traffic(op, row, self._setup.reference), footprint(op, row), arms)
        notes = self.notes[row.id]
        slices = generation == 0 and self._checker.takes_slices(row)
        with self._within_memory(notes), self._open(notes, slices, cold=measure and settings.cold) as case:
            self._progress(row.id, "verify")
            if measure and self._setup.device != "cpu":
                self._warm(case, notes)
            if generation == 0:
                trials = [(seed, Family(family)) for family in settings.families for seed in settings.seeds]
            else:
                trials = [(self._checker.seed(), Family(self._checker.random.choice(settings.families)))]
            for number, (seed, family) in enumerate(trials, start=1):
                self._checker.verify(case, notes, seed, family, twice=generation == 0 and number == len(trials))
            if case.slices:
                self._checker.verify(case, notes, self._checker.seed(), Family.NORMAL, slices=True)
            if measure and notes.worth_measuring(settings):
                self._progress(row.id, f"measure {generation + 1}/{settings.generations}")
                self._sampler.measure(case, notes, generation)
        notes.complete = not measure
        if measure and generation == settings.generations - 1:
            self._timed(notes)

    def _warm(self, case: Case, notes: RowNotes) -> None:
        """Make every arm's first call, in which it compiles and tunes; its outputs are not judged.

        One arm after the other, with all others held: their use of the GPU meanwhile would mislead its autotuner. Then
        the limits' worker chooses its fastest streams, once for all generations.
        """
        self._checker.write(case, make(case.row, Family.NORMAL, self._checker.seed(), self._setup.device))
        for name, arm in notes.usable(self._setup.arms):
            with notes.arms[name].noting(), suppress(Refusal), alone(name, self._setup.arms):
                arm.ask("warm", Ready, refusable=notes.arms[name].excused, streams=notes.arms[name].streams)
        # It is unknown which arm wrote there. An arm that writes outside its tensors does it again when it is verified.
        case.arena.repair_guards()
        for name, arm in notes.usable(self._setup.arms, LIMIT_ARM):
            with notes.arms[name].noting(), alone(name, self._setup.arms):
                chosen, _ = arm.ask("choose", Chosen, streams=notes.arms[name].streams)
                notes.arms[name].streams = chosen.streams

    def _audit(self, row: Workload) -> None:
        """After all timing: verify once more on unseen values, and count kernels in verified and timed calls."""
        notes, settings, device = self.notes[row.id], self._setup.settings, self._setup.device
        if not notes.worth_measuring(settings):
            return
        self._progress(row.id, "audit")
        with self._within_memory(notes), self._open(notes) as case:
            for family in settings.families:
                self._checker.verify(case, notes, self._checker.seed(), Family(family))
            named = (settings.subject, *settings.against)
            # The profiler takes seconds to start in every worker, so a quick run goes without these checks.
            for name, arm in () if settings.quick else notes.usable(self._setup.arms, *named):
                with notes.arms[name].noting():
                    if not row.inplace:
                        replace_under_way(self._checker, case, notes, notes.arms[name], arm)
                    for kind, count in (("verified", 1), ("timed", PROFILED_CALLS)) if device != "cpu" else ():
                        # New values: an arm that remembers results by content must not have one for this call.
                        self._checker.write(case, make(row, Family.NORMAL, self._checker.seed(), device))
                        counted, _ = arm.ask("profile", Counted, count=count)
                        notes.arms[name].kernels[kind] = counted.kernels / count
        notes.complete = True

    @contextmanager
    def _within_memory(self, notes: RowNotes) -> Iterator[None]:
        """Let the row end in ERROR, and the others go on, where the GPU has too little memory for what the judge needs.

        That is about ten times the bytes of the row's tensors, besides what every arm allocates.
        """
        import torch

        try:
            yield
        except torch.cuda.OutOfMemoryError as error:
            subject = notes.arms[self._setup.settings.subject]
            words = f"this GPU has too little memory to judge the row: {str(error).split('. Of the ')[0]}"
            subject.fault = subject.fault or Fault(Verdict.ERROR, words)
            torch.cuda.empty_cache()

    # ---- workers ----------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Start every worker; they end and import side by side, and nothing is timed meanwhile."""
        self._cannot_start = {}
        # Imported before the first arm runs, since an arm may put files where Python looks for modules.
        import torch.multiprocessing.reductions  # noqa: F401

        for step in (ArmProcess.end, ArmProcess.start, _begin_import, _end_import):
            for name, arm in self._setup.arms.items():
                try:
                    if name not in self._cannot_start:
                        step(arm)
                except Fault as fault:
                    # Not tried again in this generation: an import that hangs would cost its timeout on every row.
                    self._cannot_start[name] = fault

    def _isolate(self, number: int) -> None:
        """Fresh workers for every row but the first, where the task asks for that."""
        if self._setup.settings.isolate == "workload" and number:
            self._start_all()

    @contextmanager
    def _open(self, notes: RowNotes, slices: bool = False, cold: bool = False) -> Iterator[Case]:
        """The row's arena, mapped by every usable arm; dead arms are started again first."""
        op = self._setup.config.ops[notes.row.op]
        beyond = (self._setup.l2_bytes if cold else 0, notes.footprint)
        case = Case.open(op, notes.row, self._setup.device, notes.traffic, slices, beyond)
        try:
            for name, arm in notes.usable(self._setup.arms):
                with notes.arms[name].noting():
                    if name in self._cannot_start:
                        raise self._cannot_start[name]
                    if not arm.alive:
                        notes.arms[name].restarts += 1
                        arm.start()
                        arm.hello()
                    arm.ask("attach", Ready, handle=case.arena.handle())
                    arm.ask("row", Ready, row=case.spec.model_dump(mode="json"))
            yield case
        except (KeyboardInterrupt, SystemExit):
            self.stop()  # a hung arm would not answer `close`
            raise
        finally:
            for name, arm in self._setup.arms.items():
                if arm.alive:
                    notes.arms[name].fault = notes.arms[name].fault or arm.strays()
                    with ArmNotes().noting():
                        arm.ask("close", Ready)
            case.close()


def _begin_import(arm: ArmProcess) -> None:
    arm.post("hello")


def _end_import(arm: ArmProcess) -> None:
    arm.hello(posted=True)
