"""From the judge's notes to a row's result: who failed, and whether the times are physically possible."""

from __future__ import annotations

import re
from collections.abc import Mapping
from statistics import median
from typing import Literal

from kda_judge.evidence.physics import copy_share, unphysical
from kda_judge.evidence.run_record import LIMIT_ARM, ArmRow, Correctness, Limit, Metric, RowResult, Settings, Verdict
from kda_judge.judge.row_notes import ArmNotes, RowNotes

CLOCK_TOLERANCE = 1.10
"""Largest allowed median of a command's time by the judge's clock over the worker's claim. What the protocol adds for
the limits' worker (our code alone) is allowed besides: 0.6 to 1 ms on a fast host, twice that on a slow one."""
ABSOLUTE = re.compile(r"(?:(?<=-[ILo])|(?<![\w./~-]))/(?!/)(?:[^\s/'\":,;()\[\]]+/)+")
"""The folders of an absolute path, also right after a compiler's option; ratios and web addresses do not match."""
NOT_TIMED = {
    "cpu": "correct on the CPU; a GPU would add the timing against upstream, correctness at full size, and the verdict",
    "cuda": "correct; not timed, as only correctness was asked for",
}
"""Why a correct row has no measured verdict."""


def result(
    notes: RowNotes,
    settings: Settings,
    kind: Literal["cuda", "cpu"],
    l2_bytes: int,
    timed: bool = True,
    counted: bool = True,
) -> RowResult:
    """One row's result. A measured row gets NOT_FASTER and no reason: `derive` decides later, from its samples.

    Args:
        notes: what the judge noted.
        settings: the run's settings.
        kind: where it ran.
        l2_bytes: size of the GPU's L2 cache.
        timed: False for a run that only verified.
        counted: False where kernels are not counted: in a quick run, and before the checks that follow all timing.
    """
    limit = _limit(notes)
    measured = kind == "cuda" and timed
    verdict, reason = _failure(notes, settings) or (
        _judged(notes, settings, limit, l2_bytes, counted and not settings.quick)
        if measured
        else (Verdict.CORRECT, NOT_TIMED[kind] + _outside(notes))
    )
    return RowResult(
        id=notes.row.id,
        op=notes.row.op,
        production=notes.row.production,
        verdict=verdict,
        reason=without_folders(reason),
        arms={name: _arm(arm, notes.oracle_dtype, measured) for name, arm in notes.arms.items()},
        limit=limit if measured else None,
        input_shapes={name: spec.shape for name, spec in notes.row.inputs.items()},
    )


def _arm(arm: ArmNotes, oracle: str, measured: bool) -> ArmRow:
    failure = arm.incorrect or (str(arm.fault) if arm.fault else None) or arm.outside
    samples = {metric: tuple(tuple(part) for part in parts) for metric, parts in arm.samples.items() if any(parts)}
    return ArmRow(
        correctness=Correctness(
            passed=failure is None,
            checks=arm.checks,
            outputs=tuple(arm.errors.values()),
            failure=without_folders(failure) if failure else None,
            oracle="float32" if oracle == "float32" else "float64",
        ),
        distance=tuple(arm.distance.values()),
        # A CPU's times say nothing about a kernel and are not kept.
        samples=samples if measured else {},
        calls_per_sample=arm.calls if measured else None,
        kernels_per_call=arm.kernels.get("timed"),
        no_graph=without_folders(arm.no_graph) if arm.no_graph else None,
        clock_ratio={metric: median(ratios) for metric, ratios in _ratios(arm)} if measured else {},
        restarts=arm.restarts,
        replaced=arm.replaced,
    )


def without_folders(text: str) -> str:
    """An arm's message without the folders of absolute paths: they belong to the machine, and records are published."""
    shown = "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
    return ABSOLUTE.sub("", shown)


def _limit(notes: RowNotes) -> Limit | None:
    arm = notes.arms.get(LIMIT_ARM)
    if arm is None:
        return None
    wall, device = _median(arm, Metric.WALL), _median(arm, Metric.DEVICE)
    if wall is None or device is None:
        return None
    return Limit(bytes_moved=notes.traffic.moved, device_us=device, host_us=wall)


