"""The judge: owns seeds, inputs, oracle, alternation and the clock that checks the clock. Imports no arm.

A generation starts every worker afresh and takes the rows in turn. For one row the judge lays out
an arena, lets every arm verify, and then times them sample by sample in alternating order, with
fresh values in the same buffers before each sample.
"""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING, Any

from kda_judge.arms.arm_process import ArmProcess, Fault, Refusal, processes
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.protocol import Called, Captured, Counted, Ready, Timed
from kda_judge.contract.config import Config
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import (
    LIMIT_ARM,
    PORTABLE_ARM,
    REPLAYED_ARM,
    Metric,
    OutputError,
    Settings,
    Verdict,
)
from kda_judge.judge.clock_check import LONGER, LOOPS, SHAVED, claimed_us, suspect
from kda_judge.judge.correctness import INPUT_ROUNDINGS, distance, further, worse, worse_than_baseline
from kda_judge.judge.idle_arms import busy, watched
from kda_judge.judge.open_row import Case, Examined, footprint, output_spec, traffic
from kda_judge.judge.oracle import ask_oracle, last_bits
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.spent import Spent

if TYPE_CHECKING:
    import torch

AGAIN = "again"
"""A second worker of the first opponent: A/A, the noise floor of the session."""
MAX_CALLS = 20_000
LATENCY_CALLS = 10
GRAPH_CALLS = 20
"""Calls per CUDA graph: the fixed cost of a replay is spread over them."""
PROFILED_CALLS = 20
REPLACED_LOOP_US = 50_000
"""A loop whose inputs are replaced lasts as long at least: writing them takes some milliseconds."""
REPLACED_CALLS = (16, 4**10)
"""Least and most calls of such a loop. Where the least take longer than `REPLACED_LOOP_US`, nothing is tried."""
REPLACED_LONGEST_S = 1.0
"""By the judge's clock. Shorter loops grow where the judge came too late: a wait of the host soon weighs nothing."""
SHORT_CLAIM = 1 / 2
"""Share of the time that passed: a loop that claims less cannot be looked at. An honest one claims less where the judge
waited as long as the whole loop again."""
REPLACE_TRIALS = 9
REPLACE_RIGHT, REPLACE_WRONG = 2, 3
"""Trials that end it. One right output may be luck, a wrong one a call that was held up while its inputs changed."""

COLD_SHARE = 1 / 4
"""Of a sample's length, for cold inputs: they decide nothing."""

Progress = Callable[[str, str], None]
"""Called with a row id and the phase it enters."""


