"""Run lines at the head of a block's `forward`, as `kda port` inserts them there.

The lines are Python, `ported` of the site. They see the arguments of `forward` by their names, `torch`, the task's ops,
and `kda_runs(x)`, which here is always true: an op itself refuses what its kernels do not take. What they return is the
block's output. If they return nothing, or an op refuses a call, the function that stood there before runs. So the lines
must not write into their arguments.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from symtable import SymbolTable, symtable
from types import ModuleType
from typing import Any, NamedTuple

import torch

from .deferred_kept import kept
from .deferred_slices import ORIGINAL, Refused, refuse  # copies of the files are a package of another name

__all__ = ["ORIGINAL", "defer", "put", "take_back"]

NAME = "kda_lines"
"""Of the function made of the lines."""
OWN = object()
"""What it returns if they return nothing."""


def put(_module: ModuleType, lines: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., Any]) -> None:
    """Put the op `call` into these blocks, for `lines` to call by its name."""
    for block in blocks:
        defer(block, lines, op, call)


def take_back(_module: ModuleType, lines: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`, for all ops; what another task has put into a block stays."""
    for block in blocks:
        forward = _with(lines, block)
        if forward is not None:
            forward.ops.clear()
        while isinstance(standing := vars(block).get("forward"), Forward) and not standing.ops:
            del block.forward
            vars(block).update(standing.stood)


def defer(block: Any, lines: str, op: str, call: Callable[..., Any]) -> None:
    """Put the op into one block; ops that were added before stay."""
    lines = sys.intern(lines)  # each site of several ops has a string of its own
    forward = _with(lines, block)
    if forward is None:
        before = vars(block).get("forward") or type(block).forward
        forward = block.forward = kept(block, (Forward, lines, before), lambda: Forward(block, lines))
    forward.ops[op] = call


def _with(lines: str, block: Any) -> Forward | None:
    """What has put these lines into the block; other lines may have been put in front of it since."""
    forward: Any = vars(block).get("forward")
    while isinstance(forward, Forward) and forward.lines != lines:
        forward = forward.stood.get("forward")
    return forward if isinstance(forward, Forward) else None


class Forward:
    """What stands in the place of a block's `forward`."""

    def __init__(self, block: Any, lines: str) -> None:
        self.lines = lines
        self.stood = {name: value for name, value in vars(block).items() if name == "forward"}
        self.made = made_of(type(block).forward, lines)
        self.ops: dict[str, Callable[..., Any]] = {}
        """Those that were put here."""
        self._before = self.stood.get("forward") or functools.partial(type(block).forward, block)
        self._block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if self.ops and not torch.compiler.is_compiling():
            given = self.made.signature.bind(self._block, *args, **kwargs)
            given.apply_defaults()
            ops = {name: self.ops.get(name, refuse) for name in self.made.ops}
            try:
                result = self.made.run(**given.arguments, **ops)
            except Refused:
                result = OWN
            if result is not OWN:
                return result
        return self._before(*args, **kwargs)


class Made(NamedTuple):
    """A function of the lines, one for all blocks of a class.

    torch.compile keeps what it compiled with the code of a function. So two functions must not share the code and see
    other globals: the ops are arguments.
    """

    run: Callable[..., Any]
    """Takes all arguments of `forward` by their names, and the ops."""
    signature: inspect.Signature
    """Of `forward`."""
    ops: tuple[str, ...]
    """The ops that the lines name."""


@functools.cache
def made_of(forward: Callable[..., Any], lines: str) -> Made:
    """The function of these lines for a class with this `forward`."""
    signature = inspect.signature(forward)
    known: dict[str, Any] = {"torch": torch, "kda_runs": _runs, "kda_own": OWN}
    body = textwrap.indent(lines.strip(), "    ")

    def text(*arguments: str) -> str:
        return f"def {NAME}({', '.join(arguments)}):\n{body}\n    return kda_own\n"

    asked = _global_names(symtable(text(*signature.parameters), NAME, "exec"))
    ops = sorted(asked - {NAME, *known, *vars(builtins)})
    exec(text(*signature.parameters, *(["*", *ops] if ops else [])), known)  # text of the task's own file
    return Made(known[NAME], signature, tuple(ops))


def _global_names(table: SymbolTable) -> set[str]:
    """The names that are neither arguments nor set by the lines, also in functions inside them."""
    inner = (_global_names(one) for one in table.get_children())
    return {one.get_name() for one in table.get_symbols() if one.is_global()}.union(*inner)


def _runs(_x: torch.Tensor) -> bool:
    return True
