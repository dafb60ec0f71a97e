"""Count the bytes that a step must still move if it is fused as far as its dataflow allows; nothing is computed.

The step runs with PyTorch's fake tensors and its eager operations, so that no work is hidden inside a kernel. Products,
convolutions and attention are barriers: but for a GELU of a product's whole result, no other operation is fused into
them or across them. All other operations between two levels of barriers count as one kernel. It reads each value from
outside once, and writes each value that is read outside once. A pointwise operation is repeated in every kernel that
reads its result if that moves fewer bytes: where each kernel needs another slice of a sum, for example. An operation
can run at the first level that has its inputs, or at the last one that its readers allow: a GELU whose result is only
concatenated after the attention may wait until then. All ways are counted for the whole step, and the smallest sum is
the result.
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
CONVERSIONS = ("to_copy",)
"""Names of operations that are pointwise, too, although PyTorch does not tag them so."""
EPILOGUES = ("gelu", "relu")
"""Names of operations that libraries of products do as they write a result."""
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
    elements: int
    """How many elements it has."""

    def part_read_for(self, of: View, given: View) -> View:
        """What a pointwise operation reads of this input for the part `given` of its result `of`."""
        if self.elements != of.elements:
            return self  # broadcast
        start, share = self.offset + int((given.offset - of.offset) / of.size * self.size), given.size / of.size
        return self._replace(offset=start, size=int(share * self.size), elements=int(share * self.elements))


class Operation(NamedTuple):
    """An operation that computes something, with its inputs and outputs."""

    barrier: bool
    reads: tuple[View, ...]
    writes: tuple[View, ...]
    pointwise: bool = False
    """It has one new result, each element of which depends only on the inputs' elements at the same place."""
    epilogue: bool = False
    """A product can do it while it writes its result."""

    @property
    def shrinks(self) -> bool:
        """Whether its result has fewer bytes than its only input, as after a conversion to a smaller dtype."""
        return self.pointwise and len(self.reads) == 1 and self.writes[0].size < self.reads[0].size


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
        pointwise = len(made) == 1 and not changed and (torch.Tag.pointwise in func.tags or name in CONVERSIONS)
        epilogue = name.startswith(EPILOGUES) and pointwise
        self.operations.append(Operation(name.startswith(BARRIERS), reads, writes, pointwise, epilogue))
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
        count = _count(tensor)
        value = Value(memory, self._versions[memory])
        return View(value, offset, count * tensor.element_size(), storage.nbytes(), count)


def fused_bytes(operations: Sequence[Operation]) -> list[int]:
    """Bytes of every kernel that is left, in order; barriers are not among them."""
    operations = _with_epilogues(operations)
    first = _first_levels(operations)
    ways = (
        _moved(some, levels)
        for levels in (first, _last_levels(operations, first))
        for some in (operations, _repeating(operations, levels))
    )
    return min(ways, key=sum)


def _with_epilogues(operations: Sequence[Operation]) -> list[Operation]:
    """The operations without those that a product does as it writes its result, which nothing else reads."""
    readers = Counter(view.value for one in operations for view in one.reads)
    products = {view.value: view for one in operations if one.barrier for view in one.writes}
    left, same = list[Operation](), dict[Value, View]()
    for one in operations:
        given = one.reads[0] if one.epilogue else None
        made = products.get(given.value) if given and readers[given.value] == 1 else None
        if given and made and made.size == given.size:
            same[one.writes[0].value] = made
        else:
            left.append(one._replace(reads=tuple(_instead(view, same) for view in one.reads)))
    return left


def _instead(view: View, same: dict[Value, View]) -> View:
    """A view of an epilogue's result as one of the product's, which has the same dtype and shape."""
    at = same.get(view.value)
    return view if at is None else view._replace(value=at.value, offset=at.offset + view.offset, whole=at.whole)


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
    """For each operation the level of its first reader, one less if the reader is a barrier; barriers keep theirs.

    What shrinks its input keeps its level, too, so that the smaller result is what waits.
    """
    needed: dict[Value, int] = {}
    levels = list(first)
    for number in reversed(range(len(operations))):
        one = operations[number]
        if not one.barrier and not one.shrinks:
            readers = [needed[view.value] for view in one.writes if view.value in needed]
            levels[number] = min(readers, default=first[number])
        for view in one.reads:
            needed[view.value] = min(needed.get(view.value, levels[number]), levels[number] - one.barrier)
    return levels


class _Repeatable(NamedTuple):
    """A value that pointwise operations of one kernel make of what the kernel reads."""

    level: int
    made: View
    sources: tuple[View, ...]


def _repeating(operations: Sequence[Operation], levels: Sequence[int]) -> list[Operation]:
    """The operations, where the readers of a value read its sources instead if that moves fewer bytes."""
    repeatable = _repeatable(operations, levels)
    reads = {(view, level) for one, level in zip(operations, levels, strict=True) for view in one.reads}
    for view in (view for one in operations if one.barrier for view in one.reads):
        repeatable.pop(view.value, None)  # it has to be in memory
    kept, again = Counter[Value](), Counter[Value]()
    for view, level in reads:
        if found := repeatable.get(view.value):
            kept[view.value] += view.size * (level != found.level)
            again[view.value] += sum(source.part_read_for(found.made, view).size for source in found.sources)
    chosen = {
        value: found
        for value, found in repeatable.items()
        # What is kept is read as a whole where it is made, and each part that others read is written once.
        if again[value] < kept[value] + min(kept[value], found.made.whole) + sum(view.size for view in found.sources)
    }

    def read(view: View) -> tuple[View, ...]:
        if found := chosen.get(view.value):
            return tuple(one for source in found.sources for one in read(source.part_read_for(found.made, view)))
        return (view,)

    changed, needed = list[Operation](), set[Value]()
    for one in reversed(operations):
        if one.pointwise and one.writes[0].value not in needed:
            changed.append(one._replace(reads=()))  # nothing reads its result any more
            continue
        changed.append(one._replace(reads=tuple(part for view in one.reads for part in read(view))))
        needed |= {view.value for view in changed[-1].reads}
    return changed[::-1]


def _repeatable(operations: Sequence[Operation], levels: Sequence[int]) -> dict[Value, _Repeatable]:
    """The values that pointwise operations make of what their kernel reads, not of a reduction in the same kernel."""
    found: dict[Value, _Repeatable] = {}
    made_at: dict[Value, int] = {}
    for one, level in zip(operations, levels, strict=True):
        here = {view.value: found.get(view.value) for view in one.reads if made_at.get(view.value) == level}
        if one.pointwise and all(here.values()):
            sources = list[View]()
            for view in one.reads:
                made = here.get(view.value)
                sources += [source.part_read_for(made.made, view) for source in made.sources] if made else [view]
            found[one.writes[0].value] = _Repeatable(level, one.writes[0], tuple(dict.fromkeys(sources)))
        if not one.barrier:
            made_at |= {view.value: level for view in one.writes}
    return found


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


def _count(tensor: torch.Tensor) -> int:
    """A tensor's elements; all along a dimension of stride 0 count once."""
    return prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
