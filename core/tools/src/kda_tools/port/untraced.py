"""Leave the custom op out of a port's `Op`: tracers see SGLang's own function, since the port's kernels refuse them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kda_judge.contract.errors import UsageError

CLASS = "Op"
SEEN = frozenset({"registered", "registered_into", "_register", "_registered_for", "_impl", "_fake"})
"""Methods that only tracers need."""
SENTENCE = " Tracers (torch.compile, FakeTensorMode) see a custom op with a fake."
SECTION = "    # ---- what tracers see\n\n"


def untraced(text: str) -> str:
    """`_kda/op.py` without those methods, and without the statements that use them.

    Raises:
        UsageError: the text has no such class, or a method is not there: the runtime has changed.
    """
    lines, spans, found = text.splitlines(keepends=True), [], set[str]()
    for method in _methods(text):
        if method.name in SEEN:
            found.add(method.name)
            first = min((one.lineno for one in method.decorator_list), default=method.lineno)
            spans.append((first - 1, _end(lines, int(method.end_lineno or 0))))
        else:
            body = [one for one in method.body if _names(one) & SEEN]
            spans += [(_above(lines, one.lineno - 1), int(one.end_lineno or 0)) for one in body]
    if found != SEEN:
        raise UsageError(
            f"class {CLASS} of kda_runtime/op.py: expected the methods {sorted(SEEN)}, got {sorted(found)}"
        )
    for begin, end in sorted(spans, reverse=True):
        del lines[begin:end]
    return "".join(lines).replace(SENTENCE, "").replace(SECTION, "")


def _methods(text: str) -> Iterator[ast.FunctionDef]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == CLASS:
            yield from (one for one in node.body if isinstance(one, ast.FunctionDef))


def _names(statement: ast.stmt) -> set[str]:
    """All attributes that a statement reads."""
    return {one.attr for one in ast.walk(statement) if isinstance(one, ast.Attribute)}


def _end(lines: list[str], end: int) -> int:
    """The line behind a method's empty one, so that one stays between the methods around it."""
    return end + 1 if end < len(lines) and not lines[end].strip() else end


def _above(lines: list[str], line: int) -> int:
    """The first of the comment lines right above a line."""
    while lines[line - 1].lstrip().startswith("#"):
        line -= 1
    return line
