"""Times every candidate of a sweep on its rows: through the public function, checked against the oracle first.

Device time is that of a replayed CUDA graph of calls. All candidates of a row are timed round by round, together with
the streaming copy; each round reverses the order, so that drift affects all alike. The median over the rounds counts,
and their interquartile range is the spread. Inputs that an op writes in place are restored before each sample, as in
the judge. If a row asks for it (`restore`), every call of a sample has a set of inputs of its own.

Wall time is that of calls one after the other, as a caller makes them. It has a few rounds of its own afterwards,
because the host's work between device samples would change them. `host_time` says what it is used for.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Protocol

from kda_judge.arms.arm_import import tensors_first
from kda_judge.arms.input_values import Family, make
from kda_judge.arms.protocol import Traffic
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tensor_spec import INTEGRAL
from kda_judge.judge.open_row import Case, output_spec, traffic
from kda_judge.judge.oracle import ask_oracle, load_reference
from kda_judge.judge.output_rules import judged
from kda_judge.judge.sampler import GRAPH_CALLS, SMALL_GRAPH_CALLS
from kda_tools.lab.tune.choose_lines import label
from kda_tools.lab.tune.sweep_record import RowTimes, TableTimes, Walls, Wrong
from kda_tools.lab.tune.trials import error_line

if TYPE_CHECKING:
    from kda_judge.contract.tasks import Task
    from kda_tools.lab.tune.trials import Trial

ROUNDS = 7
FEWEST_ROUNDS = 3
"""Fewest rounds; with fewer there is no interquartile range."""
SAMPLE_US = 2_000
"""Microseconds of replays in a sample; events resolve 0.5 us."""
WALL_ROUNDS = 3
"""Fewer than for device time: forcing a configuration takes 1 to 2 ms, and `host_time` uses many candidates."""
WALL_US = 1_000
"""Microseconds of calls in a wall sample, if the device decides."""
WALL_CALLS = 150
"""Most calls in a wall sample; they take about as long if the host decides."""
MEMORY_SHARE = 0.5
"""Share of the free memory for graphs that are timed together."""
GRAPH_BYTES = 64 << 20
"""Generous estimate of the least bytes in a graph's memory pool."""
DIGITS = 5
"""Significant digits of a recorded time; the spread of the rounds shows in the third or fourth."""

Arguments = tuple[Any, ...]
Sample = Callable[[], float]
"""One sample: device microseconds per call."""


class Stopwatch(Protocol):
    """A way to time calls."""

    def capture(self, call: Callable[..., Any], sets: Sequence[Arguments]) -> Sample:
        """Prepare to time calls with these arguments; it must not depend on anything that changes afterwards.

        If there are several sets, a sample uses each once. Preparing may use them too.
        """

    def copy(self, moved: Traffic) -> Sample:
        """Prepare to time the device's floor: a stream of as many bytes."""

    def wall(self, call: Callable[..., Any], sets: Sequence[Arguments], device_us: float) -> float:
        """One sample of microseconds per call by the host's clock; a call takes `device_us` on the device.

        If there are several sets, it uses each at most once.
        """

    def together(self, output_bytes: int) -> int:
        """How many calls with outputs of this size can be prepared at the same time."""

    def settle(self) -> None:
        """Wait for the device, and give back memory that is not in use. Raises if a call broke the device."""


