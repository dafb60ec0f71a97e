"""One block of memory that the judge owns and every worker maps: CUDA IPC, or a shared file on the CPU.

Tensors are placed 256 bytes aligned with guard zones between them. The guards hold a pattern; a
changed byte means that an arm wrote where it must not.
"""

from __future__ import annotations

import base64
import math
import os
import pickle
from typing import TYPE_CHECKING

from kda_judge.arms.protocol import Place
from kda_judge.contract.tensor_spec import ITEM_SIZE, OutputSpec, span

if TYPE_CHECKING:
    import torch

ALIGN = 256
GUARD = 512
"""Bytes between two tensors: an overrun by a few vectors lands here."""
GUARD_BYTE = 0xA5


class Plan:
    """Lay out tensors before the arena exists."""

    def __init__(self) -> None:
        self.size = GUARD
        self.guards: list[tuple[int, int]] = [(0, GUARD)]

    def add(self, spec: OutputSpec, elements: int = 0) -> Place:
        """Reserve room for `spec` and a guard after it; a slice begins `elements` elements after an aligned place."""
        offset = self.size + elements * ITEM_SIZE[spec.dtype]
        self.guards.append((self.size, offset))
        used = spec.span * ITEM_SIZE[spec.dtype]
        end = offset + used
        self.size = (end + GUARD + ALIGN - 1) // ALIGN * ALIGN
        self.guards.append((end, self.size))
        return Place(offset=offset, shape=spec.shape, stride=spec.strides, dtype=spec.dtype)


class Arena:
    """The judge's side: allocate, hand out a handle, check the guards."""

    def __init__(self, plan: Plan, device: str) -> None:
        import torch

        self.device = device
        self._path: str | None = None
        if device == "cpu":
            # Memory without a name: nothing is left behind, however the run ends. Workers open it through /proc.
            self._file = os.memfd_create("kda-arena")
            os.ftruncate(self._file, plan.size)
            self._path = f"/proc/{os.getpid()}/fd/{self._file}"
            self.bytes = torch.from_file(self._path, shared=True, size=plan.size, dtype=torch.uint8)
        else:
            # An IPC handle opens the whole cudaMalloc block, so the arena gets a pool of its own:
            # otherwise the judge's oracle could lie in the same block.
            self._pool = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self._pool):
                self.bytes = torch.empty(plan.size, dtype=torch.uint8, device=device)
        self.bytes.fill_(GUARD_BYTE)
        # One index of all guards' bytes: a row has hundreds of guards, and looking at each would wait for the GPU.
        self._guards = torch.cat([torch.arange(*guard) for guard in plan.guards]).to(device)

    def handle(self) -> dict[str, str | int]:
        """What a worker needs to map the same memory."""
        if self._path is not None:
            return {"path": self._path, "size": self.bytes.numel()}
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild = reduce_tensor(self.bytes)  # type: ignore[no-untyped-call]
        return {"ipc": base64.b64encode(pickle.dumps(rebuild)).decode()}

    def view(self, place: Place) -> torch.Tensor:
        """The tensor at `place`."""
        return view(self.bytes, place)

    def fill(self, place: Place, byte: int) -> None:
        """Fill the memory that the tensor at `place` spans, the gaps of a strided one included."""
        used = span(place.shape, place.stride) * ITEM_SIZE[place.dtype]
        self.bytes[place.offset : place.offset + used] = byte

    def broken_guard(self) -> int | None:
        """Offset of the first guard byte that changed, or None."""
        wrong = self.bytes[self._guards] != GUARD_BYTE
        return int(self._guards[wrong.nonzero()[0]]) if bool(wrong.any()) else None

    def gap_changed(self, place: Place) -> bool:
        """Whether memory between a strided tensor's elements has changed; in a packed qkv it belongs to a neighbour."""
        import torch

        width = ITEM_SIZE[place.dtype]
        used = span(place.shape, place.stride)
        if not has_gaps(place):
            return False
        region = self.bytes[place.offset : place.offset + used * width].clone()
        words = as_bits(region.view(getattr(torch, place.dtype)))
        pattern = int.from_bytes(bytes([GUARD_BYTE]) * width, "little", signed=True)
        words.as_strided(place.shape, place.stride).fill_(pattern)
        return bool((region != GUARD_BYTE).any())

    def repair_guards(self) -> None:
        """Restore the pattern so that one fault is reported once."""
        self.bytes[self._guards] = GUARD_BYTE

    def close(self) -> None:
        """Free the memory; workers must have let go of it before."""
        if self._path is not None:
            os.close(self._file)
            self._path = None
        del self.bytes


def attach(handle: dict[str, str | int]) -> torch.Tensor:
    """The worker's side: map the judge's arena as a uint8 tensor.

    The handle is a pickle that the judge made; nothing a worker says is ever unpickled.
    """
    import torch

    if "path" in handle:
        return torch.from_file(str(handle["path"]), shared=True, size=int(handle["size"]), dtype=torch.uint8)
    rebuild, arguments = pickle.loads(base64.b64decode(str(handle["ipc"])))
    tensor = rebuild(*arguments)
    assert isinstance(tensor, torch.Tensor)
    return tensor


def view(arena: torch.Tensor, place: Place) -> torch.Tensor:
    """A strided typed tensor over the arena's bytes, with a storage of its own as a caller's tensors have.

    (Inputs that shared one storage would look aliased to torch.compile.) The arena must outlive it.
    """
    import torch

    dtype = getattr(torch, place.dtype)
    used = span(place.shape, place.stride) * ITEM_SIZE[place.dtype]
    typed = torch.empty(0, dtype=dtype, device=arena.device)
    if used == 0:
        return typed.reshape(place.shape)
    if arena.device.type == "cpu":
        part = torch.frombuffer(arena.numpy().data, dtype=torch.uint8, count=used, offset=place.offset)
    else:
        part = torch.as_tensor(_Bytes(arena.data_ptr() + place.offset, used), device=arena.device)
    return typed.set_(part.untyped_storage(), 0, place.shape, place.stride)


def has_gaps(place: Place) -> bool:
    """Whether memory between the tensor's first and last element is not its own."""
    own = math.prod(n for n, step in zip(place.shape, place.stride, strict=True) if step)
    return span(place.shape, place.stride) > own


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as signed integers of the elements' width: torch compares no float8, and NaN equals nothing."""
    import torch

    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


class _Bytes:
    """Raw device memory, in the form that torch adopts without a copy."""

    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "|u1", "data": (pointer, False), "version": 3}
