"""Put guards around memory that a verified call allocates: bytes of a known pattern, which nobody may write.

Timed and captured calls have none. On a GPU the call allocates from a pool of its own, in which guards that are held
alternate with free rooms of an output's size. The caching allocator gives a tensor the smallest room that holds it. So
the call runs as it always does, and a kernel that writes past an output's end hits the guard. Between the two are the
bytes by which the allocator rounds up, 511 at most. On a CPU torch's functions for new memory are replaced.

Imported before the arm, so that names an arm patches later are not the ones used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from kda_judge.arms.arena import GUARD, GUARD_BYTE
from kda_judge.arms.protocol import ArmSpec, Place
from kda_judge.contract.tensor_spec import INTEGRAL, ITEM_SIZE, span

SMALL = 1 << 20
"""Largest block, in bytes, that torch's caching allocator takes from segments for small blocks (kSmallSize)."""
LARGE_GUARD = 2 * SMALL
"""Bytes of a guard between larger blocks, which has to be one itself; a multiple of what segments are rounded to."""
ROUND = 512
"""The caching allocator's blocks are multiples of so many bytes (kMinBlockSize)."""
ROOMS = 2
"""Free rooms of each size: a temporary tensor of the call may take the first."""
MAKERS = (
    *((torch, name) for name in ("empty", "empty_like", "empty_strided", "zeros", "zeros_like", "full", "full_like")),
    *((torch.Tensor, name) for name in ("new_empty", "new_empty_strided", "new_zeros", "new_full")),
)
"""Functions whose new memory gets guards on a CPU. Tensors that torch's operators return have none there."""
_empty, _full, _frombuffer = torch.empty, torch.full, torch.frombuffer


class Guards:
    """The guards around the tensors of one call."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.kept: list[torch.Tensor] = []

    def broken(self) -> bool:
        """Whether a guard's byte changed. Ask last: this frees the guards, and returns unused memory to the device."""
        found = any(bool((one != GUARD_BYTE).any()) for one in self.kept)
        self.kept.clear()
        if self._device.startswith("cuda"):
            torch.cuda.empty_cache()
        return found


@contextmanager
def guarded(arm: ArmSpec, outputs: Sequence[Place]) -> Iterator[Guards]:
    """In this context, memory that calls allocate has guards, and holds poison where `outputs` may lie.

    On a CPU compiled arms get no guards: Dynamo takes other paths where torch's functions are replaced.
    """
    guards = Guards(arm.device)
    if arm.device.startswith("cuda"):
        around: AbstractContextManager[None] = _on_gpu(guards, arm.device, outputs)
    else:
        _poison(outputs)
        around = nullcontext() if arm.compiled else _on_cpu(guards)
    with around:
        yield guards


@contextmanager
def _on_gpu(guards: Guards, device: str, outputs: Sequence[Place]) -> Iterator[None]:
    sizes = [(_bytes(place), _byte(place)) for place in outputs]
    with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
        for large, width in ((False, GUARD), (True, LARGE_GUARD)):
            wanted = [(size, byte) for size, byte in sizes * ROOMS if size and (size > SMALL) == large]
            if not wanted:
                continue
            if large:  # one segment for all, freed at once: later blocks are cut off its front, piece by piece
                _blank(sum(-size // ROUND * -ROUND + width for size, _ in wanted) + width, GUARD_BYTE, device)
            rooms = []
            for size, byte in wanted:
                guards.kept.append(_blank(width, GUARD_BYTE, device))
                rooms.append(_blank(size, byte, device))
            guards.kept.append(_blank(width, GUARD_BYTE, device))
            rooms.clear()
        torch.cuda.synchronize()
        yield


def _poison(outputs: Sequence[Place]) -> None:
    """Fill memory of the outputs' sizes and free it, so that elements which are not written show."""
    rooms = [_blank(_bytes(place), _byte(place), "cpu") for place in outputs for _ in range(ROOMS)]
    rooms.clear()


def _bytes(place: Place) -> int:
    return span(place.shape, place.stride) * ITEM_SIZE[place.dtype]


def _byte(place: Place) -> int:
    """Byte of an output's unwritten memory. All bits set is NaN; of integers it is -1, which padding often is."""
    return GUARD_BYTE if place.dtype in INTEGRAL else 0xFF


def _blank(size: int, byte: int, device: str) -> torch.Tensor:
    return _empty(size, dtype=torch.uint8, device=device).fill_(byte)


@contextmanager
def _on_cpu(guards: Guards) -> Iterator[None]:
    with ExitStack() as patches:
        for owner, name in MAKERS:
            patches.enter_context(patch.object(owner, name, _guarding(getattr(owner, name), guards)))
        yield


def _guarding(make: Callable[..., Any], guards: Guards) -> Callable[..., Any]:
    """`make`, whose tensors lie between two guards."""

    def guarding(*arguments: Any, **named: Any) -> Any:
        made = make(*arguments, **named)
        if type(made) is not torch.Tensor or named.get("out") is not None or not made.is_cpu or made.is_sparse:
            return made
        size = made.untyped_storage().nbytes()
        if size == 0:
            return made
        block = _full((size + 2 * GUARD,), GUARD_BYTE, dtype=torch.uint8)
        part = _frombuffer(block.numpy().data, dtype=torch.uint8, count=size, offset=GUARD)
        part.copy_(_empty(0, dtype=torch.uint8).set_(made.untyped_storage()))
        guards.kept += (block[:GUARD], block[GUARD + size :])
        home = _empty(0, dtype=made.dtype)
        return home.set_(part.untyped_storage(), made.storage_offset(), made.shape, made.stride())

    return guarding
