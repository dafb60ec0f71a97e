"""Turn conditions into text: negate, split into conjuncts, replace names; and read the checks of a C++ launcher."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator, Mapping

LONGEST = 160
"""Longest condition that is kept, in characters. A longer one is a computation, for which one has to read the file."""
OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
CHECK = re.compile(r"\b(?:RuntimeCheck|CHECK_HOST|static_assert)\s*\(")
FALLBACK = re.compile(r"fallback|eager|native|torch_|_reference|forward_", re.IGNORECASE)


def as_texts(condition: ast.expr, unless: list[ast.expr]) -> list[str]:
    """The conjuncts of a condition as text, without those that constants decide and those that are too long.

    The condition need not hold if one of `unless` holds. If all texts are too long, the first of `unless` are dropped.
    """
    for at in range(len(unless) + 1):
        whole = Decided().visit(any_of([*unless[at:], copy.deepcopy(condition)]))
        texts = [ast.unparse(one).replace("torch.", "") for one in conjuncts(whole)]
        short = [text for text in texts if len(text) <= LONGEST]
        if isinstance(whole, ast.Constant):
            return []
        if short:
            return short
    return []


def any_of(conditions: list[ast.expr]) -> ast.expr:
    """The disjunction of the conditions, without nested disjunctions."""
    flat = []
    for one in conditions:
        flat += one.values if isinstance(one, ast.BoolOp) and isinstance(one.op, ast.Or) else [one]
    return flat[0] if len(flat) == 1 else ast.BoolOp(ast.Or(), flat)


class Written(ast.NodeTransformer):
    """Replaces names by their values."""

    def __init__(self, value: Callable[[str], ast.expr | None]) -> None:
        self.value = value

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: D102  # the name that ast asks for
        value = self.value(node.id)
        return node if value is None or len(ast.unparse(value)) > LONGEST else copy.deepcopy(value)


class Decided(ast.NodeTransformer):
    """Removes parts of a condition that constants decide, such as the defaults of arguments a caller leaves out."""

    def visit_Compare(self, node: ast.Compare) -> ast.expr:  # noqa: D102
        left, right = node.left, node.comparators[0]
        if len(node.ops) == 1 and isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
            equal = left.value == right.value
            if isinstance(node.ops[0], ast.Eq | ast.Is | ast.NotEq | ast.IsNot):
                return ast.Constant(equal is isinstance(node.ops[0], ast.Eq | ast.Is))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:  # noqa: D102
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Constant):
            return ast.Constant(not node.operand.value)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:  # noqa: D102
        self.generic_visit(node)
        decides = isinstance(node.op, ast.Or)
        open_ones = [one for one in node.values if not isinstance(one, ast.Constant)]
        if not open_ones or any(isinstance(one, ast.Constant) and bool(one.value) is decides for one in node.values):
            return ast.Constant(decides if open_ones else not decides)
        unique = list({ast.unparse(one): one for one in open_ones}.values())
        return unique[0] if len(unique) == 1 else ast.BoolOp(node.op, unique)


def parameters(function: ast.FunctionDef, call: ast.Call) -> dict[str, ast.expr]:
    """A function's parameters -> a call's arguments, or the defaults of those that the call leaves out."""
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args)]
    found = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
    found |= {one.arg: value for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if value}
    starred = next((at for at, one in enumerate(call.args) if isinstance(one, ast.Starred)), None)
    if starred is not None or any(word.arg is None for word in call.keywords):
        found = {}  # it is not known which parameters they fill
    found |= dict(zip(names[function.name == "__init__" :], call.args[:starred], strict=False))
    return found | {word.arg: word.value for word in call.keywords if word.arg}


def shape_locals(function: ast.FunctionDef, names: Mapping[str, ast.expr]) -> dict[str, ast.expr]:
    """`names`, and local names of sizes that a function reads once from its parameters, as in `b, s, d = x.shape`.

    Names that the function assigns again are left out: they are no longer what the caller gave.
    """
    stored = [one.id for one in ast.walk(function) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    found = {name: value for name, value in names.items() if name not in stored}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or not re.fullmatch(
            r"\w+\.(shape(\[-?\d+\])?|numel\(\))", ast.unparse(node.value)
        ):
            continue
        whole = Written(found.get).visit(copy.deepcopy(node.value))
        target = node.targets[0]
        several = target.elts if isinstance(target, ast.Tuple) and isinstance(whole, ast.Attribute) else []
        for index, one in enumerate(several):
            if isinstance(one, ast.Name) and stored.count(one.id) == 1:
                found[one.id] = ast.Subscript(whole, ast.Constant(index), ast.Load())
        if isinstance(target, ast.Name) and stored.count(target.id) == 1:
            found[target.id] = whole
    return found


def host_checks(source: str) -> Iterator[str]:
    """The conditions (first arguments) of the checks in a C++ launcher, static ones included."""
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


def conjuncts(node: ast.expr) -> Iterator[ast.expr]:
    """The conditions that together make up a condition; `a or (b and c)` gives `a or b` and `a or c`."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        for value in node.values:
            yield from conjuncts(value)
        return
    if isinstance(node, ast.BoolOp):
        parts = [list(conjuncts(value)) for value in node.values]
        several = [index for index, part in enumerate(parts) if len(part) > 1]
        if len(several) == 1:
            at = several[0]
            for one in parts[at]:
                yield ast.BoolOp(ast.Or(), [*node.values[:at], one, *node.values[at + 1 :]])
            return
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        positive = negated(node.operand)
        if not isinstance(positive, ast.UnaryOp):
            yield from conjuncts(positive)
            return
    yield node


def negated(node: ast.expr) -> ast.expr:
    """The negation of a condition, with `not` pushed inwards as far as possible."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.BoolOp):
        other: ast.boolop = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return ast.BoolOp(other, [negated(value) for value in node.values])
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return ast.Compare(node.left, [OPPOSITE[type(node.ops[0])]()], node.comparators)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        return ast.Compare(node, [ast.Eq()], [ast.Constant(0)])
    return ast.UnaryOp(ast.Not(), node)
