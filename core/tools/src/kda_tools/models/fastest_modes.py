"""Each arm in its own fastest mode. Users run a step as it is fastest for them: eager, as a CUDA graph, or compiled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from kda_judge.evidence import stats
from kda_judge.evidence.run_record import Interval
from kda_tools.models.step_record import Mode, Samples, StepRecord
from kda_tools.publish.report import interval

WORDS = {"graph": "CUDA graph", "compile": "compiled"}
"""Mode -> words for it, if its name does not say it."""


class Fastest(NamedTuple):
    """Milliseconds of a step, each arm in the mode in which its median is smallest, and the speedup between them."""

    before: float
    mode_before: str
    after: float
    mode_after: str
    speedup: Interval
    """Samples of two modes were not measured beside each other, so the interval also holds what changed in between."""
    noisy: bool
    """Whether one of these modes is `Mode.too_noisy`."""

    def __str__(self) -> str:
        """For example `14.235 ms (compile) -> 13.386 ms (graph), 1.063 [1.049, 1.080]`."""
        times = f"{self.before:.3f} ms ({self.mode_before}) -> {self.after:.3f} ms ({self.mode_after})"
        return f"{times}, {interval(self.speedup)}"

    @property
    def ms(self) -> str:
        """For example `14.24 compiled → 13.39 CUDA graph`; one word if both modes are the same."""
        before, after = (WORDS.get(mode, mode) for mode in (self.mode_before, self.mode_after))
        first = "" if before == after else f" {before}"
        return f"{self.before:.2f}{first} → {self.after:.2f} {after}"


def fastest(record: StepRecord, of_upstream: Iterable[StepRecord], of_arm: Iterable[StepRecord]) -> Fastest | None:
    """Both arms of `record` in their fastest modes; None if no mode is timed.

    Further modes come from other runs of the same step: upstream's from `of_upstream`, the arm's from `of_arm`. If runs
    share a mode, the last one counts.
    """
    theirs = _modes(record, of_upstream)
    ours = _modes(record, [one for one in of_arm if one.arm == record.arm])
    if not theirs or not ours:
        return None
    before = min(theirs, key=lambda name: _ms(theirs[name].upstream))
    after = min(ours, key=lambda name: _ms(ours[name].subject))
    first, last = theirs[before].upstream, ours[after].subject
    noisy = theirs[before].too_noisy or ours[after].too_noisy
    return Fastest(_ms(first), before, _ms(last), after, stats.speedup(first, last), noisy)


def _ms(samples: Samples) -> float:
    return stats.summarise(samples).median / 1e3


def _modes(record: StepRecord, others: Iterable[StepRecord]) -> dict[str, Mode]:
    """Those that are timed, by name."""
    runs = sorted((one for one in (record, *others) if _step(one) == _step(record)), key=lambda one: one.utc)
    return {name: mode for one in runs for name, mode in one.modes.items() if mode.speedup is not None}


def _step(record: StepRecord) -> tuple[Any, ...]:
    """What is the same in all runs of one step."""
    gpu = record.machine.before.name if record.machine.before else None
    return record.model, record.release, record.wheel, record.files, record.layers, record.sizes, gpu
