"""Find times that cannot be true: compare an arm's metrics with each other, and with the limits of the machine."""

from __future__ import annotations

from collections.abc import Mapping

from kda_judge.evidence.run_record import Limit, Metric

FASTER_THAN_DEVICE = 0.95
"""Share of the `device` time below which a call's other times cannot be true: the GPU's part is in them."""
COLD_OF_DEVICE = 0.5
"""The same for `cold`, on which only a quarter of the time is spent."""
FASTER_THAN_STREAM = ((1, 0.85), (2, 0.95))
"""Tensors larger than so many L2 caches -> share of the stream's time below which moving their bytes cannot be true.

The cache may hold a part of the tensors. Beyond twice the L2 no solution beat the stream by more than 1% (H200,
2026-11-22).
"""
EVENTS_OF_WALL = 0.8
"""Share of the wall that the calls' stream must be in use: less, and their work is on another stream."""
FASTER_THAN_HOST = 0.8
"""The host floor is the cheapest launch known to us, not a law: a better launcher may pass it by this much."""


def copy_share(footprint: int, l2_bytes: int) -> float:
    """Share of the stream's time that tensors of this size take at least; 0 where the L2 holds them."""
    return max((share for caches, share in FASTER_THAN_STREAM if footprint > caches * l2_bytes), default=0.0)


def unphysical(medians: Mapping[Metric, float], limit: Limit | None, share: float) -> str | None:
    """The first of an arm's times that is too short to be true, or None.

    Args:
        medians: of the arm's samples, microseconds.
        limit: of the row.
        share: `copy_share` of what a call touches; 0 where it is not known.
    """
    wall, device, events = map(medians.get, (Metric.WALL, Metric.DEVICE, Metric.EVENTS))
    if wall is None:
        return "no wall samples"
    pairs = [
        ("wall", wall, FASTER_THAN_DEVICE, device, "the GPU alone takes"),
        ("latency", medians.get(Metric.LATENCY), FASTER_THAN_DEVICE, device, "the GPU alone takes"),
        ("cold", medians.get(Metric.COLD), COLD_OF_DEVICE, device, "the GPU takes with its caches full"),
        # The calls' stream was idle while they ran: their work is on another one.
        ("events", events, FASTER_THAN_DEVICE, device, "the GPU alone takes"),
        ("events", events, EVENTS_OF_WALL, wall, "the calls take by the host's clock"),
    ]
    if limit is not None:
        pairs.append(("wall", wall, FASTER_THAN_HOST, limit.host_us, "an empty launch costs"))
        # An arm that cannot be captured into a graph has no `device`; its wall must obey physics all the same.
        pairs.append(("device", device, share, limit.device_us, "moving the bytes takes"))
        pairs.append(("wall", wall, share, limit.device_us, "moving the bytes takes"))
    for name, value, least, floor, what in pairs:
        if value is not None and floor is not None and value < least * floor:
            return f"{name} {value:.2f} us is less than {what} ({floor:.2f} us)"
    return None
