"""Count the bytes that a step must still move if it is fused as far as its dataflow allows; nothing is computed.

The step runs with PyTorch's fake tensors and its eager operations, so that no work is hidden inside a kernel. Products,
convolutions and attention are barriers: no other operation is fused into them or across them. All other operations
between two levels of barriers count as one kernel. It reads each value from outside once, and writes each value that is
read outside once. An operation can run at the first level that has its inputs, or at the last one that its readers
allow: a GELU whose result is only concatenated after the attention may wait until then. Both ways are counted for the
whole step, and the smaller sum is the result.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BARRIERS = ("mm", "addmm", "bmm", "baddbmm", "linear", "convolution", "scaled_dot_product", "einsum")
"""How the names of operations begin that are bound by arithmetic."""
NO_WORK = ("empty", "new_empty", "detach", "lift_fresh", "sym_", "is_", "local_scalar_dense")
"""Prefixes of the names of operations that neither read nor write the values of tensors."""


class Value(NamedTuple):
    """The contents of a tensor's memory at one moment: which memory, and how often it has been written."""

    memory: int
    version: int


class View(NamedTuple):
    """A part of a value."""

    value: Value
    offset: int
    size: int
    """Bytes of its elements."""
    whole: int
    """Bytes of the memory."""


class Operation(NamedTuple):
    """An operation that computes something, with its inputs and outputs."""

    barrier: bool
    reads: tuple[View, ...]
    writes: tuple[View, ...]


class Dataflow(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of a step in `operations`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self._kept: list[Any] = []
        """All memory seen so far, kept alive so that its address is not used again."""
        self._versions: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        reads = tuple(map(self._view, _tensors((args, given))))
        changed = list(_changed(func, args, given))
        result = func(*args, **given)
        name = func._schema.name.partition("::")[2].lstrip("_")
        known = {view.value.memory for view in reads}
        made = [tensor for tensor in _tensors(result) if self._view(tensor).value.memory not in known]
        if name.startswith(NO_WORK) or not (made or changed):
            return result  # a view, or memory without values
        for memory in {self._view(tensor).value.memory for tensor in (*made, *changed)}:
            self._versions[memory] += 1
        writes = tuple(map(self._view, (*made, *changed)))
        self.operations.append(Operation(name.startswith(BARRIERS), reads, writes))
        return result

    def hand_out(self, result: Any) -> None:
        """Note that the caller reads the step's result."""
        self.operations.append(Operation(True, tuple(map(self._view, _tensors(result))), ()))

    def _view(self, tensor: torch.Tensor) -> View:
        storage = tensor.untyped_storage()
        memory = storage._cdata
        if memory not in self._versions:
            self._kept.append(storage)
            self._versions[memory] = 0
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return View(Value(memory, self._versions[memory]), offset, _bytes(tensor), storage.nbytes())


def fused(operations: Sequence[Operation]) -> list[int]:
    """Bytes of every kernel that is left, in order; barriers are not among them."""
    first = _first_levels(operations)
    return min((_moved(operations, levels) for levels in (first, _last_levels(operations, first))), key=sum)


def _first_levels(operations: Sequence[Operation]) -> list[int]:
    """How many barriers are on the longest way to each operation; a barrier counts itself."""
    made_at: dict[Value, int] = {}
    levels = []
    for one in operations:
        level = max((made_at.get(view.value, 0) for view in one.reads), default=0) + one.barrier
        made_at |= {view.value: level for view in one.writes}
        levels.append(level)
    return levels


def _last_levels(operations: Sequence[Operation], first: Sequence[int]) -> list[int]:
    """For each operation the level of its first reader, one less if the reader is a barrier; barriers keep theirs."""
    needed: dict[Value, int] = {}
    levels = list(first)
    for number in reversed(range(len(operations))):
        one = operations[number]
        if not one.barrier:
            readers = [needed[view.value] for view in one.writes if view.value in needed]
            levels[number] = min(readers, default=first[number])
        for view in one.reads:
            needed[view.value] = min(needed.get(view.value, levels[number]), levels[number] - one.barrier)
    return levels


def _moved(operations: Sequence[Operation], levels: Sequence[int]) -> list[int]:
    made_at: dict[Value, int] = {}
    """Values that no barrier made -> level of the operation that made them."""
    moved: defaultdict[tuple[int, Value, bool], set[View]] = defaultdict(set)
    for one, level in zip(operations, levels, strict=True):
        for view in one.reads:
            maker = made_at.get(view.value)
            if maker == level and not one.barrier:
                continue  # within one kernel
            if not one.barrier:
                moved[level, view.value, False].add(view)
            if maker is not None:
                moved[maker, view.value, True].add(view)
        if not one.barrier:
            made_at |= {view.value: level for view in one.writes}
    found: Counter[int] = Counter()
    for (level, _, _), views in moved.items():
        found[level] += min(sum(view.size for view in views), max(view.whole for view in views))
    return [size for _, size in sorted(found.items()) if size]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The arguments that an operation writes."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from _tensors(args[number] if number < len(args) else kwargs.get(argument.name))


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements; all elements along a dimension of stride 0 count once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return prod(sizes) * tensor.element_size()
