"""What an instruction becomes when it is decoded."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

Array = np.ndarray
Active = Array | slice
"""The threads that execute an instruction: their numbers, ascending, or all of them."""
EVERYONE = slice(None)
UNSIGNED: dict[int, np.dtype] = {
    1: np.dtype(bool),
    8: np.dtype("u1"),
    16: np.dtype("u2"),
    32: np.dtype("u4"),
    64: np.dtype("u8"),
}


class Kind(Enum):
    """What an instruction does to the place of a thread."""

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
    """WAIT: which of the threads that have stopped at it, or at its like, go on now."""
