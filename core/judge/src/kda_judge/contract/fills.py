"""How a row's inputs get their values: the kinds of `fill`, and the keys that each of them reads."""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kda_judge.contract.workloads import TensorSpec

Fill = Literal[
    "normal", "arange", "randint", "cos", "sin", "cos_sin", "scale", "slots", "block_table", "expert_ids", "captured"
]
KEYS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "randint": (("high",), ("low",)),
    "slots": (("high",), ()),
    "block_table": (("high",), ("lengths", "block")),
    "expert_ids": (("high",), ("skew", "counts")),
    "captured": (("file", "sha256"), ("low", "high", "shuffle")),
}
"""Fill -> the keys that it needs, and those that it may have. Fills that are not here read no key."""
DEFAULTS: Mapping[str, object] = {
    "low": 0,
    "high": None,
    "lengths": None,
    "block": 1,
    "skew": 1.0,
    "counts": None,
    "file": None,
    "sha256": None,
    "shuffle": False,
}
INTEGER_FILLS = ("arange", "randint", "slots", "block_table", "expert_ids", "captured")
INDEX_FILLS = frozenset({"slots", "block_table", "expert_ids"})
"""Their values are places in something else: only integers make sense, and no two places hold one value."""
RANGE: Mapping[str, tuple[int, int]] = {"int8": (-128, 127), "uint8": (0, 255)}
"""Dtypes whose range is so small that a bound may lie outside it."""


def distinct(spec: "TensorSpec") -> int:
    """How many different values below `high` the fill has to find."""
    if spec.fill == "expert_ids":
        return spec.shape[-1] if spec.shape else 1
    return prod(spec.shape) if spec.fill in INDEX_FILLS else 0


def wrong(spec: "TensorSpec", integral: bool) -> str | None:
    """Why the keys of `spec` do not fit its fill, its dtype or each other, or None.

    Args:
        spec: one input of a row.
        integral: whether its dtype is an integer or bool.
    """
    needs, takes = KEYS.get(spec.fill, ((), ()))
    given = [key for key, default in DEFAULTS.items() if getattr(spec, key) != default]
    for key in needs:
        if key not in given:
            return f"fill = {spec.fill!r} needs `{key}`"
    for key in given:
        if key not in (*needs, *takes):
            return f"fill = {spec.fill!r} takes no `{key}`, only {[*needs, *takes]}"
    if integral and spec.fill not in INTEGER_FILLS:
        return f"dtype {spec.dtype} needs fill {', '.join(map(repr, INTEGER_FILLS))}, got {spec.fill!r}"
    if spec.fill in INDEX_FILLS and (not integral or spec.dtype in RANGE or spec.dtype == "bool"):
        return f"fill = {spec.fill!r} needs dtype int32 or int64, got {spec.dtype}"
    if spec.stride is not None and 0 in spec.stride and (spec.fill in INDEX_FILLS or spec.fill == "captured"):
        return f"fill = {spec.fill!r}: expected no stride of 0, which repeats values, got {list(spec.stride)}"
    if spec.fill == "captured" and integral and spec.high is None:
        return "captured integers need `high`, the bound that they stay below"
    if spec.fill == "block_table" and len(spec.shape) != 2:
        return f"fill = 'block_table': expected shape [sequences, blocks], got {list(spec.shape)}"
    return _out_of_bounds(spec)


def _out_of_bounds(spec: "TensorSpec") -> str | None:
    if spec.high is None:
        return None
    if spec.low >= spec.high:
        return f"expected low below high, got low = {spec.low}, high = {spec.high}"
    least, most = RANGE.get(spec.dtype, (spec.low, spec.high - 1))
    if spec.low < least or spec.high - 1 > most:
        return f"dtype {spec.dtype} holds {least} to {most}, got low = {spec.low}, high = {spec.high} (exclusive)"
    if distinct(spec) > spec.high:
        return f"fill = {spec.fill!r}: {distinct(spec)} different values below high = {spec.high} do not exist"
    if spec.counts is not None:
        if len(spec.counts) != spec.high:
            return f"counts: expected one for each of high = {spec.high} experts, got {len(spec.counts)}"
        if sum(count > 0 for count in spec.counts) < distinct(spec):
            return f"counts: expected {distinct(spec)} experts or more that were chosen at all"
        if spec.skew != DEFAULTS["skew"]:
            return "expected `skew` or `counts`, got both"
    return None
