"""What a solution may import, found without running it."""

import ast
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.tools.tests.every_task import every_task
from kda_judge.contract import solution_imports
from kda_judge.contract.solution_imports import problems
from kda_tools.project.validate import problems as all_problems

PACKAGE = "family.k01_op.solution"


@pytest.fixture
def solution(tmp_path: Path) -> Path:
    (tmp_path / "inner").mkdir()
    (tmp_path / "__init__.py").write_text('"""Public."""\n\nfrom .kernel import launches\n')
    (tmp_path / "kernel.py").write_text(
        "from __future__ import annotations\nimport math, torch.nn\nimport triton.language as tl\n"
        "import cuda.bindings.driver\nfrom cutlass import cute\nfrom kda_runtime.launch import Launch\n"
        f"from . import inner\nfrom .inner.more import x\nfrom {PACKAGE}.inner import y\nimport {PACKAGE}\n"
    )
    (tmp_path / "inner" / "__init__.py").write_text("from .. import kernel\nfrom ..kernel import launches\n")
    return tmp_path


@every_task
def test_every_solution_keeps_to_itself(task):
    assert problems(task.path / "solution", f"{task.folder}.solution") == []
    assert solution_imports.has_kernels(task.path / "solution")


def test_what_is_allowed(solution: Path) -> None:
    assert problems(solution, PACKAGE) == []


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from ..bench import reference", "family.k01_op.bench.reference"),
        ("from .. import tests", "family.k01_op.tests"),
        ("from ...k02_other.solution import f", "family.k02_other.solution.f"),
        ("import family.k01_op.tests.cases", "family.k01_op.tests.cases"),
        ("from family.k01_op import baseline", "family.k01_op.baseline"),
        ("import family.k01_op.solution_too", "family.k01_op.solution_too"),
        ("import sglang.jit_kernel", "sglang.jit_kernel"),
        ("import numpy as np", "numpy"),
        ("def late():\n    import numpy", "numpy"),
        ("def late():\n    importlib.import_module('kda_judge.judge.verdict')", "kda_judge.judge.verdict"),
        ("judge = __import__('kda_judge')", "kda_judge"),
    ],
)
def test_what_is_not(solution: Path, statement: str, name: str) -> None:
    path = solution / "kernel.py"
    path.write_text(f"import torch\n{statement}\n")
    line = 1 + len(statement.splitlines())
    allowed = "its own package, kda_runtime, torch, triton, cutlass, cuda, tvm_ffi and the standard library"
    assert problems(solution, PACKAGE) == [f"{path}:{line}: a solution may import {allowed}, got {name}"]


def test_a_file_among_bytecode_is_no_exception(solution: Path) -> None:
    path = solution / "__pycache__" / "hidden.py"
    path.parent.mkdir()
    path.write_text("import kda_judge\n")
    assert problems(solution, PACKAGE)[0].startswith(f"{path}:1: ")


def test_relative_names_count_from_the_files_own_folder(solution: Path) -> None:
    path = solution / "inner" / "more.py"
    path.write_text("from ..kernel import tl\nfrom ...tests import cases\n")
    (found,) = problems(solution, PACKAGE)
    assert re.match(rf"{path}:2: .* got family\.k01_op\.tests\.cases$", found)


def test_a_file_that_is_no_python_is_named(solution: Path) -> None:
    path = solution / "kernel.py"
    path.write_text("x = 1\ndef (:\n")
    assert problems(solution, PACKAGE) == [f"{path}:2: no Python: invalid syntax"]


@pytest.mark.parametrize(
    "init",
    ["def launches(op, inputs, scalars):\n    return []\n", "from .kernel import of as launches\n", "launches = of\n"],
)
def test_the_hook_in_every_form(solution: Path, init: str) -> None:
    (solution / "__init__.py").write_text(init)
    assert problems(solution, PACKAGE) == []


def test_kernels_without_the_hook(solution: Path) -> None:
    init = solution / "__init__.py"
    init.write_text("from . import kernel\n")
    assert problems(solution, PACKAGE) == [f"{init}: {solution_imports.without_hook()}"]
    (solution / "kernel.py").write_text("import torch\n")
    assert problems(solution, PACKAGE) == [], "plain PyTorch has nothing to compile"
    assert not solution_imports.has_kernels(solution)


def test_validate_says_so(toy) -> None:
    init = toy.path / "solution" / "__init__.py"
    text = init.read_text()
    assert not [line for line in all_problems(toy) if str(init) in line]
    init.write_text(text + "import numpy\n")
    place = f"{init}:{len(text.splitlines()) + 1}: "
    assert [line for line in all_problems(toy) if line.startswith(f"{place}a solution may import")]


def test_a_syntax_error_leaves_the_other_checks(toy) -> None:
    init, card = toy.path / "solution" / "__init__.py", toy.path / "prompt.md"
    init.write_text("def (\n")
    card.unlink()
    found = all_problems(toy)
    assert f"{card}: missing" in found
    assert [line for line in found if line.startswith(f"{init}:1: no Python: ")]


def test_threads_parse_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else Python 3.11 raises `SystemError: AST constructor recursion depth mismatch`, seen once in many runs."""
    path, inside, most = Path(solution_imports.__file__), [], []

    def slow(source: bytes, name: str) -> ast.Module:
        inside.append(name)
        most.append(len(inside))
        time.sleep(0.005)
        tree = ast.parse(source, name)
        inside.pop()
        return tree

    monkeypatch.setattr(solution_imports, "ast", SimpleNamespace(parse=slow))  # pytest parses, too
    with ThreadPoolExecutor(4) as pool:
        trees = list(pool.map(solution_imports.parsed, [path] * 12))
    assert most == [1] * len(trees)
