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
from types import CodeType, ModuleType
from typing import Any

import torch

from .deferred_kept import kept
from .deferred_slices import ORIGINAL, Refused, refuse  # copies of the files are a package of another name

__all__ = ["ORIGINAL", "defer", "put", "take_back"]

NAME, OWN = "kda_lines", "kda_own"
"""The function made of the lines, and what it returns if they return nothing."""


def put(_module: ModuleType, lines: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., Any]) -> None:
    """Put the op `call` into these blocks, for `lines` to call by its name."""
    for block in blocks:
        defer(block, lines, op, call)


def take_back(_module: ModuleType, lines: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`, for all ops; what another task has put into a block stays."""
    for block in blocks:
        forward = _with(lines, block)
        if forward is not None:
            forward.forget()
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
    forward.ops.add(op)
    forward.names[op] = call


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
        self._before = self.stood.get("forward") or functools.partial(type(block).forward, block)
        self._block = block
        self._signature, self._code = _compiled(type(block).forward, lines)
        self.names: dict[str, Any] = {}
        """What the lines see beside the arguments."""
        self.ops: set[str] = set()
        """Those that were put here."""
        self.forget()
        exec(self._code, self.names)  # text of the task's own file
        self._run = self.names[NAME]

    def forget(self) -> None:
        """Forget all ops: each refuses its calls until it is put here again."""
        self.ops.clear()
        absent = {name: refuse for name in _names_in(self._code) if not hasattr(builtins, name)}
        self.names |= absent | {"torch": torch, "kda_runs": _runs, OWN: self}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if not torch.compiler.is_compiling():
            given = self._signature.bind(self._block, *args, **kwargs)
            given.apply_defaults()
            try:
                result = self._run(**given.arguments)
            except Refused:
                result = self
            if result is not self:
                return result
        return self._before(*args, **kwargs)


@functools.cache
def _compiled(forward: Callable[..., Any], lines: str) -> tuple[inspect.Signature, CodeType]:
    """The signature of `forward`, and the code that defines a function of the lines with the same arguments."""
    signature = inspect.signature(forward)
    text = (
        f"def {NAME}({', '.join(signature.parameters)}):\n{textwrap.indent(lines.strip(), '    ')}\n    return {OWN}\n"
    )
    return signature, compile(text, f"<{NAME} of {forward.__qualname__}>", "exec")


def _names_in(code: CodeType) -> set[str]:
    """The names that the code and all code inside it read, of attributes too."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _runs(_x: torch.Tensor) -> bool:
    return True
