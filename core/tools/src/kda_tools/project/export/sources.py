"""The files of an export: a solution's modules and what they need of the runtime, with their imports made relative."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.provenance import RUNTIME, library

VENDORED = "_kda"
"""The folder of an export that holds what it needs of the runtime."""
EXACT = """
for _function in ({names},):
    _function.kda_op.set_exact()  # upstream's bits, as was asked of this export
"""
LEFT_OUT = frozenset({"bound.py", "native.py", "native.c"})
"""The C launcher: without it calls take Triton's own, which is what a framework without the runtime has."""


@dataclass(frozen=True)
class Sources:
    """The text of every file of an export, by its path there."""

    files: Mapping[str, str]
    public: tuple[str, ...]
    """The names of the public functions."""


def exact_ops(task: Task) -> tuple[str, ...]:
    """The public functions that can give upstream's bits (`Op.set_exact`).

    Raises:
        UsageError: none of them can.
    """
    solution = task.load("solution")
    held = {name: getattr(getattr(solution, name), "kda_op", None) for name in task.config.ops}
    found = tuple(name for name, op in held.items() if op is not None and op.name == name and op.exact is not None)
    if not found:
        raise UsageError(f"--exact: {task.folder}: no op of it has an exact mode; its docs/dispatch.md says why")
    return found


def collect(task: Task, runtime: bool, exact: bool = False) -> Sources:
    """The solution's modules and tables; beside them the runtime's, unless `runtime` stays a dependency.

    `exact`: the ops that can give upstream's bits.

    Raises:
        UsageError: no op can.
    """
    solution = task.path / "solution"
    files = {}
    for path in sorted(solution.rglob("*")):
        name = path.relative_to(solution)
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in name.parts:
            text = path.read_text(encoding="utf-8")
            depth = len(name.parts) - 1
            files[name.as_posix()] = text if runtime or path.suffix != ".py" else _relative(text, depth, VENDORED)
    if exact:
        files["__init__.py"] += EXACT.format(names=", ".join(exact_ops(task)))
    if not runtime:
        (folder,) = map(Path, find_spec(RUNTIME).submodule_search_locations)  # type: ignore[union-attr,arg-type]
        for part in sorted({"__init__.py", *library(solution)} - LEFT_OUT):
            text = (folder / part).read_text(encoding="utf-8")
            files[f"{VENDORED}/{part}"] = _relative(text, len(Path(part).parts) - 1, "")
    return Sources(files, tuple(task.config.ops))


def _relative(text: str, depth: int, inside: str) -> str:
    """The text of a module that lies `depth` folders deep, with its imports of the runtime made relative.

    `inside` is the folder, beside the outermost module, that the runtime is in; empty for its own modules.
    """
    lines = text.splitlines(keepends=True)
    for node in sorted(ast.walk(ast.parse(text)), key=lambda node: -getattr(node, "lineno", 0)):
        if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").partition(".")[0] != RUNTIME:
            continue
        module = ".".join(filter(None, (inside, (node.module or "").partition(".")[2])))
        start = lines[node.lineno - 1]
        lines[node.lineno - 1] = start.replace(
            f"from {node.module} import", f"from {'.' * (depth + 1)}{module} import", 1
        )
    return "".join(lines)
