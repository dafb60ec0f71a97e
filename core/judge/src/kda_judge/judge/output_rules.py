"""Outputs for which a tolerance says too little or too much: quantised values, indices, probabilities.

Each rule turns an output and what the oracle wants into numbers that `correctness.compare` compares, so that errors and
words are the same for all.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kda_judge.contract.config import Rule, Tolerance
from kda_judge.judge.correctness import Comparison, codes, compare

if TYPE_CHECKING:
    import torch


def judged(
    name: str,
    rule: Rule | None,
    tolerances: Mapping[str, Tolerance],
    out: torch.Tensor,
    expected: torch.Tensor,
    magnitude: float,
    previous: torch.Tensor | None,
    keys: torch.Tensor | None,
) -> Comparison:
    """One output against the oracle, by its rule or else by the tolerance of its dtype.

    Parameters
    ----------
    out, expected:
        Same shape; `expected` is float64 (or float32) from the oracle.
    magnitude, previous:
        As `compare` takes them.
    keys:
        For `indices`: the key of each index, [..., n] with the leading dimensions of `out`, or [n] for all rows.
    """
    if rule is not None and rule.rule == "units":
        return _units(name, rule, out, expected, previous)
    if rule is not None and rule.rule == "indices":
        return _indices(name, rule, out, expected, keys)
    found = compare(name, out, expected, tolerances[str(out.dtype).removeprefix("torch.")], magnitude, previous)
    return found if rule is None else _sums(name, rule, out, found)


def _units(
    name: str, rule: Rule, out: torch.Tensor, expected: torch.Tensor, previous: torch.Tensor | None
) -> Comparison:
    """Count how many numbers of its own dtype the output is away from the oracle. Errors are in these units."""
    import torch

    def places(values: torch.Tensor) -> torch.Tensor:
        rounded = values if out.dtype.is_floating_point else values.round()
        found = codes(rounded.to(out.dtype)).double()
        # Finiteness is tested as float32, since float8 has no test of its own. NaN, and infinity, have the code after
        # the largest number's.
        return torch.where(torch.isfinite(values.float()), found, torch.nan)

    before = places(previous) if previous is not None else None
    found = compare(name, places(out), places(expected), _exactly(rule), 1.0, before)
    words = found.failure and f"{found.failure} (counted in numbers of {str(out.dtype).removeprefix('torch.')})"
    return dataclasses.replace(found, failure=words)


def _indices(name: str, rule: Rule, out: torch.Tensor, expected: torch.Tensor, keys: torch.Tensor | None) -> Comparison:
    """Compare the keys of the indices, and check that none comes in a row more often than the oracle's (or once)."""
    import torch

    if keys is None or not out.numel():
        return compare(name, out, expected, _exactly(rule))
    got, want = out.long(), expected.long()
    count = keys.shape[-1]
    rows = keys.expand(*got.shape[:-1], count)
    inside = (got >= 0) & (got < count)
    standing = torch.where(inside, rows.gather(-1, got.clamp(0, count - 1)), torch.nan)
    found = compare(name, standing.reshape(out.shape), rows.gather(-1, want).reshape(out.shape), _exactly(rule))
    if not bool(inside.all()):
        place = (~inside).nonzero()[0].tolist()
        return _failed(found, f"output {name!r}: index {int(got[tuple(place)])} at {place}, expected 0 to {count - 1}")
    if found.failure is not None:
        return dataclasses.replace(found, failure=f"{found.failure} (of what stands at the indices)")
    often = _counted(got, count) > _counted(want, count).clamp(min=1)
    if bool(often.any()):
        *row, index = often.nonzero()[0].tolist()
        return _failed(found, f"output {name!r}: index {index} comes too often{f' in row {row}' if row else ''}")
    return found


def _counted(indices: torch.Tensor, count: int) -> torch.Tensor:
    """[..., count]: how often each index comes in a row."""
    import torch

    zeros = torch.zeros(*indices.shape[:-1], count, dtype=torch.int32, device=indices.device)
    return zeros.scatter_add_(-1, indices, torch.ones_like(indices, dtype=torch.int32))


def _sums(name: str, rule: Rule, out: torch.Tensor, found: Comparison) -> Comparison:
    """Beside the tolerance: no probability is negative, and those of a row sum to one."""
    import torch

    if found.failure is not None or not out.numel():
        return found
    least = float(out.min())
    if least < 0:
        return _failed(found, f"output {name!r}: expected probabilities, got {least:.6g}")
    sums = out.sum(-1, dtype=torch.float64).reshape(-1)
    worst = int((sums - 1).abs().argmax())
    if abs(float(sums[worst]) - 1) > rule.within:
        return _failed(
            found, f"output {name!r}: row {worst} sums to {float(sums[worst]):.6g}, expected 1 +- {rule.within:g}"
        )
    return found


def _exactly(rule: Rule) -> Tolerance:
    """The rule's `within` as an absolute tolerance."""
    return Tolerance(atol=rule.within, rtol=0.0, reason=rule.reason)


def _failed(found: Comparison, words: str) -> Comparison:
    """A failed comparison whose errors do not show it: its `used` becomes the largest float."""
    used = max(found.error.used or 0.0, sys.float_info.max)
    return Comparison(error=found.error.model_copy(update={"used": used}), failure=words)
