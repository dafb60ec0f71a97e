"""Run lines at the head of a block's `forward`, or of a function of a module, as `kda port` inserts them there.

The lines are Python, `ported` of the site. They see by their names the arguments, `torch`, the task's ops, what else
the module has, and `kda_runs(x)`, which here is always true: an op itself refuses what its kernels do not take. What
they return is the result. If they return nothing, or an op refuses a call, lines that were put there before run, or
else the block's own `forward`. So the lines must not write into their arguments.

The class's `forward` asks a block for its lines. An attribute `forward` of the block itself would say that something
has replaced it, and then Wan's model computes more.

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

NAME = "kda_lines"
"""Name of the function that is made of the lines."""
OWN = object()
"""What that function returns if the lines return nothing."""
BLOCK = "_kda_block"
"""Attribute of a module's function: the block that stands for it."""
LINES = "_kda_lines"
"""Attribute of a block: its `Lines` that were put there last."""
OWN_FORWARD = "_kda_own"
"""Attribute of a `forward` that asks for lines: the class's own."""


class Refused(Exception):
    """No op takes this call."""


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    """An op that takes no call."""
    raise Refused


ORIGINAL = refuse
"""What a call runs that the op does not take: the model's own statements."""


def put(_module: ModuleType, lines: str, blocks: Iterable[torch.nn.Module], op: str, call: Callable[..., Any]) -> None:
    """Put the op `call` into these blocks, for `lines` to call by its name."""
    for block in blocks:
        defer(block, lines, op, call)


def take_back(_module: ModuleType, lines: str, blocks: Iterable[torch.nn.Module]) -> None:
    """Undo `put`, for all ops; what another task has put into a block stays."""
    for block in blocks:
        found = _with(lines, block)
        if found is not None:
            found.ops.clear()
        while (last := lines_of(block)) is not None and not last.ops:
            if last.before is None:
                del vars(block)[LINES]
            else:
                vars(block)[LINES] = last.before


def defer(block: Any, lines: str, op: str, call: Callable[..., Any]) -> None:
    """Put the op into one block; ops that were added before stay."""
    lines = sys.intern(lines)  # each site of several ops has a string of its own
    found = _with(lines, block)
    if found is None:
        _ask(type(block))
        found = vars(block)[LINES] = Lines(block, lines)
    found.ops[op] = call


def lines_of(block: Any) -> Lines | None:
    """What was put into the block last."""
    found: Lines | None = vars(block).get(LINES)
    return found


def _ask(kind: Any) -> None:
    """Make the class's `forward` ask each block for its lines; once for a class."""
    if hasattr(vars(kind).get("forward"), OWN_FORWARD):
        return
    own = own_forward(kind)

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        lines = None if torch.compiler.is_compiling() else lines_of(self)
        return own(self, *args, **kwargs) if lines is None else lines(*args, **kwargs)

    setattr(forward, OWN_FORWARD, own)
    kind.forward = forward


def own_forward(kind: Any) -> Callable[..., Any]:
    """The class's `forward` as it was written."""
    return getattr(kind.forward, OWN_FORWARD, kind.forward)  # type: ignore[no-any-return]


def block_of(module: ModuleType, name: str) -> Any:
    """A block that stands for a function of the module: who calls the function calls the block's `forward`.

    Other modules of the package may hold the function by its name.
    """
    own: Any = getattr(module, name)
    if hasattr(own, BLOCK):
        return getattr(own, BLOCK)

    @functools.wraps(own)
    def forward(_block: Any, *args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    signature = inspect.signature(own)
    me = inspect.Parameter(BLOCK, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    vars(forward)["__signature__"] = signature.replace(parameters=[me, *signature.parameters.values()])
    block = type(name, (), {"forward": forward})()

    @functools.wraps(own)
    def called(*args: Any, **kwargs: Any) -> Any:
        return block.forward(*args, **kwargs)

    setattr(called, BLOCK, block)
    package = module.__name__.partition(".")[0]
    for loaded in [module, *(other for key, other in sys.modules.items() if key.partition(".")[0] == package)]:
        if vars(loaded).get(name) is own:
            setattr(loaded, name, called)
    return block


def _with(lines: str, block: Any) -> Lines | None:
    """These lines in the block; other lines may have been put in front of them since."""
    found = lines_of(block)
    while found is not None and found.lines != lines:
        found = found.before
    return found


class Lines:
    """What runs in the place of a block's `forward`."""

    def __init__(self, block: Any, lines: str) -> None:
        self.lines = lines
        self.before = lines_of(block)
        """What runs if these lines return nothing; None: the block's own `forward`."""
        self._own = own_forward(type(block))
        self.made = made_of(self._own, lines)
        self._written: Any = inspect.unwrap(self._own)
        """It knows its module. A copy of a block copies what is here, but no function."""
        self.ops: dict[str, Callable[..., Any]] = {}
        """Those that were put here."""
        self._block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        if self.ops:
            given = self.made.signature.bind(self._block, *args, **kwargs)
            given.apply_defaults()
            module = self._written.__globals__
            names = {name: self.ops.get(name) or module.get(name, refuse) for name in self.made.names}
            try:
                result = self.made.run(**given.arguments, **names)
            except Refused:
                result = OWN
            if result is not OWN:
                return result
        if self.before is not None:
            return self.before(*args, **kwargs)
        return self._own(self._block, *args, **kwargs)


class Made(NamedTuple):
    """A function of the lines, one for all blocks of a class.

    torch.compile keeps what it compiled with the code of a function. So two functions must not share the code and see
    other globals: the ops are arguments.
    """

    run: Callable[..., Any]
    """Takes all arguments of `forward`, and `names`, by their names."""
    signature: inspect.Signature
    """Of `forward`."""
    names: tuple[str, ...]
    """The ops that the lines name, and what they name of the module."""


@functools.cache
def made_of(forward: Callable[..., Any], lines: str) -> Made:
    """The function of these lines for a class with this `forward`."""
    signature = inspect.signature(forward)
    known: dict[str, Any] = {"torch": torch, "kda_runs": _runs, "kda_own": OWN}
    body = textwrap.indent(lines.strip(), "    ")

    def text(*arguments: str) -> str:
        return f"def {NAME}({', '.join(arguments)}):\n{body}\n    return kda_own\n"

    asked = _global_names(symtable(text(*signature.parameters), NAME, "exec"))
    names = sorted(asked - {NAME, *known, *vars(builtins)})
    exec(text(*signature.parameters, *(["*", *names] if names else [])), known)  # text of the task's own file
    return Made(known[NAME], signature, tuple(names))


def _global_names(table: SymbolTable) -> set[str]:
    """The names that are neither arguments nor set by the lines, also in functions inside them."""
    inner = (_global_names(one) for one in table.get_children())
    return {one.get_name() for one in table.get_symbols() if one.is_global()}.union(*inner)


def _runs(_x: torch.Tensor) -> bool:
    return True
