"""Timing of one open row: sample by sample, arm by arm in alternating order, fresh values before each sample."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kda_judge.arms.arm_process import ArmProcess
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.protocol import CHANGED, COLD, HOT, Called, Captured, Ready, Timed
from kda_judge.evidence.run_record import AGAIN, LIMIT_ARM, Metric, OutputError, Verdict
from kda_judge.judge.checker import Checker
from kda_judge.judge.clock_check import LATE, LEAST_US, LOOPS, SHAVED, claimed_us, longer, suspect
from kda_judge.judge.idle_arms import alone, busy, watched
from kda_judge.judge.open_row import Case
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.run_setup import Setup

MAX_CALLS = 20_000
LATENCY_CALLS = 10
GRAPH_CALLS = 20
"""Calls per CUDA graph: the fixed cost of a replay is spread over them."""
SMALL_GRAPH_CALLS = 300
"""The same for rows that fit the L2. Among few short calls the cost of the replay itself counts, and in place that of
the one call on the canary, which evicts part of the row."""
GRAPHS = {Metric.DEVICE: HOT, Metric.COLD: COLD}
"""Metrics that are timed in CUDA graphs -> kind of the graph's inputs."""
COLD_SHARE = 1 / 4
"""Length of a sample with cold inputs, as a share of the usual one: cold times decide nothing."""


