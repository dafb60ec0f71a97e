"""Keep what stands in the place of a block's `forward`, so that it comes back as the same object.

torch.compile compiles a block again when it meets a new object there, and after some times no more. If the arms of a
run take turns, each arm's objects have to be the same ones every time.

This file imports only the standard library: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeVar

Made = TypeVar("Made")
KEPT = "_kda_kept"
"""Attribute of a block or a module: what was made for it."""
MOST = 32
"""Objects that are kept for one block or module. A caller that counts calls gives a new function every time."""


def kept(owner: Any, key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """What `make` made for this owner the first time; the objects in `key` are compared by identity."""
    known: dict[tuple[int, ...], tuple[tuple[Any, ...], Made]] = vars(owner).setdefault(KEPT, {})
    numbers = tuple(map(id, key))
    found = known.get(numbers)
    # The entry holds its key, so that no other object gets an id of it; a copy of the owner holds copies.
    if found is None or any(map(operator.is_not, found[0], key)):
        while len(known) >= MOST:
            del known[next(iter(known))]
        found = known[numbers] = key, make()
    return found[1]
