"""Make strip charts: a tick for each sample, a lane for each generation of workers, one scale for all arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10

from kda_judge.evidence.run_record import Metric
from kda_judge.evidence.stats import Generations, summarise
from kda_tools.publish.report import microseconds

WIDTH, LANE, GAP = 1000, 10, 3
"""Units of the drawing; the page stretches it to its own width and keeps the ticks' strokes."""


@dataclass(frozen=True)
class Lane:
    """The samples of one generation of one arm."""

    path: str
    top: int
    title: str


@dataclass(frozen=True)
class Strip:
    """The lanes of one arm, and its median."""

    arm: str
    lanes: tuple[Lane, ...]
    height: int
    median: str
    place: float
    """Horizontal position of the median, in units of the drawing."""


@dataclass(frozen=True)
class Chart:
    """The strips of all arms by one clock."""

    metric: str
    arms: tuple[Strip, ...]
    ticks: tuple[tuple[float, str], ...]
    """Position in per cent of the width, and label."""


def strips(metric: Metric, samples: Mapping[str, Generations]) -> Chart | None:
    """The chart of one clock; None if it timed no arm."""
    measured = {arm: parts for arm, parts in samples.items() if any(parts)}
    values = [value for parts in measured.values() for part in parts for value in part]
    if not values:
        return None
    low, high = min(values), max(values)
    margin = (high - low) * 0.03 or high * 0.01
    low, high = low - margin, high + margin

    def axis_fraction(value: float) -> float:
        return (value - low) / (high - low)

    arms = []
    for arm, parts in measured.items():
        lanes = tuple(
            Lane(
                path="".join(f"M{WIDTH * axis_fraction(value):.1f} {number * (LANE + GAP)}v{LANE}" for value in part),
                top=number * (LANE + GAP),
                title=_title(number, part),
            )
            for number, part in enumerate(parts)
            if part
        )
        middle = summarise(parts).median
        height = len(parts) * (LANE + GAP) - GAP
        arms.append(Strip(arm, lanes, height, microseconds(middle), round(WIDTH * axis_fraction(middle), 1)))
    ticks = tuple((round(100 * axis_fraction(tick), 2), f"{tick:g}") for tick in _ticks(low, high))
    return Chart(metric.value, tuple(arms), ticks)


def _title(number: int, part: Sequence[float]) -> str:
    middle = summarise([part])
    low, high = microseconds(middle.min), microseconds(max(part))
    return f"generation {number + 1}: {len(part)} samples, {low} to {high} us, median {microseconds(middle.median)}"


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between `low` and `high`."""
    rough = (high - low) / 5
    size = 10.0 ** floor(log10(rough))
    step = size * next(factor for factor in (1, 2, 5, 10) if rough <= factor * size)
    first = floor(low / step) + 1
    return [float(f"{number * step:.6g}") for number in range(first, floor(high / step) + 1)]