class Sampler:
    """Times the arms of a row and notes their samples; outputs of timed calls are compared by the checker."""

    def __init__(self, setup: Setup, checker: Checker) -> None:
        self._setup = setup
        self._checker = checker

    def measure(self, case: Case, notes: RowNotes, generation: int) -> None:
        """One generation's samples of every arm that is timed."""
        self._take_samples(case, notes, generation)
        # Not done when a run is interrupted: an arm may still owe an answer.
        for name, arm in self._setup.arms.items():
            if arm.alive:
                with notes.arms[name].noting():
                    arm.ask("pin", Ready, core=None)

    def _take_samples(self, case: Case, notes: RowNotes, generation: int) -> None:
        clocked = [name for name in self._setup.arms if self._metrics(name)]
        # What inputs hold before a first replay, and when a graph is captured whose inputs change.
        stale = make(case.row, Family.NORMAL, self._checker.seed(), self._setup.device)
        changed = self._checker.redraw(case, stale) if self._setup.settings.cold else None
        self._setup.cores.choose()
        for name, arm in notes.usable(self._setup.arms, *clocked):
            metrics = self._metrics(name)
            with notes.arms[name].noting(), alone(name, self._setup.arms):
                self._prepare(case, notes.arms[name], arm, metrics)
                self._capture(case, notes.arms[name], arm, metrics, stale, changed)
        del changed
        for index in range(self._setup.settings.samples):
            values, expected = self._checker.draw(case, notes, Family.NORMAL, self._checker.seed())
            order = notes.usable(self._setup.arms, *clocked)
            before, core = self._setup.cores.core, self._setup.cores.choose()
            errors: dict[str, Sequence[OutputError]] = {}
            for name, arm in order if (index + generation) % 2 == 0 else order[::-1]:
                with notes.arms[name].noting(), watched(name, self._setup.arms, notes.arms, core):
                    if core != before:
                        arm.ask("pin", Ready, core=core)
                    trusted = name == LIMIT_ARM
                    errors[name] = self._sample(case, notes.arms[name], arm, stale, values, expected, trusted)
            self._checker.remember(case, expected)
            self._checker.hold_to_yardstick(case, notes, values, expected, errors)
            stale = values
            del expected  # not kept while the oracle makes the next ones
            if self._setup.device != "cpu":  # no time is kept there, and OpenMP's threads may spin after their work
                for name, arm_notes in notes.arms.items():
                    arm_notes.fault = arm_notes.fault or busy(name, arm_notes)
            if not notes.worth_measuring(self._setup.settings):
                return
        # An opponent that shaved its time would only make the subject look slower.
        opponents = {AGAIN, LIMIT_ARM, *self._setup.settings.against} - {self._setup.settings.subject}
        for name, arm in notes.usable(self._setup.arms, *clocked):
            if name not in opponents:
                spent = self._setup.spent.commands_as("holding to the clock")
                with notes.arms[name].noting(), alone(name, self._setup.arms), spent:
                    self._hold_to_clock(case, notes, notes.arms[name], arm)

    def _metrics(self, name: str) -> list[Metric]:
        """Metrics to time for an arm: only the wall for A/A and the portable arms, whose kernels are the subject's."""
        settings = self._setup.settings
        if name in settings.untimed:
            return []
        compared = name in (settings.subject, *settings.against)
        if not compared and name != LIMIT_ARM:
            return [Metric.WALL]
        if self._setup.device == "cpu":
            return [Metric.WALL, Metric.LATENCY]
        cold = [Metric.COLD] if settings.cold and compared else []
        return [Metric.WALL, Metric.LATENCY, Metric.EVENTS, Metric.DEVICE, *cold]

    def _prepare(self, case: Case, arm: ArmNotes, process: ArmProcess, metrics: list[Metric]) -> None:
        """Pin the worker, find N, open this generation's lists of samples."""
        process.ask("pin", Ready, core=self._setup.cores.core)
        target = self._setup.settings.target_sample_us
        arm.calls, most = 1, case.most_calls(MAX_CALLS)
        while arm.calls < most:
            total = self._loop_us(case, arm, process)
            if total >= target:
                # Again: a single call that the host held up for so long must not decide that samples are single calls.
                total = min(total, self._loop_us(case, arm, process))
            if total >= target:
                break
            # At most tenfold at a time: first calls are slow, and would mislead the estimate.
            grown = min(10 * arm.calls, int(arm.calls * target / total))
            arm.calls = min(most, max(arm.calls + 1, grown))
        for metric in metrics:
            # A list also where a capture fails, so that list i stays generation i.
            arm.samples.setdefault(metric, []).append([])

    def _loop_us(self, case: Case, arm: ArmNotes, process: ArmProcess) -> float:
        """Microseconds of one loop of the arm's N calls."""
        assert arm.calls is not None
        case.restore()
        canary = self._canary(case, arm.calls)
        timed = self._timed_calls(arm, process, "wall", arm.calls, None, count=arm.calls, canary=canary)
        return max(timed.total_us, 0.1)

    def _capture(
        self, case: Case, arm: ArmNotes, process: ArmProcess, metrics: list[Metric], stale: Any, changed: Any
    ) -> None:
        """Capture the graphs in random order: those that are timed, and one whose inputs change between two calls.

        An arm that remembers results between the calls of a capture does so in that graph too: it cannot tell which is
        which.
        """
        kinds, failed = [GRAPHS[metric] for metric in metrics if metric in GRAPHS], dict[str, str]()
        if HOT in kinds and changed is not None and not process.spec.limit:
            kinds.append(CHANGED)
        for kind in self._checker.random.sample(kinds, len(kinds)):
            calls = self._graph_calls(case, kind == COLD)
            at = self._checker.random.randrange(1, calls - 1) if kind == CHANGED else None
            canary = self._canary(case, calls) if at is None else None
            case.restore()
            captured, _ = process.ask("capture", Captured, kind=kind, count=calls, canary=canary, at=at)
            if not captured.ok:
                failed[kind] = captured.note
            elif at is not None:
                self._replay_changed(case, arm, process, calls, at, stale, changed)
        if CHANGED in failed and HOT not in failed:
            raise process.give_up(Verdict.ERROR, f"has no CUDA graph whose inputs change: {failed[CHANGED]}")
        arm.graphs = [metric for metric in metrics if metric in GRAPHS and GRAPHS[metric] not in failed]
        arm.no_graph = failed.get(HOT)

    def _replay_changed(
        self, case: Case, arm: ArmNotes, process: ArmProcess, calls: int, at: int, stale: Any, changed: Any
    ) -> None:
        """Replay once on inputs that are `stale` until call `at`: its output and the last one must fit `changed`."""
        values, expected = changed
        self._checker.write(case, stale)
        case.offer(values)
        self._timed_calls(arm, process, "replay", calls, None, kind=CHANGED, times=1)
        which = case.last_set if case.row.inplace and not case.row.restore else at % case.spec.hot
        # In place, the last call works on other calls' outputs, for which there is no expected value.
        for changed_at in (True,) if case.row.inplace else (False, True):
            called, _ = process.ask("collect", Called, changed=changed_at)
            self._checker.examine(case, arm, called, values, expected, Family.NORMAL, which)

    def _hold_to_clock(self, case: Case, notes: RowNotes, arm: ArmNotes, process: ArmProcess) -> None:
        """Make an arm INVALID that claims less time than passed, in this generation's samples and in longer loops."""
        assert arm.calls is not None
        # The limits' worker runs only our code, so its median holds. Without it, on a CPU that may be busy, the least
        # of the arm's own values is nearest to the true cost.
        count, trusted = self._setup.settings.samples, notes.arms.get(LIMIT_ARM)
        usual = median if trusted is not None else min
        listed = [one.protocol_us.get(Metric.LATENCY, [])[-count:] for one in (arm, trusted) if one is not None]
        # 0 where no arm made short loops: only the wall of this one is timed, and the limits' worker has failed.
        short = min((usual(costs) for costs in listed if costs), default=0.0)
        lasting = self._setup.settings.target_sample_us > LEAST_US and not case.row.restore
        for metric, command in ((Metric.WALL, "wall"), (Metric.DEVICE, "replay")):
            late, claims = (of.get(metric, [])[-count:] for of in (arm.protocol_us, arm.claimed_us))
            if not claims or not suspect(late, short, claims, lasting):
                continue
            shares, more = [], longer(claims)
            for _ in range(LOOPS):
                calls, times = case.most_calls(more * arm.calls), 1 if case.row.restore else more * arm.replays
                case.restore()
                wall = {"count": calls, "canary": self._canary(case, calls)}
                asked = wall if metric is Metric.WALL else {"times": times, "kind": HOT}
                timed, elapsed = process.ask(command, Timed, **asked)
                shares.append(1 - claimed_us(timed, metric) / (elapsed * 1e6 - short))
                if shares[-1] <= SHAVED:
                    break
                more *= 2 if shares[-1] < LATE else 1
            else:
                text = f"claims {min(shares):.1%} less time than passed by the judge's clock, in each of {LOOPS} loops"
                raise process.give_up(Verdict.INVALID, f"{metric.value}: {text}")

    def _graph_calls(self, case: Case, cold: bool) -> int:
        """Calls per CUDA graph: enough to spread a replay's fixed cost, and to use every input set."""
        if cold or case.row.restore:
            return max(GRAPH_CALLS, len(case.spec.sets) if cold else case.spec.hot)
        return SMALL_GRAPH_CALLS if case.spec.traffic.moved <= 2 * self._setup.l2_bytes else GRAPH_CALLS

    def _canary(self, case: Case, calls: int) -> int | None:
        return self._checker.random.randrange(calls) if case.row.inplace else None

    def _timed_calls(
        self, arm: ArmNotes, process: ArmProcess, command: str, calls: int, metric: Metric | None, **arguments: Any
    ) -> Timed:
        """Send a command and return the worker's claim; note under `metric` how it compares with the judge's clock."""
        answer, elapsed = process.ask(command, Timed, **arguments)
        if answer.calls != calls:
            raise process.give_up(Verdict.ERROR, f"says that it made {answer.calls} calls of {calls}")
        if command == "replay" and (answer.events_us is None or answer.events_us > answer.total_us):
            raise process.give_up(Verdict.ERROR, "claims more time between events than passed on its host")
        if metric is not None:
            claimed = claimed_us(answer, metric)
            arm.clock_ratios.setdefault(metric, []).append(elapsed * 1e6 / claimed)
            arm.protocol_us.setdefault(metric, []).append(elapsed * 1e6 - claimed)
            arm.claimed_us.setdefault(metric, []).append(claimed)
        return answer

    def _sample(
        self, case: Case, arm: ArmNotes, process: ArmProcess, stale: Any, values: Any, expected: Any, trusted: bool
    ) -> list[OutputError]:
        """Take one sample of every metric. The last (in place: the canary's) output of all but `latency` is compared.

        A graph's first replay, which finds its length, is on `stale` values, so that its outputs do not fit `values`.
        """
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

        def replayed(metric: Metric) -> Timed:
            kind, cold = GRAPHS[metric], metric is Metric.COLD
            calls = self._graph_calls(case, cold)
            self._checker.write(case, stale, cold)
            first = timed("replay", calls, kind=kind, times=1)
            lasting = self._setup.settings.target_sample_us * (COLD_SHARE if cold else 1)
            times = max(1, int(lasting / max(first.events_us or 1.0, 1.0)))
            times = 1 if case.row.restore else times
            arm.replays = arm.replays if cold else times
            self._checker.write(case, values, cold)
            found = timed("replay", times * calls, None if cold else Metric.DEVICE, kind=kind, times=times)
            if case.row.inplace:  # all but the first replay worked on what the one before had made
                self._checker.write(case, values, cold)
                timed("replay", calls, kind=kind, times=1)
            compare(cold)
            return found

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
            replay = replayed(metric)
            assert replay.events_us is not None
            arm.samples[metric][-1].append(replay.events_us / replay.calls)
        return errors