class GraphWatch:
    """Times with CUDA graphs and events."""

    def capture(self, call: Callable[..., Any], sets: Sequence[Arguments]) -> Sample:
        """A graph of `GRAPH_CALLS` or more calls, replayed for `SAMPLE_US`; with several sets, a call of each, once."""
        from kda_judge.arms.clocks import Graph

        graph = Graph(call, sets if len(sets) > 1 else [*sets] * GRAPH_CALLS, {})
        graph.replay(1)
        if len(sets) > 1:
            return lambda: graph.replay(1)[1] / graph.calls
        each = max(graph.replay(1)[1], 1.0) / GRAPH_CALLS
        if (calls := min(round(SAMPLE_US / each), SMALL_GRAPH_CALLS)) > GRAPH_CALLS:
            graph = Graph(call, [*sets] * calls, {})
            graph.replay(1)
        times = max(1, round(SAMPLE_US / (each * graph.calls)))
        return lambda: graph.replay(times)[1] / (times * graph.calls)

    def copy(self, moved: Traffic) -> Sample:
        """The judge's fastest stream of these bytes."""
        from kda_judge.arms.limit_arm import fastest_stream

        return self.capture(fastest_stream(moved), [()])

    def wall(self, call: Callable[..., Any], sets: Sequence[Arguments], device_us: float) -> float:
        """Calls back to back, with the judge's clock for the column `wall`."""
        from kda_judge.arms.clocks import Clock

        calls = max(1, min(WALL_CALLS, round(WALL_US / device_us)))
        given = sets[:calls] if len(sets) > 1 else [*sets] * calls
        return Clock("cuda").wall(call, given, {})[0] / len(given)

    def together(self, output_bytes: int) -> int:
        """As many as fit into the free memory; a graph holds two generations of outputs."""
        import torch

        free, _ = torch.cuda.mem_get_info()
        return max(1, int(free * MEMORY_SHARE) // (2 * output_bytes + GRAPH_BYTES))

    def settle(self) -> None:
        """Synchronise and empty the allocator's cache."""
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(
    task: Task,
    trials: Sequence[Trial],
    watch: Stopwatch,
    device: str,
    rounds: int,
    until: float | None,
    done: Callable[[Trial, RowTimes], None],
) -> tuple[list[TableTimes], bool]:
    """Times of all trials, and whether all were measured.

    No new row begins after `until` (of `time.monotonic`). Ctrl-C ends the measurement too. Finished rows are kept.
    """
    found: dict[str, list[RowTimes]] = {trial.sweep.table.name: [] for trial in trials}
    complete = True
    try:
        for trial in trials:
            if until is not None and time.monotonic() > until:
                complete = False
                break
            times = measure_row(task, trial, watch, device, rounds)
            found[trial.sweep.table.name].append(times)
            done(trial, times)
    except KeyboardInterrupt:
        complete = False
    grids = {trial.sweep.table.name: tuple(map(dataclasses.asdict, trial.sweep.candidates)) for trial in trials}
    return [TableTimes(table=name, candidates=grids[name], rows=tuple(rows)) for name, rows in found.items()], complete


def measure_row(task: Task, trial: Trial, watch: Stopwatch, device: str, rounds: int) -> RowTimes:
    """Times of every candidate on one row; those that launch the same are timed once."""
    row, op, reference = trial.row, task.config.ops[trial.row.op], load_reference(task)
    moved = traffic(op, row, reference)
    size = sum(output_spec(op, row, name).nbytes for name in op.outputs if name not in row.inplace)
    twins, wrong = trial.twins, dict[int, str]()
    samples, walls = dict[int, list[float]](), dict[int, list[float]]()
    case = Case.open(op, row, device, moved)
    try:
        attempt = _Attempt(task, trial, case, device)
        copies: list[float] = []
        places = list(twins)
        copy = watch.copy(moved)
        step = watch.together(size)
        for start in range(0, len(places), step):
            ready: dict[int, Sample] = {}
            for place in places[start : start + step]:
                outcome = attempt.prepare(place, watch)
                if isinstance(outcome, str):
                    wrong[place] = outcome
                else:
                    ready[place] = outcome
            for turn in range(rounds):
                for place in _in_turn(ready, turn):
                    case.restore()
                    samples.setdefault(place, []).append(ready[place]())
                copies.append(copy())
            for turn in range(WALL_ROUNDS):
                for place in _in_turn(ready, turn):
                    walls.setdefault(place, []).append(attempt.wall(place, watch, samples[place][-1]))
            del ready, outcome
            watch.settle()
    finally:
        case.close()
    first_of = {twin: first for first in samples for twin in twins[first]}
    summaries = {place: _summary(samples[first]) for place, first in first_of.items()}
    everyone = range(len(trial.sweep.candidates))
    return RowTimes(
        row=row.id,
        features=trial.features,
        bytes_moved=moved.moved,
        copy_us=_rounded(median(copies)),
        median_us=tuple(summaries[place][0] if place in summaries else None for place in everyone),
        spread=tuple(summaries[place][1] if place in summaries else None for place in everyone),
        wrong=tuple(
            Wrong(candidate=twin, reason=reason) for first, reason in sorted(wrong.items()) for twin in twins[first]
        ),
        walls=Walls(
            op=row.op,
            kinds=trial.launch_kinds,
            median_us=tuple(
                _rounded(median(walls[first_of[place]])) if place in first_of else None for place in everyone
            ),
        ),
    )


def _in_turn(places: Iterable[int], turn: int) -> list[int]:
    """The places in the order of a round; every second round is reversed, so that drift cancels out."""
    return list(places)[:: 1 if turn % 2 == 0 else -1]


class _Attempt:
    """One row's tensors and expected outputs, on which candidates are tried one after the other."""

    def __init__(self, task: Task, trial: Trial, case: Case, device: str) -> None:
        self._trial, self._case = trial, case
        self._op = task.config.ops[trial.row.op]
        self._tolerance = task.config.tolerance
        module = task.load(task.config.arms["solution"].module)
        self._values = make(trial.row, Family.NORMAL, task.config.bench.seeds[0], device)
        self._expected = ask_oracle(load_reference(task), self._op, trial.row, self._values)
        self._sets = [
            tuple(case.arena.view(places[name]) if name in places else None for name in self._op.inputs)
            for places in case.input_sets[: case.spec.hot]
        ]
        op = tensors_first(getattr(module, trial.row.op), self._op.inputs, self._op.by_name)
        self._call = functools.partial(op, **trial.row.scalars)

    def prepare(self, place: int, watch: Stopwatch) -> Sample | str:
        """How to time candidate `place`, or why it is wrong."""
        table, config = self._trial.sweep.table, self._trial.sweep.candidates[place]
        row = self._trial.row
        try:
            with table.forced(config) as asked:
                failure = self._wrong()
                if not asked:
                    raise UsageError(f"row {row.id!r}: {row.op} did not ask the table {table.name!r} on this device")
                return failure or watch.capture(self._call, self._sets)
        except UsageError:
            raise
        except Exception as error:  # noqa: BLE001  a configuration may fail in any way; the others still count
            try:
                watch.settle()
            except Exception:  # noqa: BLE001  the device no longer answers
                raise UsageError(
                    f"row {row.id!r}: candidate {label(config)} of the table {table.name!r} broke the device "
                    f"({error_line(error)}); take it out of the sweep's candidates"
                ) from error
            return error_line(error)

    def wall(self, place: int, watch: Stopwatch, device_us: float) -> float:
        """A sample of candidate `place` by the host's clock, after a first call that makes the plan."""
        with self._trial.sweep.table.forced(self._trial.sweep.candidates[place]):
            self._call(*self._sets[0])
            self._case.restore()
            return watch.wall(self._call, self._sets, device_us)

    def _wrong(self) -> str | None:
        """What is wrong with the outputs of one call on fresh inputs, or None."""
        import torch

        self._case.write(self._values)
        row = self._trial.row
        specs = {name: output_spec(self._op, row, name) for name in self._op.outputs}
        # Outputs may get memory in which a right candidate has left its result. NaN there shows unwritten elements.
        poison = [
            torch.full(
                spec.shape,
                -1 if spec.dtype in INTEGRAL else float("nan"),
                dtype=getattr(torch, spec.dtype),
                device=self._case.device,
            )
            for name, spec in specs.items()
            if name not in row.inplace
        ]
        del poison
        result = self._call(*self._sets[0])
        returned = iter(result if isinstance(result, (tuple, list)) else (result,))
        for (name, spec), want in zip(specs.items(), self._expected, strict=True):
            got = self._sets[0][self._op.inputs.index(name)] if name in row.inplace else next(returned, None)
            form = f"{spec.dtype} {list(spec.shape)}"
            if not isinstance(got, torch.Tensor) or _form(got) != form:
                return f"output {name!r}: expected {form}, got {_form(got)}"
            part, keys = self._case.judged_part(name, got, self._values), self._expected.keys.get(name)
            failure = judged(name, self._op.rules.get(name), self._tolerance, part, want, 1.0, None, keys).failure
            if failure is not None:
                return failure
        guard = self._case.arena.broken_guard()
        if guard is not None:
            self._case.arena.repair_guards()
            return f"wrote outside its tensors, {guard} bytes into the row's memory"
        return None


def _form(returned: Any) -> str:
    if hasattr(returned, "dtype"):
        return f"{str(returned.dtype).removeprefix('torch.')} {list(returned.shape)}"
    return "nothing" if returned is None else type(returned).__name__


def _summary(samples: Sequence[float]) -> tuple[float, float]:
    """Median, and interquartile range over it."""
    low, middle, high = quantiles(samples, n=4, method="inclusive")
    return _rounded(middle), _rounded((high - low) / middle)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
