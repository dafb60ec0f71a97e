"""How many bytes an operation of a capture has to move at least, from the tensors that it is called with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from kda_tools.traces.cards import SIZES
from kda_tools.traces.hotspots import Hotspot
from kda_tools.traces.trace_profile import Tensor

RULE = (
    "By the operation's definition: every element that is needed is read once and every result written "
    "once; of a pool, of an embedding and of a table of angles the rows of the call's tokens alone."
)
FLOAT32 = 4


def _size(tensor: Tensor) -> int:
    return SIZES[tensor.dtype] * prod(tensor.shape)


def _row(tensor: Tensor) -> int:
    """Bytes of one row."""
    return SIZES[tensor.dtype] * prod(tensor.shape[1:])


def _in_and_out(t: Sequence[Tensor]) -> int:
    return 2 * _size(t[0]) + _size(t[1])


def _add_norm(t: Sequence[Tensor]) -> int:
    return 2 * _size(t[0]) + 2 * _size(t[1]) + _size(t[2])


def _qknorm(t: Sequence[Tensor]) -> int:
    return 2 * _size(t[0]) + 2 * _size(t[1]) + _size(t[2]) + _size(t[3])


def _rope_store(t: Sequence[Tensor]) -> int:
    q, k, v, _, _, angles, positions, slots = t
    heads = 2 * _size(q) + 2 * _size(k) + _size(v)  # q and k are read, turned and written back
    pool = _size(k) + _size(v)
    return heads + pool + prod(positions.shape) * _row(angles) + _size(positions) + _size(slots)


def _softmax(t: Sequence[Tensor]) -> int:
    return _size(t[0]) + _size(t[1]) + FLOAT32 * prod(t[0].shape)


def _embedding(t: Sequence[Tensor]) -> int:
    return _size(t[0]) + 2 * prod(t[0].shape) * _row(t[1])


FORMULAS: dict[str, Callable[[Sequence[Tensor]], int]] = {
    "rmsnorm": _in_and_out,
    "fused_add_rmsnorm": _add_norm,
    "qknorm": _qknorm,
    "rope_kv_store": _rope_store,
    "silu_and_mul": lambda t: _size(t[0]) * 3 // 2,
    "topk_sum": lambda t: _size(t[0]) + _size(t[0]) // t[0].shape[1],
    "softmax_temperature": _softmax,
    "embedding": _embedding,
}
"""Operation -> bytes of a call. Those whose results the tensors do not show, as `topk_softmax`, have none."""


def has_formula(spot: Hotspot) -> bool:
    """Whether it is a capture's operation that has a formula."""
    return spot.name in FORMULAS and not spot.module


def bytes_moved(spot: Hotspot, inputs: tuple[Tensor, ...] | None) -> int | None:
    """Bytes of a call of a capture's operation; None without a formula or inputs."""
    return FORMULAS[spot.name](inputs) if inputs is not None and has_formula(spot) else None
