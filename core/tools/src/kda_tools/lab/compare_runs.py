"""Whether two runs of a task agree: the ratio of their speedups, row by row, with its interval.

Walls of two sessions do not compare (a host costs up to twice as much in one process as in another), their speedups
do: each is a ratio of arms that took turns. With s the speedup of a row in the old run and t in the new one, both with
95% intervals, the change is t / s. Its interval is made on the log scale from the two intervals alone (the method of
variance estimates recovery: Zou and Donner, Statistics in Medicine 27, 2008), which keeps their asymmetry:

    low  = d - sqrt((log t - log t_low)^2 + (log s_high - log s)^2),   d = log t - log s
    high = d + sqrt((log t_high - log t)^2 + (log s - log s_low)^2)

A row has **moved** when this whole interval lies outside 1 by more than `MARGIN`. The interval covers what differs
within a session. The margin stands for what differs between sessions and is the same in all generations of one (the
board, its memory, the host), which no interval of a single run can know.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import exp, hypot, log

from kda_judge.evidence.derive import MEASURED
from kda_judge.evidence.provenance import own
from kda_judge.evidence.run_record import Basis, Interval, Provenance, RunRecord

MARGIN = 0.02
"""Relative difference that two sessions may have without a change. It comes from two recorded runs of k03, 20 minutes
apart on two H200 boards: on rows bound by the device the same pinned baseline's kernels differed by 1.9 to 2.2%, the
solution's by 0.3 to 0.8%, so that speedups were 0.6 to 1.9% apart."""


@dataclass(frozen=True)
class Change:
    """One row's speedup against one opponent, in two runs."""

    row: str
    opponent: str
    old: Interval
    new: Interval
    ratio: Interval
    """`new / old`: above 1 the subject has become faster against this opponent."""

    @property
    def outside_margin(self) -> bool:
        """Whether the interval of the ratio lies outside 1 by more than `MARGIN`."""
        return self.ratio.low > 1 + MARGIN or self.ratio.high < 1 / (1 + MARGIN)


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    old: str
    """Run id."""
    new: str
    changes: tuple[Change, ...]
    """Every row that both runs measured, in the new run's order, against every opponent of both."""
    headline: tuple[Change, ...]
    """The geometric means, under the row name `HEADLINE`; empty if the runs measured different rows."""
    lost: tuple[str, ...]
    """What cannot be compared, in words: a row or a speedup that one of the runs lacks."""

    @property
    def agree(self) -> bool:
        """Whether everything could be compared and no row has moved. The headline follows from the rows."""
        return not self.lost and not any(change.outside_margin for change in self.changes)


HEADLINE = "geometric mean"


def compare(old: RunRecord, new: RunRecord) -> Comparison:
    """Compare two runs of one task: by device time if that decides in both, else by wall time."""
    basis = Basis.DEVICE if {old.settings.decides, new.settings.decides} == {Basis.DEVICE} else Basis.WALL
    before = {row.id: row for row in old.rows}
    after = {row.id: row for row in new.rows}
    opponents = [name for name in new.settings.against if name in old.settings.against]
    lost = [f"only {old.run_id} was against {name}" for name in old.settings.against if name not in opponents]
    lost += [f"only {new.run_id} was against {name}" for name in new.settings.against if name not in opponents]
    lost += [f"row {row}: only {old.run_id} has it" for row in before if row not in after]
    lost += [f"row {row}: only {new.run_id} has it" for row in after if row not in before]
    changes: list[Change] = []
    for name in (name for name in after if name in before):
        unfit = [run for run in (before[name], after[name]) if run.verdict not in MEASURED]
        if unfit:
            was, now = before[name].verdict.value, after[name].verdict.value
            lost.append(f"row {name}: was {was}, is {now}: {unfit[-1].reason}")
            continue
        found = list(_changes(name, before[name].speedup.get(basis, {}), after[name].speedup.get(basis, {}), opponents))
        lost += [f"row {name}: no speedup against {gap}" for gap in opponents if gap not in {c.opponent for c in found}]
        changes += found
    headline: tuple[Change, ...] = ()
    if old.headline and new.headline and _production(old) == _production(new):
        means = [one.speedup.get(basis, {}) for one in (old.headline, new.headline)]
        headline = tuple(_changes(HEADLINE, means[0], means[1], opponents))
    return Comparison(old.run_id, new.run_id, tuple(changes), headline, tuple(lost))


def ratio(old: Interval, new: Interval) -> Interval:
    """`new / old` of two independent estimates, with the interval that their intervals give."""
    if old.level != new.level:
        raise ValueError(f"level: expected two intervals of one level, got {old.level} and {new.level}")
    centre = log(new.estimate) - log(old.estimate)
    below = hypot(log(new.estimate) - log(new.low), log(old.high) - log(old.estimate))
    above = hypot(log(new.high) - log(new.estimate), log(old.estimate) - log(old.low))
    return Interval(estimate=exp(centre), low=exp(centre - below), high=exp(centre + above), level=new.level)


def obstacles(old: Provenance, new: Provenance, old_gpu: str | None, new_gpu: str | None) -> list[str]:
    """Why the two do not measure the same thing: parts, pins and the kind of GPU, one line each."""
    hashes = _differing(own(old.hashes), own(new.hashes), cut=12)
    found = [f"{part} differs: sha256 {was}, now {now}" for part, was, now in hashes]
    found += [f"the pin of {arm} differs: {was}, now {now}" for arm, was, now in _differing(old.pins, new.pins)]
    if old_gpu != new_gpu:
        found.append(f"the GPU differs: {old_gpu or 'none'}, now {new_gpu or 'none'}")
    return found


def circumstances(old: Provenance, new: Provenance) -> list[str]:
    """Other differences that may matter: versions and drivers, one line each."""
    return [f"{name} was {was}, now {now}" for name, was, now in _differing(old.versions, new.versions)]


def _changes(
    row: str, old: Mapping[str, Interval], new: Mapping[str, Interval], opponents: list[str]
) -> Iterator[Change]:
    for name in opponents:
        if name in old and name in new:
            yield Change(row, name, old[name], new[name], ratio(old[name], new[name]))


def _production(record: RunRecord) -> set[str]:
    return {row.id for row in record.rows if row.production and row.verdict in MEASURED}


def _differing(
    old: Mapping[str, str], new: Mapping[str, str], cut: int | None = None
) -> Iterator[tuple[str, str, str]]:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            yield name, old.get(name, "absent")[:cut], new.get(name, "absent")[:cut]
