"""Compare an output with the oracle: every element, and the words that say what went wrong."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kda_judge.arms.arena import as_bits
from kda_judge.contract.errors import UsageError
from kda_judge.evidence.run_record import Distance, OutputError

if TYPE_CHECKING:
    import torch

    from kda_judge.contract.config import Tolerance

BASELINE_FACTOR = 2.0
BASELINE_SLACK = 1e-6
"""A solution's error may be at most twice the baseline's on the same inputs, plus this."""
INPUT_ROUNDINGS: Mapping[str, float] = {"float32": 4.0}
"""Dtype of an output -> how many changes by its inputs' last bit (`oracle.last_bits`) are allowed in addition.

The largest errors of two right float32 kernels differ by luck: if a mean is near 64, one rounding of it decides. In a
simulation of honest kernels, twice the baseline's error failed 8.6% of the draws of the family `offset`, and 16 times
still failed 0.5%. Twice and 3.8 changes passed all; TF32 is wrong by 22 changes or more (docs/method_details.md).
Outputs of 16 bits get none: their own rounding comes last.
"""
CHUNK = 1 << 26
"""Elements compared at a time: float64 temporaries of 512 MiB at most."""


@dataclass(frozen=True)
class Comparison:
    """One output against the oracle."""

    error: OutputError
    failure: str | None
    """None when every element is within tolerance, else what is wrong, where, expected and got."""


def compare(
    name: str,
    out: torch.Tensor,
    expected: torch.Tensor,
    tolerance: Tolerance,
    magnitude: float = 1.0,
    previous: torch.Tensor | None = None,
) -> Comparison:
    """Check `|out - expected| <= atol * magnitude + rtol * |expected|` for every element.

    Parameters
    ----------
    out, expected:
        Same shape; `expected` is float64 (or float32) from the oracle.
    magnitude:
        Size of the inputs' family, which scales `atol`.
    previous:
        The last trial's expected values; an output that fits them instead is reported as a remembered result.
    """
    import torch

    flat, ref = out.reshape(-1), expected.reshape(-1)
    if ref.numel():
        # An op that normalises keeps outputs of order one: its tolerance must not grow with its inputs.
        magnitude = max(1.0, min(magnitude, float(ref.abs().max())))
    max_abs = max_rel = square = norm = 0.0
    worst, used, bad, not_finite = 0, -1.0, 0, 0
    for start in range(0, flat.numel(), CHUNK):
        got = flat[start : start + CHUNK].to(ref.dtype)
        want = ref[start : start + CHUNK]
        difference = (got - want).abs_()
        # Every pass over the elements costs time: what only a wrong output needs is computed only for that.
        largest = float(difference.max())
        if not math.isfinite(largest):
            finite = torch.isfinite(got)
            not_finite += int((~finite).sum())
            difference = torch.where(finite, difference, math.inf)
            largest = float(difference.max())
        max_abs = max(max_abs, largest)
        size = want.abs()
        allowed = (size * tolerance.rtol).add_(tolerance.atol * magnitude)
        share = difference / allowed
        if tolerance.atol == 0:
            # Where the allowance is 0, an exact element uses a share of 0, not 0 / 0.
            share = torch.where(difference > 0, share, 0.0)
        here = int(share.argmax())
        most = float(share[here])
        if most > used:
            worst, used = start + here, most
        if most >= 1:
            bad += int((difference > allowed).sum())
        max_rel = max(max_rel, float((difference / size.clamp_min_(1e-12)).max()))
        square += float(difference.square().sum())
        norm += float(want.square().sum())
    index = tuple(int(i) for i in np.unravel_index(worst, expected.shape)) if flat.numel() else ()
    want_worst = float(ref[worst]) if flat.numel() else 0.0
    allowed_worst = tolerance.atol * magnitude + tolerance.rtol * abs(want_worst)
    error = OutputError(
        output=name,
        max_abs=_finite(max_abs),
        max_rel=_finite(max_rel),
        rel_l2=_finite(math.sqrt(square / norm) if norm > 0 else math.sqrt(square)),
        worst_index=index,
        allowed=allowed_worst,
        used=_finite(max(used, 0.0)),
    )
    failure = None
    if bad:
        got_worst = float(flat[worst])
        failure = (
            f"output {name!r}: {bad} of {flat.numel()} elements outside tolerance; worst at {list(index)}: "
            f"expected {want_worst:.6g} +- {allowed_worst:.3g}, got {got_worst:.6g}"
        )
        if not_finite:
            failure += f"; {not_finite} not finite"
        if previous is not None and compare(name, out, previous, tolerance, magnitude).failure is None:
            failure = f"output {name!r} is the previous call's result: it was remembered, not computed"
    return Comparison(error=error, failure=failure)


def worse_than_baseline(subject: OutputError, baseline: OutputError, roundings: float = 0.0) -> str | None:
    """Why the subject's error is too large beside the baseline's on the same inputs, or None.

    `roundings` is the additional error that `INPUT_ROUNDINGS` allows for the output's dtype.
    """
    ceiling = BASELINE_FACTOR * baseline.max_abs + BASELINE_SLACK + roundings
    if subject.max_abs > ceiling:
        return (
            f"output {subject.output!r}: max abs error {subject.max_abs:.3g}, more than twice "
            f"the baseline's {baseline.max_abs:.3g}{f' and {roundings:.3g} for rounding' if roundings else ''} "
            f"on the same inputs"
        )
    # All elements may be less exact although the worst one is within the limit.
    if not roundings and subject.rel_l2 > BASELINE_FACTOR * baseline.rel_l2 + BASELINE_SLACK:
        return (
            f"output {subject.output!r}: error of all elements {subject.rel_l2:.3g} of their norm, more than twice "
            f"the baseline's {baseline.rel_l2:.3g} on the same inputs"
        )
    return None


def distance(name: str, one: torch.Tensor, other: torch.Tensor) -> Distance:
    """How far two tensors of one shape and dtype are apart, element by element; all their values are finite."""
    one, other = one.reshape(-1), other.reshape(-1)
    unequal = beyond = furthest = 0
    for start in range(0, one.numel(), CHUNK):
        a, b = one[start : start + CHUNK], other[start : start + CHUNK]
        differ = (as_bits(a.contiguous()) != as_bits(b.contiguous())).nonzero().reshape(-1)
        if differ.numel():
            apart = (codes(a[differ]) - codes(b[differ])).abs()
            unequal += differ.numel()
            beyond += int((apart > 1).sum())
            furthest = max(furthest, int(apart.max()))
    count = max(one.numel(), 1)
    return Distance(output=name, equal=1 - unequal / count, near=1 - beyond / count, ulps=furthest)


def further(a: Distance | None, b: Distance) -> Distance:
    """The worst of two draws, number by number."""
    if a is None:
        return b
    shares = {key: min(getattr(a, key), getattr(b, key)) for key in ("equal", "near")}
    return b.model_copy(update={**shares, "ulps": max(a.ulps, b.ulps)})


def codes(values: torch.Tensor) -> torch.Tensor:
    """Every number's place among those of its dtype, int64: neighbours are 1 apart, both zeros are 0.

    float8_e4m3fn, float16, bfloat16, float32, and integers, which are their own places. What is not finite has none.
    """
    import torch

    if not values.dtype.is_floating_point:
        return values.long()
    if values.dtype == torch.float64:
        raise UsageError("units in the last place: expected an output of 32 bits or less, got float64")
    word = {1: torch.int8, 2: torch.int16, 4: torch.int32}[values.element_size()]
    bits = values.contiguous().view(word).long()
    return torch.where(bits < 0, -(bits + (1 << 8 * values.element_size() - 1)), bits)


def worse(a: OutputError, b: OutputError) -> OutputError:
    """The worst of two trials, number by number; index and allowance follow the larger absolute error."""
    top = a if a.max_abs >= b.max_abs else b
    highest = {name: max(getattr(a, name), getattr(b, name)) for name in ("max_rel", "rel_l2", "used")}
    return top.model_copy(update=highest)


def _finite(value: float) -> float:
    """JSON has no infinity; the largest float says the same."""
    return value if math.isfinite(value) else 1.7976931348623157e308