class Judge:
    """Runs rows on arms and notes what happened."""

    def __init__(
        self,
        config: Config,
        reference: Any,
        arms: Mapping[str, ArmProcess],
        settings: Settings,
        device: str,
        core: int | None,
        progress: Progress,
        timed: Callable[[RowNotes], None] = lambda _: None,
        spent: Spent | None = None,
    ) -> None:
        self._config = config
        self._reference = reference
        self._arms = arms
        self._settings = settings
        self._device = device
        self._core = core
        self._progress = progress
        self._timed = timed
        self._spent = spent or Spent()
        self._random = random.Random()  # seeded by the system: arms must not foresee the draws
        self._previous: tuple[torch.Tensor, ...] | None = None
        self._cannot_start: dict[str, Fault] = {}
        self._drawn = ""
        self.notes: dict[str, RowNotes] = {}

    def run(self, rows: Sequence[Workload], measure: bool, until: float | None = None) -> None:
        """Verify every row, and with `measure` time it in every generation; `notes` grow as it goes.

        Without `measure`, no row but the first begins after `until`, a time of the monotonic clock.
        """
        for generation in range(self._settings.generations if measure else 1):
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
        """This process and its workers: what of ours may hold the GPU."""
        return [os.getpid(), *chain.from_iterable(processes(self._arms).values())]

    def stop(self) -> None:
        """End every worker."""
        for arm in self._arms.values():
            arm.stop()

    # ---- one row ----------------------------------------------------------------------------

    def _generation(self, row: Workload, generation: int, measure: bool) -> None:
        if row.id not in self.notes:
            op = self._config.ops[row.op]
            # What is not timed, nor a row of production, asks whether the subject is right, whoever else is wrong.
            excused = set() if measure or row.production else set(self._settings.against) - {self._settings.subject}
            excused |= set(self._settings.beside)
            arms = {name: ArmNotes(excused=name in excused) for name in self._arms}
            self.notes[row.id] = RowNotes(row, traffic(op, row, self._reference), footprint(op, row), arms)
        notes = self.notes[row.id]
        seeds = self._settings.seeds
        with self._open(notes, slices=generation == 0 and self._takes_slices(row)) as case:
            self._progress(row.id, "verify")
            if generation == 0:
                trials = [(seed, Family(family)) for family in self._settings.families for seed in seeds]
            else:
                trials = [(self._random.getrandbits(31), Family(self._random.choice(self._settings.families)))]
            for number, (seed, family) in enumerate(trials, start=1):
                self._verify(case, notes, seed, family, twice=generation == 0 and number == len(trials))
            if case.slices:
                self._verify(case, notes, self._random.getrandbits(31), Family.NORMAL, slices=True)
            if measure and self._worth_measuring(notes):
                self._progress(row.id, f"measure {generation + 1}/{self._settings.generations}")
                self._measure(case, notes, generation)
        notes.complete = not measure
        if measure and generation == self._settings.generations - 1:
            self._timed(notes)

    def _audit(self, row: Workload) -> None:
        """After all timing: verify once more on unseen values, and count kernels in verified and timed calls."""
        notes = self.notes[row.id]
        if not self._worth_measuring(notes):
            return
        self._progress(row.id, "audit")
        with self._open(notes) as case:
            for family in self._settings.families:
                self._verify(case, notes, self._random.getrandbits(31), Family(family))
            named = (self._settings.subject, *self._settings.against)
            # The profiler takes seconds to start in every worker: a first look goes without what is counted there.
            for name, arm in () if self._settings.quick else self._usable(notes, *named):
                with self._noting(notes.arms[name]):
                    if not row.inplace:
                        self._replace_under_way(case, notes, notes.arms[name], arm)
                    for kind, count in (("verified", 1), ("timed", PROFILED_CALLS)) if self._device != "cpu" else ():
                        # New values: what an arm remembers by content must not be there in the verified call.
                        self._write(case, make(row, Family.NORMAL, self._random.getrandbits(31), self._device))
                        counted, _ = arm.ask("profile", Counted, count=count)
                        notes.arms[name].kernels[kind] = counted.kernels / count
        notes.complete = True

    def _worth_measuring(self, notes: RowNotes) -> bool:
        return all(notes.arms[name].usable for name in (self._settings.subject, self._settings.against[0]))

    def _usable(self, notes: RowNotes, *names: str) -> list[tuple[str, ArmProcess]]:
        """The arms, or those of `names`, with which going on makes sense."""
        names = names or tuple(self._arms)
        return [(name, arm) for name, arm in self._arms.items() if name in names and notes.arms[name].usable]

    # ---- workers ----------------------------------------------------------------------------

    def _start_all(self) -> None:
        """Start every worker; they import side by side, and nothing is timed meanwhile."""
        self._cannot_start = {}
        for step in (ArmProcess.start, ArmProcess.hello):
            for name, arm in self._arms.items():
                try:
                    if name not in self._cannot_start:
                        step(arm)
                except Fault as fault:
                    # Not tried again in this generation: an import that hangs would cost its timeout on every row.
                    self._cannot_start[name] = fault

    def _isolate(self, number: int) -> None:
        """Fresh workers for every row but the first, where the task asks for that."""
        if self._settings.isolate == "workload" and number:
            self._start_all()

    @contextmanager
    def _open(self, notes: RowNotes, slices: bool = False) -> Iterator[Case]:
        """The row's arena, mapped by every usable arm; dead arms are started again first."""
        op = self._config.ops[notes.row.op]
        case = Case.open(op, notes.row, self._device, self._sets(notes), notes.traffic, slices)
        try:
            for name, arm in self._usable(notes):
                with self._noting(notes.arms[name]):
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
            for name, arm in self._arms.items():
                if arm.alive:
                    notes.arms[name].fault = notes.arms[name].fault or arm.strays()
                    with self._noting(ArmNotes()):
                        arm.ask("close", Ready)
            case.close()

    def _sets(self, notes: RowNotes) -> int:
        """Input sets of a row: one, or where cold inputs are timed, too, more than two L2 caches hold."""
        if not self._settings.cold or self._device == "cpu":
            return 1
        import torch

        cache: int = torch.cuda.get_device_properties(self._device).L2_cache_size
        return 2 + 2 * cache // max(notes.footprint, 1)

    @contextmanager
    def _noting(self, arm: ArmNotes) -> Iterator[None]:
        """Turn an arm's fault into a note, so that the other arms go on."""
        try:
            yield
        except Fault as fault:
            arm.fault = arm.fault or fault

    # ---- correctness ------------------------------------------------------------------------

    def _draw(self, case: Case, notes: RowNotes, family: Family, seed: int) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """Values of every input, and what the oracle makes of them."""
        with self._spent.on("draws"):
            values = make(case.row, family, seed, self._device)
        self._drawn = f"{family.value}, seed {seed}"
        with self._spent.on("oracle"):
            expected = ask_oracle(self._reference, case.op, case.row, values)
        notes.oracle_dtype = str(expected[0].dtype).removeprefix("torch.")
        return values, expected

    def _write(self, case: Case, values: Any, cold: bool = False, slices: bool = False) -> None:
        with self._spent.on("writing inputs"):
            case.write(values, cold, slices)

    def _takes_slices(self, row: Workload) -> bool:
        """Whether the subject has to be right on slices: an arm of upstream is what it is."""
        upstream = self._config.arms[self._settings.subject].upstream
        return not (self._config.ops[row.op].takes_no_slices or upstream)

    def _verify(
        self, case: Case, notes: RowNotes, seed: int, family: Family, slices: bool = False, twice: bool = False
    ) -> None:
        """One call of every arm on the same values, compared in full; on slices, of the subject alone.

        Upstream may refuse slices, and a misaligned access would cost its process. Asked `twice`, an arm that is not in
        place has to make a second result beside the first.
        """
        how = {"slices": slices, "twice": twice and not case.row.inplace}
        values, expected = self._draw(case, notes, family, seed)
        self._drawn += ", in slices" * slices
        errors: dict[str, Sequence[OutputError]] = {}
        ours: tuple[torch.Tensor, ...] = ()
        subject = self._settings.subject
        for name, arm in sorted(self._usable(notes), key=lambda one: one[0] != subject):
            if name == LIMIT_ARM or (slices and name != subject):
                continue
            self._write(case, values, slices=slices)
            which = None if slices else 0
            with self._noting(notes.arms[name]):
                called = self._called(notes.arms[name], arm, how)
                if called is not None:
                    errors[name] = self._examine(case, notes.arms[name], called, values, expected, family, which)
            if errors.get(name) and not slices:
                outputs = case.outputs(values)
                if name == subject:
                    ours = tuple(output.clone() for output in outputs) if len(self._arms) > 1 else ()
                for output, one, other in zip(case.op.outputs, ours, outputs, strict=False) if name != subject else ():
                    known = notes.arms[name].distance
                    known[output] = further(known.get(output), distance(output, one, other))
        self._previous = expected
        self._hold_to_yardstick(case, notes, values, expected, errors)

    def _called(self, notes: ArmNotes, arm: ArmProcess, how: Mapping[str, Any]) -> Called | None:
        """What one call left; None where an excused arm refused it, which is noted."""
        try:
            return arm.ask("verify", Called, refusable=notes.excused, **how)[0]
        except Refusal as refusal:
            notes.outside = notes.outside or refusal.reason
            return None

    def _hold_to_yardstick(
        self, case: Case, notes: RowNotes, values: Any, expected: Any, errors: Mapping[str, Sequence[OutputError]]
    ) -> None:
        """The subject's errors of one draw beside the first opponent's, where both are right."""
        subject, yardstick = self._settings.subject, self._settings.against[0]
        for own, base in zip(errors.get(subject, ()), errors.get(yardstick, ()), strict=False):
            if not case.op.tolerated(own.output):
                continue  # its rule alone decides: one unit more than the opponent's is not twice its error
            failure = worse_than_baseline(own, base)
            allowed = INPUT_ROUNDINGS.get(output_spec(case.op, case.row, own.output).dtype)
            if failure is not None and allowed is not None:
                seed = f"{case.row.id}/{self._drawn}"
                changes = last_bits(self._reference, case.op, case.row, values, expected, seed)
                failure = worse_than_baseline(own, base, allowed * changes[case.op.outputs.index(own.output)])
            if failure is not None:
                notes.arms[subject].incorrect = notes.arms[subject].incorrect or f"{failure} [inputs: {self._drawn}]"

    def _examine(
        self, case: Case, arm: ArmNotes, called: Called, values: Any, expected: Any, family: Family, which: int | None
    ) -> Sequence[OutputError]:
        """Note what a call left; its errors where it is right, since what is wrong is nobody's yardstick."""
        found = self._compare(case, called, values, expected, family, which)
        arm.checks += 1
        arm.incorrect = arm.incorrect or (found.broken if arm.excused else found.failure)
        if arm.excused:
            arm.outside = arm.outside or found.outside
        for error in found.errors:
            arm.errors[error.output] = worse(arm.errors.get(error.output, error), error)
        return found.errors if found.failure is None else ()

    def _compare(
        self, case: Case, called: Called, values: Any, expected: Any, family: Family, which: int | None
    ) -> Examined:
        # Another row's results have other shapes: only the same row's can have been remembered.
        previous = self._previous
        if previous is not None and [p.shape for p in previous] != [e.shape for e in expected]:
            previous = None
        with self._spent.on("comparing"):
            found = case.examine(called, values, expected, previous, family, self._config.tolerance, which)
        drawn = f" [inputs: {self._drawn}]"
        return dataclasses.replace(
            found, outside=found.outside and found.outside + drawn, broken=found.broken and found.broken + drawn
        )

    def _replace_under_way(self, case: Case, notes: RowNotes, arm: ArmNotes, process: ArmProcess) -> None:
        """Write new values into the inputs while a timed loop runs: its last output must follow from them.

        A call that reads while they change may return anything; only the last one is looked at, and only where its
        start lies behind the change. Where nothing could be looked at because the arm claims far less time than passed,
        the row is INVALID; where the judge came too late, the loop gets longer, and the record says how many counted.
        """
        count, elapsed = self._long_loop(process)
        if count < REPLACED_CALLS[0]:
            return
        right, short = 0, 0
        wrong: list[str] = []
        for _ in range(REPLACE_TRIALS):
            old, self._previous = self._draw(case, notes, Family.NORMAL, self._random.getrandbits(31))
            new, expected = self._draw(case, notes, Family.NORMAL, self._random.getrandbits(31))
            self._write(case, old)
            written = [0.0]

            def replace(new: Any = new, written: list[float] = written, pause_s: float = elapsed / 4) -> None:
                time.sleep(pause_s)
                case.write(new)
                written[0] = time.perf_counter()

            begin = time.perf_counter()
            claimed, elapsed = self._loop(process, count, replace)
            called, _ = process.ask("collect", Called)
            # The loop ended `claimed` behind `begin` or later, and its last eighth holds two calls or more.
            if written[0] < begin + 7 / 8 * claimed:
                failure = self._compare(case, called, new, expected, Family.NORMAL, which=0).failure
                right += failure is None
                wrong += [failure] if failure else []
            else:
                # Where the judge was late by its own clock too, the reply waited for it, and that clock says nothing.
                short += claimed < elapsed * SHORT_CLAIM and written[0] < begin + 7 / 8 * elapsed
                if elapsed < REPLACED_LONGEST_S and count < REPLACED_CALLS[1]:
                    count, elapsed = 2 * count, 2 * elapsed
            arm.replaced = right + len(wrong)
            if len(wrong) == REPLACE_WRONG:
                arm.incorrect = f"{wrong[0]}; the inputs were replaced while a loop of calls was running"
            if len(wrong) == REPLACE_WRONG or right == REPLACE_RIGHT:
                return
        if short > REPLACE_TRIALS / 2:
            raise process.give_up(
                Verdict.INVALID, f"claims less than half of the time that passed in {short} of {REPLACE_TRIALS} loops"
            )

    def _long_loop(self, process: ArmProcess) -> tuple[int, float]:
        """Calls of a loop that claims to last long enough to replace inputs, and its seconds by the judge's clock."""
        count, claimed, elapsed = 0, 0.0, 0.0
        while claimed * 1e6 < REPLACED_LOOP_US and count < REPLACED_CALLS[1]:
            count = max(1, 4 * count)
            claimed, elapsed = self._loop(process, count)
        return count, elapsed

    def _loop(
        self, process: ArmProcess, count: int, meanwhile: Callable[[], None] | None = None
    ) -> tuple[float, float]:
        """Seconds of one timed loop, as the worker claims and by the judge's clock."""
        timed, elapsed = process.ask("wall", Timed, count=count, canary=None, meanwhile=meanwhile)
        if timed.total_us > elapsed * 1e6:
            raise process.give_up(Verdict.INVALID, "claims more time than passed")
        return timed.total_us / 1e6, elapsed

    # ---- timing -----------------------------------------------------------------------------

    def _measure(self, case: Case, notes: RowNotes, generation: int) -> None:
        try:
            clocked = [name for name in self._arms if self._metrics(name)]
            for name, arm in self._usable(notes, *clocked):
                with self._noting(notes.arms[name]):
                    self._prepare(case, notes.arms[name], arm, self._metrics(name))
            for index in range(self._settings.samples):
                values, expected = self._draw(case, notes, Family.NORMAL, self._random.getrandbits(31))
                order = self._usable(notes, *clocked)
                errors: dict[str, Sequence[OutputError]] = {}
                for name, arm in order if (index + generation) % 2 == 0 else order[::-1]:
                    with self._noting(notes.arms[name]), watched(name, self._arms, notes.arms):
                        errors[name] = self._sample(
                            case, notes.arms[name], arm, values, expected, trusted=name == LIMIT_ARM
                        )
                self._previous = expected
                self._hold_to_yardstick(case, notes, values, expected, errors)
                if self._device != "cpu":  # where no time is kept, OpenMP's threads may spin after their work
                    for name, arm_notes in notes.arms.items():
                        arm_notes.fault = arm_notes.fault or busy(name, arm_notes)
                if not self._worth_measuring(notes):
                    return
            for name, arm in self._usable(notes, *clocked):
                if name != LIMIT_ARM:
                    with self._noting(notes.arms[name]):
                        self._hold_to_clock(case, notes, notes.arms[name], arm)
        finally:
            for name, arm in self._arms.items():
                if arm.alive:
                    with self._noting(notes.arms[name]):
                        arm.ask("pin", Ready, core=None)

    def _metrics(self, name: str) -> list[Metric]:
        """What is timed of an arm: of the portable ones, whose kernels are the subject's, the wall alone."""
        if name in self._settings.beside:  # the others of these are compared with, and never timed
            return [Metric.WALL] if name in (PORTABLE_ARM, REPLAYED_ARM) else []
        if self._device == "cpu":
            return [Metric.WALL, Metric.LATENCY]
        compared = name in (self._settings.subject, *self._settings.against)
        cold = [Metric.COLD] if self._settings.cold and compared else []
        return [Metric.WALL, Metric.LATENCY, Metric.EVENTS, Metric.DEVICE, *cold]

    def _prepare(self, case: Case, arm: ArmNotes, process: ArmProcess, metrics: list[Metric]) -> None:
        """Pin the worker, find N, capture the graphs, open this generation's lists of samples."""
        process.ask("pin", Ready, core=self._core)
        target, total = self._settings.target_sample_us, 0.0
        arm.calls, most = 1, case.most_calls(MAX_CALLS)
        while total < target and arm.calls < most:
            case.restore()
            timed, _ = process.ask("wall", Timed, count=arm.calls, canary=self._canary(case, arm.calls))
            total = max(timed.total_us, 0.1)
            if total < target:
                # At most tenfold at a time: first calls are slow, and would mislead the estimate.
                grown = min(10 * arm.calls, int(arm.calls * target / total))
                arm.calls = min(most, max(arm.calls + 1, grown))
        arm.graphs = []
        for metric in metrics:
            if metric in (Metric.DEVICE, Metric.COLD):
                cold = metric is Metric.COLD
                calls = self._graph_calls(case, cold)
                case.restore()
                canary = self._canary(case, calls)
                captured, _ = process.ask("capture", Captured, count=calls, canary=canary, cold=cold)
                arm.graphs += [metric] if captured.ok else []
                if metric is Metric.DEVICE:
                    arm.no_graph = None if captured.ok else captured.note
            # A list also where the capture fails, so that list i stays generation i.
            arm.samples.setdefault(metric, []).append([])

    def _hold_to_clock(self, case: Case, notes: RowNotes, arm: ArmNotes, process: ArmProcess) -> None:
        """INVALID for an arm that claims less time than passed in this generation's samples, and in longer loops."""
        assert arm.calls is not None
        # The limits' worker runs our own code alone; without it, on a busy CPU, the least of an arm's own is nearest.
        count, trusted = self._settings.samples, notes.arms.get(LIMIT_ARM)
        usual = median if trusted is not None else min
        listed = [one.protocol_us.get(Metric.LATENCY, [])[-count:] for one in (arm, trusted) if one is not None]
        short = min(usual(costs) for costs in listed if costs)
        calls, times = case.most_calls(LONGER * arm.calls), 1 if case.row.restore else LONGER * arm.replays
        for metric, command in ((Metric.WALL, "wall"), (Metric.DEVICE, "replay")):
            late, claims = (of.get(metric, [])[-count:] for of in (arm.protocol_us, arm.claimed_us))
            if not claims or not suspect(late, short, claims):
                continue
            shares = []
            for _ in range(LOOPS):
                case.restore()
                wall = {"count": calls, "canary": self._canary(case, calls)}
                asked = wall if metric is Metric.WALL else {"times": times, "cold": False}
                timed, elapsed = process.ask(command, Timed, **asked)
                shares.append(1 - claimed_us(timed, metric) / (elapsed * 1e6 - short))
                if shares[-1] <= SHAVED:
                    break
            else:
                text = f"claims {min(shares):.1%} less time than passed by the judge's clock, in each of {LOOPS} loops"
                raise process.give_up(Verdict.INVALID, f"{metric.value}: {text}")

    def _graph_calls(self, case: Case, cold: bool) -> int:
        """Calls per CUDA graph: enough to spread a replay's fixed cost, and to use every input set."""
        return max(GRAPH_CALLS, len(case.spec.sets) if cold else case.spec.hot)

    def _canary(self, case: Case, calls: int) -> int | None:
        return self._random.randrange(calls) if case.row.inplace else None

    def _timed_calls(
        self, arm: ArmNotes, process: ArmProcess, command: str, calls: int, metric: Metric | None, **arguments: Any
    ) -> Timed:
        """What the worker claims for a command, and in the notes of `metric` what the judge's clock says of it."""
        answer, elapsed = process.ask(command, Timed, **arguments)
        if answer.calls != calls:
            raise process.give_up(Verdict.ERROR, f"says that it made {answer.calls} calls of {calls}")
        if metric is not None:
            claimed = claimed_us(answer, metric)
            arm.clock_ratios.setdefault(metric, []).append(elapsed * 1e6 / claimed)
            arm.protocol_us.setdefault(metric, []).append(elapsed * 1e6 - claimed)
            arm.claimed_us.setdefault(metric, []).append(claimed)
        return answer

    def _sample(
        self, case: Case, arm: ArmNotes, process: ArmProcess, values: Any, expected: Any, trusted: bool
    ) -> list[OutputError]:
        """One sample of every metric. The last (in place: the canary's) output of all but `latency` is compared."""
        assert arm.calls is not None
        errors: list[OutputError] = []

        def timed(command: str, calls: int, metric: Metric | None = None, **arguments: Any) -> Timed:
            return self._timed_calls(arm, process, command, calls, metric, **arguments)

        def compare(cold: bool = False) -> None:
            if not trusted:
                called, _ = process.ask("collect", Called)
                last = -1 if case.row.inplace or cold else 0
                errors.extend(self._examine(case, arm, called, values, expected, Family.NORMAL, which=last))

        def replayed(cold: bool) -> Timed:
            self._write(case, values, cold)
            calls = self._graph_calls(case, cold)
            first = timed("replay", calls, times=1, cold=cold)
            compare(cold)
            lasting = self._settings.target_sample_us * (COLD_SHARE if cold else 1)
            times = max(1, int(lasting / max(first.events_us or 1.0, 1.0)))
            times = 1 if case.row.restore else times
            arm.replays = arm.replays if cold else times
            if case.row.inplace:
                self._write(case, values, cold)
            return timed("replay", times * calls, None if cold else Metric.DEVICE, times=times, cold=cold)

        self._write(case, values)
        canary = self._canary(case, arm.calls)
        wall = timed("wall", arm.calls, Metric.WALL, count=arm.calls, canary=canary)
        compare()
        arm.samples[Metric.WALL][-1].append(wall.total_us / arm.calls)
        if wall.events_us is not None and Metric.EVENTS in arm.samples:
            arm.samples[Metric.EVENTS][-1].append(wall.events_us / arm.calls)
        if Metric.LATENCY in arm.samples:
            case.restore()
            latency = timed("latency", LATENCY_CALLS, Metric.LATENCY, count=LATENCY_CALLS)
            arm.samples[Metric.LATENCY][-1].append(latency.total_us / LATENCY_CALLS)
        for metric in arm.graphs:
            replay = replayed(cold=metric is Metric.COLD)
            if replay.events_us is None or replay.events_us > replay.total_us:
                raise process.give_up(Verdict.ERROR, "claims more time between events than passed on its host")
            arm.samples[metric][-1].append(replay.events_us / replay.calls)
        return errors
