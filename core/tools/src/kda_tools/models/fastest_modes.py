"""Each arm in its own fastest mode. Users run a step as it is fastest for them: eager, as a CUDA graph, or compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kda_judge.evidence import stats
from kda_judge.evidence.run_record import Interval
from kda_tools.models.step_record import Mode, Samples, StepRecord


class Fastest(NamedTuple):
    """Milliseconds of a step, each arm in the mode in which its median is smallest, and the speedup between them."""

    before: float
    mode_before: str
    after: float
    mode_after: str
    speedup: Interval
    """The samples of two modes were not measured beside each other, so the interval is wider than within one mode."""
    noisy: bool
    """Whether one of these modes is `Mode.too_noisy`."""

    def __str__(self) -> str:
        """For example `14.235 ms (compile) -> 13.386 ms (graph), 1.063 [1.049, 1.080]`."""
        ratio = f"{self.speedup.estimate:.3f} [{self.speedup.low:.3f}, {self.speedup.high:.3f}]"
        return f"{self.before:.3f} ms ({self.mode_before}) -> {self.after:.3f} ms ({self.mode_after}), {ratio}"


def fastest(record: StepRecord, of_upstream: Iterable[StepRecord], of_arm: Iterable[StepRecord]) -> Fastest | None:
    """Both arms of `record` in their fastest modes; None if no mode is timed.

    Further modes come from other runs of the same step: upstream's from `of_upstream`, the arm's from `of_arm`. If runs
    share a mode, the last one counts.
    """
    theirs = {name: (mode, mode.upstream) for name, mode in _modes(record, of_upstream).items()}
    ours = [one for one in of_arm if one.arm == record.arm]
    before, after = _least(theirs), _least({name: (mode, mode.subject) for name, mode in _modes(record, ours).items()})
    if before is None or after is None:
        return None
    noisy = before.mode.too_noisy or after.mode.too_noisy
    return Fastest(before.ms, before.name, after.ms, after.name, stats.speedup(before.samples, after.samples), noisy)


class _Timed(NamedTuple):
    ms: float
    name: str
    mode: Mode
    samples: Samples


def _least(modes: dict[str, tuple[Mode, Samples]]) -> _Timed | None:
    found = (_Timed(stats.summarise(of).median / 1e3, name, mode, of) for name, (mode, of) in modes.items())
    return min(found, key=lambda one: one.ms, default=None)


def _modes(record: StepRecord, others: Iterable[StepRecord]) -> dict[str, Mode]:
    """Those that are timed, by name."""
    runs = sorted((one for one in (record, *others) if _step(one) == _step(record)), key=lambda one: one.utc)
    return {name: mode for one in runs for name, mode in one.modes.items() if mode.speedup is not None}


def _step(record: StepRecord) -> tuple[Any, ...]:
    """What is the same in all runs of one step."""
    gpu = record.machine.before.name if record.machine.before else None
    return record.model, record.release, record.wheel, record.files, record.layers, record.sizes, gpu
