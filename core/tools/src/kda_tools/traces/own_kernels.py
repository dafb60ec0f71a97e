"""The kernels of a task's solution, as a trace names them, read from the solution's text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.solution_imports import CUDA, files, parsed

GLOBAL = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(")
"""A kernel in CUDA C++."""


def own_kernels(solution: Path) -> dict[str, str]:
    """Name of each kernel that the solution in this folder can launch -> an expression for its name in a trace.

    A Triton kernel is a `@triton.jit` function that no other one uses; a trace shows its plain name. The CuTe DSL adds
    a prefix and the arguments to the name of a `@cute.kernel`. A CUDA C++ kernel has its parameters after its name.

    Raises:
        UsageError: a file is no Python.
    """
    found: dict[str, str] = {}
    jitted: dict[str, ast.FunctionDef] = {}
    for path in files(solution):
        try:
            tree = parsed(path)
        except (SyntaxError, ValueError) as error:
            raise UsageError(f"{path}: expected Python, got: {error}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                decorators = {ast.unparse(one).partition("(")[0] for one in node.decorator_list}
                if "cute.kernel" in decorators:
                    found[node.name] = rf"^kernel_cutlass_{node.name}_"
                elif decorators & {"triton.jit", "jit"}:
                    jitted[node.name] = node
    helpers = {name for node in jitted.values() for name in _names(node)}
    found |= {name: rf"^{name}$" for name in jitted if name not in helpers}
    for path in sorted(solution.rglob(CUDA)):
        found |= {name: rf"\b{name}[<(]" for name in GLOBAL.findall(path.read_text(encoding="utf-8"))}
    return found


def _names(function: ast.FunctionDef) -> Iterator[str]:
    """All names that the function uses, without its own, which a recursion uses."""
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and node.id != function.name:
            yield node.id
