"""Compare two runs of `kda model denoise`: end to end, stage by stage, and by step, with intervals over repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from kda_judge.contract.errors import UsageError
from kda_judge.evidence.run_record import Interval
from kda_judge.evidence.stats import speedup
from kda_tools.models.perf_dumps import Dump, Run, Settings, read_run
from kda_tools.publish.report import interval

FEWEST = 3
"""Fewest repeats of a run: an interval is over several processes, as the judge's is over several generations."""


@dataclass(frozen=True)
class Line:
    """One line of the table: medians over repeats, in milliseconds, and A's over B's."""

    name: str
    a_ms: float
    b_ms: float
    ratio: Interval | None
    """A's time over B's: above 1, B is faster. None if the time of some repeat is 0."""


def compare(a: Path, b: Path) -> tuple[Run, Run, list[Line]]:
    """The two runs and the table.

    Raises:
        UsageError: a folder is no run, a run cannot be compared, or the settings of the runs differ.
    """
    (one, before), (other, after) = read_run(a), read_run(b)
    for folder, run, dumps in ((a, one, before), (b, other, after)):
        _demand_comparable(folder, run, dumps)
    _demand_same(one.settings, other.settings)
    return one, other, table(before, after)


def _demand_comparable(folder: Path, run: Run, dumps: Sequence[Dump]) -> None:
    if run.settings.choice.profiled:
        raise UsageError(f"{folder}: made with --profile, whose times are the profiler's too")
    if len(dumps) < FEWEST:
        raise UsageError(f"{folder}: expected {FEWEST} repeats or more, got {len(dumps)}: no interval without them")
    for name, dump in zip(run.dumps, dumps, strict=True):
        if dump.commit_hash != run.settings.commit:
            raise UsageError(f"{folder / name}: expected commit {run.settings.commit}, got {dump.commit_hash}")
    if run.settings.commit.endswith("+dirty"):
        raise UsageError(f"{folder}: SGLang's checkout had changes that are in no commit: {run.settings.commit}")


def _demand_same(one: Settings, other: Settings) -> None:
    before, after = _flat(one.model_dump()), _flat(other.model_dump())
    keys = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if keys:
        listed = "\n".join(f"  {key}: {before.get(key)} and {after.get(key)}" for key in keys)
        raise UsageError(f"expected two runs with the same settings, got\n{listed}")


def _flat(values: dict[str, object], prefix: str = "") -> dict[str, object]:
    """One flat dictionary; keys of nested dictionaries are joined by dots."""
    made: dict[str, object] = {}
    for key, value in values.items():
        made |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return made


def table(before: Sequence[Dump], after: Sequence[Dump]) -> list[Line]:
    """End to end, denoising, the median step of each repeat, then every stage in its order.

    Raises:
        UsageError: the repeats differ in stages or in the number of steps.
    """
    shapes = {(tuple(s.name for s in dump.steps), len(dump.denoise_steps_ms)) for dump in (*before, *after)}
    if len(shapes) != 1:
        listed = "\n".join(f"  {', '.join(names)}; {steps} denoise steps" for names, steps in sorted(shapes))
        raise UsageError(f"expected the same stages and steps in every repeat, got\n{listed}")
    ((names, steps),) = shapes
    lines = [
        _line("end to end", [d.total_duration_ms for d in before], [d.total_duration_ms for d in after]),
        _line("denoising", [d.denoise_ms for d in before], [d.denoise_ms for d in after]),
    ]
    if steps:
        lines.append(_line(f"step, median of {steps}", [_step(d) for d in before], [_step(d) for d in after]))
    for index, name in enumerate(names):
        lines.append(
            _line(name, [d.steps[index].duration_ms for d in before], [d.steps[index].duration_ms for d in after])
        )
    return lines


def _step(dump: Dump) -> float:
    return median(step.duration_ms for step in dump.denoise_steps_ms)


def _line(name: str, a: list[float], b: list[float]) -> Line:
    # Every repeat is a process of its own, and so a generation of one sample.
    ratio = speedup([[value] for value in a], [[value] for value in b]) if min(*a, *b) > 0 else None
    return Line(name, median(a), median(b), ratio)


def text(one: Run, other: Run, lines: Sequence[Line]) -> list[str]:
    """The table for the terminal."""
    settings = one.settings
    wide = max(len(line.name) for line in lines)
    out = [
        f"{settings.preset}, sglang {settings.release} ({settings.commit}), {settings.gpu}",
        *(f"{side}: {run.label}, {len(run.dumps)} repeats{_applied(run)}" for side, run in (("A", one), ("B", other))),
        f"{'':{wide}}  {'A ms':>12}  {'B ms':>12}  A/B with its 95% interval; above 1 B is faster",
    ]
    for line in lines:
        out.append(f"{line.name:{wide}}  {line.a_ms:12.2f}  {line.b_ms:12.2f}  {interval(line.ratio)}")
    if not settings.choice.sync_steps:
        out.append("steps and stages are the host's times: SGLang was not asked to wait for the GPU (--sync-steps)")
    return out


def _applied(run: Run) -> str:
    return f", with kda apply ({run.applied})" if run.applied is not None else ""