def _failure(notes: RowNotes, settings: Settings) -> tuple[Verdict, str] | None:
    """The first thing wrong with the subject or its first opponent, or None."""
    for name in (settings.subject, settings.against[0]):
        arm = notes.arms[name]
        if arm.incorrect is not None:
            return Verdict.INCORRECT, f"{name}: {arm.incorrect}"
        if arm.fault is not None:
            return arm.fault.verdict, arm.fault.reason
    if not notes.complete:
        return Verdict.INVALID, "interrupted before every check of this row was made"
    return None


def _outside(notes: RowNotes) -> str:
    """Text that names the arms which are wrong although the subject is correct; empty if there are none."""
    return "".join(f"; {name} is not: {arm.outside}" for name, arm in notes.arms.items() if arm.outside)


def _judged(
    notes: RowNotes, settings: Settings, limit: Limit | None, l2_bytes: int, counted: bool
) -> tuple[Verdict, str]:
    """INVALID when a time cannot be true, else a measured verdict that the samples still have to decide."""
    for name in (settings.subject, *settings.against):
        # Another opponent that failed leaves no ratio; one that measured something impossible would leave a wrong one.
        if notes.arms[name].usable:
            share = copy_share(notes.footprint, l2_bytes)
            impossible = _impossible(notes.arms[name], limit, share, _protocol_us(notes), counted)
            if impossible is not None:
                return Verdict.INVALID, f"{name}: {impossible}"
    if limit is None:
        why = notes.arms[LIMIT_ARM].fault if LIMIT_ARM in notes.arms else "nobody asked for it"
        return Verdict.INVALID, f"the machine's limit was not measured: {why}"
    return Verdict.NOT_FASTER, ""


def _protocol_us(notes: RowNotes) -> dict[Metric, float]:
    """Metric -> what a command costs besides the claimed time, from the limits' worker, which runs only our code."""
    arm = notes.arms.get(LIMIT_ARM)
    return {metric: median(times) for metric, times in arm.protocol_us.items()} if arm is not None else {}


def _impossible(
    arm: ArmNotes, limit: Limit | None, share: float, protocol_us: Mapping[Metric, float], counted: bool
) -> str | None:
    """Why the arm's times cannot be true, or None."""
    medians = {metric: middle for metric in Metric if (middle := _median(arm, metric)) is not None}
    found = _clocks_differ(arm, protocol_us) or unphysical(medians, limit, share)
    return found or (_kernels_differ(arm) if counted else None)


def _ratios(arm: ArmNotes) -> list[tuple[Metric, list[float]]]:
    """The clock ratios of all metrics but `latency`, which is so short that the judge sees mostly the protocol."""
    return [(metric, ratios) for metric, ratios in arm.clock_ratios.items() if metric is not Metric.LATENCY]


def _clocks_differ(arm: ArmNotes, protocol_us: Mapping[Metric, float]) -> str | None:
    """The worker's clock against the judge's: a claim that is too long, or too short by more than the protocol."""
    for metric, ratios in _ratios(arm):
        ratio, claimed = median(ratios), arm.claimed_us.get(metric)
        protocol = protocol_us.get(metric, 0.0) / median(claimed) if claimed else 0.0
        if not 1 <= ratio <= CLOCK_TOLERANCE + protocol:
            more = f"; of the limits' worker {1 + protocol:.2f} times" if protocol else ""
            return f"{metric.value}: the judge's clock saw {ratio:.2f} times the time that the worker claims{more}"
    return None


def _kernels_differ(arm: ArmNotes) -> str | None:
    """The profiler's count of kernels in the verified call against the timed calls."""
    verified, timed = arm.kernels.get("verified"), arm.kernels.get("timed")
    if verified is None or timed is None:
        return "the profiler counted nothing"
    if verified != timed or timed == 0:
        return f"{verified:g} kernels in the verified call, {timed:g} per call when timed"
    return None


def _median(arm: ArmNotes, metric: Metric) -> float | None:
    samples = [value for part in arm.samples.get(metric, ()) for value in part]
    return median(samples) if samples else None
