"""The form of a decoded instruction."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

Array = np.ndarray
Active = Array | slice
"""The threads that execute an instruction: their numbers in ascending order, or a slice for all threads."""
EVERYONE = slice(None)
UNSIGNED: dict[int, np.dtype] = {
    1: np.dtype(bool),
    8: np.dtype("u1"),
    16: np.dtype("u2"),
    32: np.dtype("u4"),
    64: np.dtype("u8"),
}


class Kind(Enum):
    """Where a thread continues after an instruction."""

    PLAIN = "the next instruction follows"
    BRANCH = "another one follows"
    EXIT = "none follows"
    WAIT = "the next one follows when others have come"


@dataclass(frozen=True)
class Step:
    """A decoded instruction."""

    kind: Kind = Kind.PLAIN
    run: Callable[[Active], None] = lambda _: None
    ready: Callable[[], Array] = lambda: np.empty(0, np.int64)
    """For WAIT: which threads go on now, of those that have stopped at this instruction or one like it."""
