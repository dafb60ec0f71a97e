"""Collect the files of an export: a solution's modules and what they need of the runtime, with relative imports."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.provenance import RUNTIME, library
from kda_runtime.tuned_table import FILE as TOML
from kda_runtime.tuned_table import Line, read
from kda_tools.project.export import plain_table
from kda_tools.project.export.prune import prune

VENDORED = "_kda"
"""The folder of an export that holds what it needs of the runtime."""
EXACT = """
for _function in ({names},):
    _function.kda_op.set_exact()  # upstream's bits, as was asked of this export
"""
JSON = "tuned.json"
UNMEASURED = ("not measured", "an unrecorded sweep")
"""Beginnings of a line's reason which say that no recorded measurement chose the line."""
DOCSTRING = re.compile(r'\A""".*?"""', re.DOTALL)
"""Docstring of the public functions' module. It is replaced, because it makes sense in this repository only."""
LEFT_OUT = frozenset({"bound.py", "native.py", "native.c"})
"""Files of the C launcher. Without them calls use Triton's own launcher, as in a framework without the runtime."""


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


def switched_ops(task: Task, ops: Sequence[str]) -> list[str]:
    """Those of `ops` whose exact mode runs another plan or plain path than they have anyway."""
    solution = task.load("solution")
    held = {name: getattr(solution, name).kda_op for name in exact_ops(task) if name in ops}
    return [name for name, op in held.items() if op.exact != op.own]


def exported_files(task: Task, exact: bool = False) -> dict[str, str]:
    """Path -> text, without kda_runtime: only the parts of it that the solution uses, and tables without TOML."""
    files = with_plain_tables(task, collect(task, runtime=False, exact=exact))
    own = [name for name in files if name.endswith(".py") and not name.startswith(f"{VENDORED}/")]
    return prune(files, own)


def with_docstring(task: Task, text: str, about: str) -> str:
    """The public functions' module with a docstring for a reader without this repository."""
    return DOCSTRING.sub(lambda _: f'"""{task.config.task.title}.\n\n{about}\n"""', text, count=1)


def with_plain_tables(task: Task, files: Mapping[str, str]) -> dict[str, str]:
    """`files` with a `tuned.json` and its reader for each `tuned.toml`: not every Python has a TOML reader."""
    found = {}
    for name, text in files.items():
        if name.rpartition("/")[2] == TOML:
            found[name.removesuffix(TOML) + JSON] = _plain_table(read(task.path / "solution" / name))
        else:
            found[name] = text
    if (reader := f"{VENDORED}/tuned_table.py") in found:
        found[reader] = Path(plain_table.__file__).read_text(encoding="utf-8")
    return found


def _plain_table(tables: Mapping[str, tuple[Line, ...]]) -> str:
    return _as_json(
        {
            name: [
                {"capability": one.capability, "at_most": one.at_most, "config": one.config, "measured": _measured(one)}
                for one in lines
            ]
            for name, lines in tables.items()
        }
    )


def without_unused_tables(files: Mapping[str, str]) -> dict[str, str]:
    """`files`, which are pruned, without the tables whose names no Python file has as a string."""
    code = "".join(text for name, text in files.items() if name.endswith(".py"))
    found = dict(files)
    for place in (name for name in files if name.rpartition("/")[2] == JSON):
        tables = json.loads(files[place])
        found[place] = _as_json({name: rows for name, rows in tables.items() if f'"{name}"' in code})
    return found


def _as_json(tables: Mapping[str, Sequence[object]]) -> str:
    """Tables as JSON, one text line for each line of a table."""
    texts = [
        f"{json.dumps(name)}: [\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"
        for name, rows in tables.items()
    ]
    return "{\n" + ",\n".join(texts) + "\n}\n"


def _measured(line: Line) -> str:
    return line.reason if line.reason.startswith(UNMEASURED) else f"{line.device}, {line.date}"


def collect(task: Task, runtime: bool, exact: bool = False) -> dict[str, str]:
    """Path -> text of the solution's modules and tables, and of the runtime's unless `runtime` stays a dependency.

    `exact`: with upstream's bits for the ops that can give them.

    Raises:
        UsageError: no op can give upstream's bits.
    """
    solution = task.path / "solution"
    files = {}
    for path in sorted(solution.rglob("*")):
        name = path.relative_to(solution)
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in name.parts:
            text = path.read_text(encoding="utf-8")
            depth = len(name.parts) - 1
            files[name.as_posix()] = text if runtime or path.suffix != ".py" else relative(text, depth, VENDORED)
    if exact and (names := switched_ops(task, exact_ops(task))):
        files["__init__.py"] += EXACT.format(names=", ".join(names))
    if not runtime:
        needed = {"__init__.py", *library(solution)}
        files |= {f"{VENDORED}/{part}": text for part, text in runtime_files().items() if part in needed}
    return files


def runtime_files() -> dict[str, str]:
    """Path -> text of the runtime's modules, with relative imports, without the C launcher."""
    (folder,) = map(Path, find_spec(RUNTIME).submodule_search_locations)  # type: ignore[union-attr,arg-type]
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.py"))}
    parts = {part: path.read_text(encoding="utf-8") for part, path in files.items() if part not in LEFT_OUT}
    return {part: relative(text, part.count("/"), "") for part, text in parts.items()}


def relative(text: str, depth: int, inside: str) -> str:
    """The text of a module `depth` folders deep, with its imports of the runtime made relative.

    `inside` is the folder with the runtime, from the one that `depth` counts from; empty for the runtime's own modules.
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
