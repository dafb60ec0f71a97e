"""From the judge's notes to a row's result: who failed, and whether the times are physically possible."""

from __future__ import annotations

from statistics import median
from typing import Literal

from kda_core.notes import ArmNotes, RowNotes
from kda_core.records import LIMIT_ARM, ArmRow, Correctness, Limit, Metric, RowResult, Settings, Verdict

FASTER_THAN_LIMIT = 0.95
"""Share of a physical limit below which a time cannot be true; the copy that sets it is itself good to 5%."""
FASTER_THAN_HOST = 0.8
"""The host floor is the cheapest launch known to us, not a law: a better launcher may pass it by this much."""
CLOCK_TOLERANCE = 1.25
"""Judge's clock over worker's claim, per call: more means that calls cost more than the worker says."""
GPU_WOULD_ADD = (
    "correct on the CPU; a GPU would add the timing against upstream, its correctness at full size, and the verdict"
)


def result(notes: RowNotes, settings: Settings, kind: Literal["cuda", "cpu"], l2_bytes: int) -> RowResult:
    """One row's result. A measured row arrives as NOT_FASTER without a reason: `derive` decides it from its samples."""
    limit = _limit(notes)
    verdict, reason = _verdict(notes, settings, kind, limit, l2_bytes)
    measured = kind == "cuda"
    return RowResult(
        id=notes.row.id,
        op=notes.row.op,
        production=notes.row.production,
        verdict=verdict,
        reason=reason,
        arms={name: _arm(arm, notes.oracle_dtype, measured) for name, arm in notes.arms.items()},
        limit=limit if measured else None,
        input_shapes={name: spec.shape for name, spec in notes.row.inputs.items()},
    )


def _arm(arm: ArmNotes, oracle: str, measured: bool) -> ArmRow:
    failure = arm.incorrect or (str(arm.fault) if arm.fault else None)
    samples = {metric: tuple(tuple(part) for part in parts) for metric, parts in arm.samples.items() if any(parts)}
    return ArmRow(
        correctness=Correctness(
            passed=failure is None,
            checks=arm.checks,
            outputs=tuple(arm.errors.values()),
            failure=failure,
            oracle="float32" if oracle == "float32" else "float64",
        ),
        # A CPU's times say nothing about a kernel and are not kept.
        samples=samples if measured else {},
        calls_per_sample=arm.calls if measured else None,
        kernels_per_call=arm.kernels.get("timed"),
        restarts=arm.restarts,
    )


def _limit(notes: RowNotes) -> Limit | None:
    arm = notes.arms.get(LIMIT_ARM)
    if arm is None:
        return None
    wall, device = _median(arm, Metric.WALL), _median(arm, Metric.DEVICE)
    if wall is None or device is None:
        return None
    return Limit(bytes_moved=notes.bytes_moved, device_us=device, host_us=wall)


def _verdict(
    notes: RowNotes, settings: Settings, kind: Literal["cuda", "cpu"], limit: Limit | None, l2_bytes: int
) -> tuple[Verdict, str]:
    """The first thing wrong, in order of weight; else UNVERIFIED on a CPU and a measured verdict on a GPU."""
    subject, opponent = settings.subject, settings.against[0]
    for name in (subject, opponent):
        arm = notes.arms[name]
        if arm.incorrect is not None:
            return Verdict.INCORRECT, f"{name}: {arm.incorrect}"
        if arm.fault is not None:
            return arm.fault.verdict, arm.fault.reason
    if not notes.complete:
        return Verdict.INVALID, "interrupted before every check of this row was made"
    if kind == "cpu":
        return Verdict.UNVERIFIED, GPU_WOULD_ADD
    for name, arm in notes.arms.items():
        if name in (subject, opponent):
            impossible = _impossible(arm, limit, notes.footprint > l2_bytes)
            if impossible is not None:
                return Verdict.INVALID, f"{name}: {impossible}"
    if limit is None:
        return Verdict.INVALID, f"the machine's limit was not measured: {notes.arms[LIMIT_ARM].fault}"
    return Verdict.NOT_FASTER, ""


def _impossible(arm: ArmNotes, limit: Limit | None, beyond_l2: bool) -> str | None:
    """Why the arm's times cannot be true, or None."""
    if arm.overclaimed is not None:
        return arm.overclaimed
    if arm.claimed_us:
        ratio = median(arm.clocked_us) / max(median(arm.claimed_us), 1e-9)
        if not 1 / CLOCK_TOLERANCE <= ratio <= CLOCK_TOLERANCE:
            return f"the judge's clock saw {ratio:.2f} times the time per call that the worker claims"
    wall, device = _median(arm, Metric.WALL), _median(arm, Metric.DEVICE)
    if wall is None:
        return "no wall samples"
    if device is not None and wall < FASTER_THAN_LIMIT * device:
        return f"wall {wall:.2f} us is less than the GPU alone takes ({device:.2f} us)"
    if limit is not None:
        if device is not None and beyond_l2 and device < FASTER_THAN_LIMIT * limit.device_us:
            return f"device {device:.2f} us is less than moving the bytes takes ({limit.device_us:.2f} us)"
        if wall < FASTER_THAN_HOST * limit.host_us:
            return f"wall {wall:.2f} us is less than an empty launch costs ({limit.host_us:.2f} us)"
    verified, timed = arm.kernels.get("verified"), arm.kernels.get("timed")
    if verified is None or timed is None:
        return "the profiler counted nothing"
    if verified != timed or timed == 0:
        return f"{verified:g} kernels in the verified call, {timed:g} per call when timed"
    return None


def _median(arm: ArmNotes, metric: Metric) -> float | None:
    samples = [value for part in arm.samples.get(metric, ()) for value in part]
    return median(samples) if samples else None
