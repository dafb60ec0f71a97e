"""Timing of one open row: sample by sample, arm by arm in alternating order, fresh values before each sample."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.input_values import Family
from kda_judge.arms.protocol import Called, Captured, Ready, Timed
from kda_judge.evidence.run_record import (
    LIMIT_ARM,
    PORTABLE_ARM,
    REPLAYED_ARM,
    Metric,
    OutputError,
    Verdict,
)
from kda_judge.judge.checker import Checker
from kda_judge.judge.clock_check import LOOPS, SHAVED, claimed_us, longer, suspect
from kda_judge.judge.idle_arms import busy, watched
from kda_judge.judge.open_row import Case
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.run_setup import Setup

MAX_CALLS = 20_000
LATENCY_CALLS = 10
GRAPH_CALLS = 20
"""Calls per CUDA graph: the fixed cost of a replay is spread over them."""
COLD_SHARE = 1 / 4
"""Of a sample's length, for cold inputs: they decide nothing."""


class Sampler:
    """Times the arms of a row and notes their samples; outputs of timed calls are compared by the checker."""

    def __init__(self, setup: Setup, checker: Checker) -> None:
        self._setup = setup
        self._checker = checker

    def measure(self, case: Case, notes: RowNotes, generation: int) -> None:
        """One generation's samples of every arm that is timed."""
        self._take_samples(case, notes, generation)
        # Not where a run is interrupted: an arm may still owe an answer.
        for name, arm in self._setup.arms.items():
            if arm.alive:
                with notes.arms[name].noting():
                    arm.ask("pin", Ready, core=None)

    def _take_samples(self, case: Case, notes: RowNotes, generation: int) -> None:
        clocked = [name for name in self._setup.arms if self._metrics(name)]
        for name, arm in notes.usable(self._setup.arms, *clocked):
            with notes.arms[name].noting():
                self._prepare(case, notes.arms[name], arm, self._metrics(name))
        for index in range(self._setup.settings.samples):
            values, expected = self._checker.draw(case, notes, Family.NORMAL, self._checker.seed())
            order = notes.usable(self._setup.arms, *clocked)
            errors: dict[str, Sequence[OutputError]] = {}
            for name, arm in order if (index + generation) % 2 == 0 else order[::-1]:
                with notes.arms[name].noting(), watched(name, self._setup.arms, notes.arms, self._setup.core):
                    errors[name] = self._sample(
                        case, notes.arms[name], arm, values, expected, trusted=name == LIMIT_ARM
                    )
            self._checker.previous = expected
            self._checker.hold_to_yardstick(case, notes, values, expected, errors)
            if self._setup.device != "cpu":  # where no time is kept, OpenMP's threads may spin after their work
                for name, arm_notes in notes.arms.items():
                    arm_notes.fault = arm_notes.fault or busy(name, arm_notes)
            if not notes.worth_measuring(self._setup.settings):
                return
        for name, arm in notes.usable(self._setup.arms, *clocked):
            if name != LIMIT_ARM:
                with notes.arms[name].noting():
                    self._hold_to_clock(case, notes, notes.arms[name], arm)

    def _metrics(self, name: str) -> list[Metric]:
        """What is timed of an arm: of the portable ones, whose kernels are the subject's, and of A/A the wall alone."""
        settings = self._setup.settings
        if name in settings.beside:  # the others of these are compared with, and never timed
            return [Metric.WALL] if name in (PORTABLE_ARM, REPLAYED_ARM) else []
        compared = name in (settings.subject, *settings.against)
        if not compared and name != LIMIT_ARM:
            return [Metric.WALL]
        if self._setup.device == "cpu":
            return [Metric.WALL, Metric.LATENCY]
        cold = [Metric.COLD] if settings.cold and compared else []
        return [Metric.WALL, Metric.LATENCY, Metric.EVENTS, Metric.DEVICE, *cold]

    def _prepare(self, case: Case, arm: ArmNotes, process: ArmProcess, metrics: list[Metric]) -> None:
        """Pin the worker, find N, capture the graphs, open this generation's lists of samples."""
        process.ask("pin", Ready, core=self._setup.core)
        target, total = self._setup.settings.target_sample_us, 0.0
        arm.calls, most = 1, case.most_calls(MAX_CALLS)
        while total < target and arm.calls < most:
            case.restore()
            timed, elapsed = process.ask("wall", Timed, count=arm.calls, canary=self._canary(case, arm.calls))
            if timed.total_us > elapsed * 1e6:
                raise process.give_up(Verdict.INVALID, "wall: claims more time than passed")
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
        count, trusted = self._setup.settings.samples, notes.arms.get(LIMIT_ARM)
        usual = median if trusted is not None else min
        listed = [one.protocol_us.get(Metric.LATENCY, [])[-count:] for one in (arm, trusted) if one is not None]
        # 0 where nobody made short loops: the arm has its wall timed alone, and the limits' worker is gone.
        short = min((usual(costs) for costs in listed if costs), default=0.0)
        for metric, command in ((Metric.WALL, "wall"), (Metric.DEVICE, "replay")):
            late, claims = (of.get(metric, [])[-count:] for of in (arm.protocol_us, arm.claimed_us))
            if not claims or not suspect(late, short, claims):
                continue
            shares, more = [], longer(claims)
            calls, times = case.most_calls(more * arm.calls), 1 if case.row.restore else more * arm.replays
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
        return self._checker.random.randrange(calls) if case.row.inplace else None

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
            if trusted:
                case.arena.broken_guard()  # so that the GPU switches to the judge and back, as for the other arms
                return
            called, _ = process.ask("collect", Called)
            last = -1 if case.row.inplace or cold else 0
            errors.extend(self._checker.examine(case, arm, called, values, expected, Family.NORMAL, which=last))

        def replayed(cold: bool) -> Timed:
            self._checker.write(case, values, cold)
            calls = self._graph_calls(case, cold)
            first = timed("replay", calls, times=1, cold=cold)
            compare(cold)
            lasting = self._setup.settings.target_sample_us * (COLD_SHARE if cold else 1)
            times = max(1, int(lasting / max(first.events_us or 1.0, 1.0)))
            times = 1 if case.row.restore else times
            arm.replays = arm.replays if cold else times
            if case.row.inplace:
                self._checker.write(case, values, cold)
            return timed("replay", times * calls, None if cold else Metric.DEVICE, times=times, cold=cold)

        self._checker.write(case, values)
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
