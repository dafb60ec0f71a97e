"""Cut from `op.py` what a port does not need.

No port has the switch to upstream's bits. An op in front of a function of SGLang also needs no plain PyTorch path and
no custom op: SGLang's function does the calls that the op does not take, and tracers see that function. An op for which
SGLang has no function keeps both, in a class of its own.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

from kda_judge.contract.errors import UsageError

CLASS = "Op"
TRACED = frozenset({"run", "registered", "registered_into", "_register", "_registered_for", "_impl", "_fake"})
"""Methods that only ops with a plain path need."""
SWITCH = frozenset({"plain", "exact", "own", "set_exact"})
"""Fields and the method for two plans and two plain paths, one of which a port has chosen."""
EVERY = "_every.add("
"""Start of the statement that keeps a list of all ops, which are asked to forget their plans while tables are tuned."""
WORDS = {
    " five functions": " four functions",
    "    plain(call)           the same maths in PyTorch, for all other calls; "
    "it also writes what the op writes in place\n": "",
    "A solution may have a second plan and plain path, which round as upstream does and give upstream's bits;\n"
    "`Op.set_exact` chooses between the two.\n\n": "",
    " Tracers (torch.compile, FakeTensorMode) see a custom op with a fake.": "",
    "plan=plan, plain=plain, ": "plan=plan, ",
    "`run` without the plain path: returns MISS": "Run the kernels: returns MISS",
    ", for `hooks`; calls of it are unchanged": "; calls of it are unchanged",
    "    # ---- the setting\n\n": "",
    "    # ---- what tracers see\n\n": "",
    " None: such a call takes the plain path. A program that has another function for such calls sets it. Compiled\n"
    "    graphs keep the plain path.": " SGLang's own function does such a call.",
}
"""What `op.py` says of them, and what it says in a port."""
OP_WITH_PLAIN = '''"""`Op` where SGLang has no such function: with a plain path, and a custom op that tracers see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from . import op
from .launch import MISS, is_tracing
from .op import INTO, TYPES, C


@dataclass(frozen=True, eq=False, kw_only=True)
class Op(op.Op[C]):
    """An op whose calls nothing else can do."""

    plain: Callable[[C], Any]
    """The same maths in PyTorch, for calls that the kernels do not take; it also writes what the op writes in place."""

    def __post_init__(self) -> None:
        super().__post_init__()
{registered}
    def _cold(self, args: tuple[Any, ...]) -> Any:
        if is_dynamo_compiling() or is_tracing(*(arg for arg in args if isinstance(arg, torch.Tensor))):
            return self._registered_for(args)(*args)
        return self.run(self.arguments(*args))

{methods}'''


def op_modules(text: str) -> tuple[str, str]:
    """`op.py` of the runtime as two modules of a port: ops without a plain path, and those with one.

    Raises:
        UsageError: the text has no such class, or lacks a part or a sentence: the runtime has changed.
    """
    lines, spans = text.splitlines(keepends=True), []
    found, methods, registered = set[str](), "", ""
    body = next((one.body for one in ast.parse(text).body if isinstance(one, ast.ClassDef) and one.name == CLASS), [])
    for at, node in enumerate(body):
        name = _name(node)
        end = int(node.end_lineno or 0)
        if name in TRACED | SWITCH:
            found.add(name)
            if isinstance(node, ast.AnnAssign) and isinstance(body[at + 1], ast.Expr):
                end = int(body[at + 1].end_lineno or 0)  # its docstring
            begin = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) - 1
            methods += "".join(lines[begin:end]) + "\n" if name in TRACED else ""
            spans.append((begin, end + (not isinstance(node, ast.AnnAssign))))
        elif isinstance(node, ast.FunctionDef):
            for one in node.body:
                if _asked(one) & (TRACED | SWITCH) or ast.unparse(one).startswith(EVERY):
                    spans.append((_above(lines, one.lineno - 1), int(one.end_lineno or 0)))
                    if name == "__post_init__" and _asked(one) & TRACED:
                        registered += "".join(lines[slice(*spans[-1])])
    if absent := [*sorted((TRACED | SWITCH) - found), *(words for words in (EVERY, *WORDS) if words not in text)]:
        raise UsageError(f"kda_runtime/op.py: expected a class {CLASS} with what a port leaves out, lacks: {absent[0]}")
    for begin, end in sorted(spans, reverse=True):
        del lines[begin:end]
    plain = "".join(lines)
    for words, instead in WORDS.items():
        plain = plain.replace(words, instead)
    return plain, OP_WITH_PLAIN.format(registered=registered, methods=methods.rstrip("\n") + "\n")


def _name(node: ast.stmt) -> str:
    """The name of a method or a field."""
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return node.name if isinstance(node, ast.FunctionDef) else ""


def _asked(statement: ast.stmt) -> set[str]:
    """The attributes of the op itself that a statement reads."""
    found = (one for one in ast.walk(statement) if isinstance(one, ast.Attribute))
    return {one.attr for one in found if ast.unparse(one.value) == "self"}


def _above(lines: list[str], line: int) -> int:
    """The first of the comment lines right above a line."""
    while lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line


def lean_module(text: str, plain: bool, exact: bool) -> str:
    """A module of a solution whose ops have one plan (if `exact` that with upstream's bits), and with `plain` its path.

    Raises:
        UsageError: an op gives its exact plan apart from its own.
    """
    edits: list[tuple[int, int, str]] = []
    for call in _ops(ast.parse(text)):
        given = {one.arg: one for one in call.keywords}
        chosen = given["exact"].value if exact and "exact" in given else None
        for name, value in zip(("plan", "plain"), chosen.elts if isinstance(chosen, ast.Tuple) else (), strict=False):
            if name not in given:
                raise UsageError(f"{ast.unparse(call)}: expected {name} beside exact")
            if name == "plan" or plain:
                edits.append((*_span(text, given[name].value), ast.unparse(value)))
        places = [*(_span(text, one) for one in call.args), *(_span(text, one) for one in call.keywords)]
        for name in ("exact",) if plain else ("exact", "plain"):
            if name in given:
                begin, end = _span(text, given[name])
                edits.append((max(place[1] for place in places if place[1] < begin), end, ""))
    for begin, end, instead in sorted(edits, reverse=True):
        text = text[:begin] + instead + text[end:]
    return text


def _ops(tree: ast.Module) -> Iterator[ast.Call]:
    """The calls that make an `Op`, or a partial of it."""
    makers = {CLASS}
    for node in tree.body:
        for call in (one for one in ast.walk(node) if isinstance(one, ast.Call)):
            if _makes(call, makers):
                yield call
                if isinstance(node, ast.Assign):
                    makers |= {ast.unparse(target) for target in node.targets}


def _makes(call: ast.Call, makers: Collection[str]) -> bool:
    """Whether it is a call of one of these names, or a partial of one."""
    made = call.args[0] if ast.unparse(call.func) == "partial" and call.args else call.func
    return ast.unparse(made).partition("[")[0] in makers


def _span(text: str, node: ast.expr | ast.keyword) -> tuple[int, int]:
    """Where a node begins and ends in the text, which is ASCII within the lines of calls."""
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[: number - 1])) for number in (node.lineno, int(node.end_lineno or 0))]
    return starts[0] + node.col_offset, starts[1] + int(node.end_col_offset or 0)
