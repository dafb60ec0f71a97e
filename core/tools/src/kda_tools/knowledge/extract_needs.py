"""The conditions that upstream's Python asks of a call: what raises, returns False or returns None where it fails."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from typing import cast

LONGEST = 160
"""Of a condition, in characters: what is longer is a computation, and its file has to be read."""
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
CHECK = re.compile(r"\b(?:RuntimeCheck|CHECK_HOST|static_assert)\s*\(")
FALLBACK = re.compile(r"fallback|eager|native|torch_|_reference|forward_", re.IGNORECASE)


def needs(function: ast.FunctionDef, predicate: bool, constants: Mapping[str, ast.expr]) -> Iterator[str]:
    """What holds where the function neither raises nor refuses. For a predicate the result's conjuncts count, too.

    `constants` are the module's, which are written out.
    """
    for text in _conditions(function, predicate):
        tree = Written(constants).visit(ast.parse(text, mode="eval"))
        if len(written := ast.unparse(tree)) <= LONGEST:
            yield written.replace("torch.", "")


def _conditions(function: ast.FunctionDef, predicate: bool) -> Iterator[str]:
    for node in ast.walk(function):
        if isinstance(node, ast.If) and _refuses(node.body, predicate):
            yield from _texts(_negated(node.test))
        elif isinstance(node, ast.Assert):
            yield from _texts(node.test)
        elif predicate and isinstance(node, ast.Return) and isinstance(node.value, ast.BoolOp | ast.Compare):
            yield from _texts(node.value)


def fallbacks(function: ast.FunctionDef) -> Iterator[str]:
    """Where the function sends a call that it does not take."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            name = ast.unparse(node.value.func)
            if FALLBACK.search(name.rpartition(".")[2]):
                yield name
        elif isinstance(node, ast.If) and len(node.body) == 1 and _returns(node.body[0], None):
            yield "returns None: the caller takes its own path"


class Written(ast.NodeTransformer):
    """Puts constants in the place of their names."""

    def __init__(self, constants: Mapping[str, ast.expr]) -> None:
        self.constants = constants

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: D102  # the name that ast asks for
        value = self.constants.get(node.id)
        if value is None or len(ast.unparse(value)) > LONGEST:
            return node
        others = {name: one for name, one in self.constants.items() if name != node.id}
        return cast(ast.expr, Written(others).visit(copy.deepcopy(value)))


def host_checks(source: str) -> Iterator[str]:
    """First arguments of the checks in a C++ launcher, static ones included."""
    for match in CHECK.finditer(source):
        depth, end, quoted = 1, match.end(), False
        while end < len(source) and depth:
            character = source[end]
            if character == '"' and source[end - 1] != "\\":
                quoted = not quoted
            elif not quoted:
                if character == "," and depth == 1:
                    break
                depth += (character in "([{") - (character in ")]}")
            end += 1
        condition = " ".join(source[match.end() : end - (depth == 0)].split())
        if condition.count("<") - condition.count(">") != 1 and 5 < len(condition) <= LONGEST:
            yield condition


def _refuses(body: list[ast.stmt], predicate: bool) -> bool:
    last = body[-1]
    return isinstance(last, ast.Raise) or _returns(last, None) or (predicate and _returns(last, False))


def _returns(node: ast.stmt, value: object) -> bool:
    if not isinstance(node, ast.Return):
        return False
    if node.value is None:
        return value is None
    return isinstance(node.value, ast.Constant) and node.value.value is value


def _texts(node: ast.expr) -> Iterator[str]:
    """The conjuncts of a condition, each as text."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from _texts(value)
        return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        positive = _negated(node.operand)
        if not isinstance(positive, ast.UnaryOp):
            yield from _texts(positive)
            return
    yield ast.unparse(node)


def _negated(node: ast.expr) -> ast.expr:
    """The opposite, with the `not` pushed inwards as far as it goes."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BoolOp):
        other: ast.boolop = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return ast.BoolOp(other, [_negated(value) for value in node.values])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators)
    return ast.UnaryOp(ast.Not(), node)
