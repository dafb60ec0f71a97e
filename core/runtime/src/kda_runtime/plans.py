"""Entries (launches as functions of an op's arguments): a bounded memory of them, and those on Triton's launcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kda_runtime.launch import MISS, Chain, Entry

HOT_PLANS = 4
"""Number of entries tried one after the other before the dictionary; a miss costs about 0.2 us."""


def no_entry(*_arguments: object) -> object:
    """Stands in for the last entry while there is none: it takes no call."""
    return MISS


MAX_PLANS = 256
"""Entries remembered per op; when there are more, the oldest is forgotten."""


class Plans:
    """Entries by signature of the tensors and value of the scalars.

    `last` is the entry made or found last, and `hot` holds those before it, to be tried in turn; `recall` looks a
    signature up among all of them and makes its entry the last one.
    """

    def __init__(self, hot: int = HOT_PLANS, total: int = MAX_PLANS) -> None:
        self.last: Entry = no_entry
        self.hot: tuple[Entry, ...] = ()
        self._hot_limit = hot
        self._total = total
        self._all: dict[tuple[object, ...], Entry] = {}

    def add(self, tensors: Sequence[object], scalars: tuple[object, ...], entry: Entry) -> None:
        """Remember `entry` for arguments like these; the oldest goes when there are too many."""
        self._all.pop(key := (signature(tensors), scalars), None)
        self._all[key] = entry
        while len(self._all) > self._total:
            self._all.pop(next(iter(self._all)))
        self._heat(entry)

    def find(self, tensors: Sequence[object], scalars: tuple[object, ...]) -> Entry | None:
        """The entry for arguments like these, if there is one."""
        entry = self._all.get((signature(tensors), scalars))
        if entry is not None:
            self._heat(entry)
        return entry

    def recall(self, tensors: Sequence[object], scalars: tuple[object, ...]) -> Any:
        """Launch through a remembered entry: its result, or MISS when there is none that takes the call."""
        entry = self.find(tensors, scalars)
        return MISS if entry is None else entry(*tensors, *scalars)

    def clear(self) -> None:
        """Forget everything."""
        self._all.clear()
        self.last, self.hot = no_entry, ()

    def _heat(self, entry: Entry) -> None:
        # A new tuple each time: another thread may be walking the old one.
        others = tuple(other for other in (self.last, *self.hot) if other not in (entry, no_entry))
        self.last, self.hot = entry, others[: self._hot_limit - 1]


def signature(arguments: Sequence[object]) -> tuple[object, ...]:
    """All that a plan depends on, as a dictionary key. It distinguishes all calls that an entry distinguishes.

    Tensors: type, dtype, device, sizes, strides, whether gradients are recorded, dispatch keys (negated and conjugated
    views, inference tensors), and for all of them the state of the dispatcher (inference mode, autocast, functorch).
    """
    recording = torch.is_grad_enabled()
    state = (
        torch._C._dispatch_tls_local_include_set().raw_repr(),
        torch._C._dispatch_tls_local_exclude_set().raw_repr(),
    )
    return state + tuple(
        (type(a), a.dtype, a.device, a.shape, a.stride(), a.requires_grad and recording, _keys(a))
        if isinstance(a, torch.Tensor)
        else (type(a), a)
        for a in arguments
    )


def _keys(tensor: torch.Tensor) -> int:
    """A tensor's dispatch keys, as a set of bits."""
    keys: int = torch._C._dispatch_keys(tensor).raw_repr()
    return keys


def plain_entry(chain: Chain, arguments: Sequence[object], scalars: tuple[object, ...]) -> Entry:
    """An entry for calls like this one that launches through Triton's own launcher."""
    count, expected = len(arguments), signature(arguments)

    def entry(*given: Any) -> Any:
        tensors = given[:count]
        if given[count:] != scalars or signature(tensors) != expected:
            return MISS
        return chain.run(*tensors)

    return entry
