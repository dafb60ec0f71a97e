"""What a solution's files import and define, read from their text: nothing is run.

A solution imports itself, `kda_runtime`, the libraries that kernels are written with, and the standard library.
Anything else would be outside the hashes of a record (`tests/`, another task), or is what judges the solution
(`bench/`, `baseline/`). Import statements are found, and calls that name a module in full; a name that is built at run
time is left to a human reader.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from pathlib import Path
from threading import Lock

LIBRARIES = ("kda_runtime", "torch", "triton", "cutlass", "cuda", "tvm_ffi")
"""Packages that a solution may import, besides itself and the standard library."""
KERNELS = ("triton", "cutlass")
"""Packages that kernels are written with."""
CUDA = "*.cu"
"""Files that hold kernels in CUDA C++."""
HOOK = "launches"
"""Name that a solution's package exports so that its kernels are compiled ahead of time: see `aot`."""
IMPORTERS = ("import_module", "__import__")
"""Functions that import the module that their first argument names."""
_parsing = Lock()


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a Python file; a SyntaxError or ValueError where it is none.

    Files are parsed one at a time: Python 3.11 counts the depth of a tree for all threads together, and a second
    thread that parses while the first one's garbage is collected causes a SystemError.
    """
    return _parsed(path.read_bytes(), str(path))


def _parsed(source: bytes, name: str) -> ast.Module:
    with _parsing:
        return ast.parse(source, name)


def problems(solution: Path, package: str) -> list[str]:
    """What is wrong with the imports of the solution in this folder, whose import name is `package`; one line each.

    A file that is no Python is one line too, and so are kernels without the hook through which they are compiled.
    """
    found, kernels = [], any(solution.rglob(CUDA))
    for path in files(solution):
        try:
            imported = imports(path, solution, package)
        except (SyntaxError, ValueError) as error:
            found.append(f"{path}:{getattr(error, 'lineno', None) or 1}: no Python: {getattr(error, 'msg', error)}")
            continue
        kernels = kernels or any(name.partition(".")[0] in KERNELS for _, name in imported)
        for line, name in imported:
            if not _allowed(name, package):
                allowed = f"its own package, {', '.join(LIBRARIES)} and the standard library"
                found.append(f"{path}:{line}: a solution may import {allowed}, got {name}")
    if kernels and not found and not _binds(solution / "__init__.py", HOOK):
        found.append(f"{solution / '__init__.py'}: {without_hook()}")
    return found


def has_kernels(solution: Path) -> bool:
    """Whether the solution holds CUDA C++, or imports what kernels are written with."""
    imported = (name for path in files(solution) for _, name in imports(path, solution, ""))
    return any(solution.rglob(CUDA)) or any(name.partition(".")[0] in KERNELS for name in imported)


def without_hook() -> str:
    """The problem of a solution that has kernels and exports no hook to compile them."""
    return (
        f"has kernels ({', '.join(KERNELS)} or CUDA C++) and exports no {HOOK}(op, inputs, scalars), through which "
        "kernels are compiled ahead of time; docs/add_a_kernel.md has its smallest form"
    )


def files(folder: Path) -> list[Path]:
    """The Python files of a folder, in order."""
    return sorted(folder.glob("**/*.py"))


def imports(path: Path, folder: Path, package: str) -> tuple[tuple[int, str], ...]:
    """Line and full name of everything that a file of the package in `folder` imports, relative names resolved."""
    return _imports(path.read_bytes(), str(path), (package, *path.relative_to(folder).parent.parts))


@lru_cache(maxsize=512)  # a command asks for the same files' imports many times
def _imports(source: bytes, name: str, inside: tuple[str, ...]) -> tuple[tuple[int, str], ...]:
    above, found = ".".join(inside).split("."), list[tuple[int, str]]()
    for node in ast.walk(_parsed(source, name)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = above[: max(len(above) + 1 - node.level, 0)] if node.level else []
            module = [*start, *(node.module or "").split(".")] if node.module else start
            found += [(node.lineno, ".".join([*module, alias.name])) for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in IMPORTERS:
            values = [getattr(one, "value", 0) for one in node.args[:1]]
            found += [(node.lineno, value) for value in values if isinstance(value, str)]
    return tuple(found)


def _allowed(name: str, package: str) -> bool:
    first = name.partition(".")[0]
    return first in LIBRARIES or first in sys.stdlib_module_names or f"{name}.".startswith(f"{package}.")


def _binds(path: Path, name: str) -> bool:
    """Whether the module defines, imports or assigns the name at its top."""
    for node in parsed(path).body if path.is_file() else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return True
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return True
        if isinstance(node, ast.Assign):
            targets = (part for target in node.targets for part in ast.walk(target))
            if any(isinstance(part, ast.Name) and part.id == name for part in targets):
                return True
    return False
