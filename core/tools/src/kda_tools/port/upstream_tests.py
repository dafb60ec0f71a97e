"""Finds SGLang's own tests of the functions that a port dispatches, and runs them on a GPU beside our stand-ins."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import shorten

import torch

from kda_judge.arms.sglang_standins import STANDINS
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.task_import import import_path
from kda_judge.evidence.gpu_state import has_gpu
from kda_tools.port.layouts import DIFFUSION, Tree
from kda_tools.port.port_task import Port

CONFTEST = """import importlib
import importlib.util
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import {arm}  # the ported tree, with its gate mounted

calls = {{True: 0, False: 0}}


def counted(attempt):
    def called(*args, **kwargs):
        result = attempt(*args, **kwargs)
        calls[result is not None] += 1
        return result

    return called


for op, module in {modules!r}.items():
    host = importlib.import_module(module)
    if hasattr(host, f"try_{{op}}"):
        setattr(host, f"try_{{op}}", counted(getattr(host, f"try_{{op}}")))


def pytest_sessionfinish(session):
    with (HERE / "{calls}").open("a") as file:
        file.write(f"{{calls[True]}} {{calls[False]}}\\n")


if importlib.util.find_spec("flashinfer") is None:
    from kda_tools.models.standins import rotate_in_place

    for name in ("flashinfer", "flashinfer.rope"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["flashinfer.rope"].apply_rope_with_cos_sin_cache_inplace = rotate_in_place
"""
IMPORT = re.compile(
    r"^[ \t]*(?:from (sglang\.[\w.]+) import (\([^)]*\)|(?:[^\n\\]|\\\n)+)|import (sglang[^\n]*))", re.MULTILINE
)
"""An import of SGLang's modules: the module and the names, or the rest of an `import` statement."""
WORD, MODULE = re.compile(r"\w+"), re.compile(r"\bsglang[\w.]*")
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
COLLECTED = re.compile(r"(\d+) tests? collected")
ABSENT = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
LONGEST = 160
"""Characters of a failed test's error that a record keeps."""
TIMEOUT_S = 900
CALLS = "calls.txt"
"""The file with a line for each test process: how many calls the port did, and how many SGLang's own code did."""
WORKERS = 8
"""Processes for one test file if pytest-xdist is installed; most of the tests' time is compiling."""
OUT_OF_MEMORY = "CUDA out of memory"
SOURCES = [f"sglang/{place}/{name}" for place in ("jit_kernel", "kernels/jit") for name in ("include", "csrc")]
"""Folders with the sources that SGLang's JIT compiles; no import names them."""


class UpstreamTest(Strict):
    """One of SGLang's test files and its result."""

    file: str
    outcome: str
    """pytest's own counts, or why the file was not run."""
    ran: bool
    """Whether at least one test passed and none failed."""
    taken: int = 0
    """Number of calls that the port's kernels did."""
    left: int = 0
    """Number of calls that went on to SGLang's own code."""


def find_tests(port: Port) -> list[Path]:
    """The tree's tests of the port's functions: in the folder of the port's own test and, for diffusion, unit tests.

    A file counts if it imports such a function from SGLang, or names it in a string to replace it.
    """
    tree = port.tree
    folders = [tree.test(port.task).parent]
    if port.task.family == DIFFUSION:
        folders.append(tree.root / "sglang/multimodal_gen/test/unit")
    paths = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    return [one for one in paths if not one.name.startswith("test_kda_") and _names(one) & port.modules.keys()]


def run_tests(port: Port, arm: Path, say: Callable[[str], None] = lambda _: None) -> list[UpstreamTest]:
    """Run these tests against the arm in `arm` (`ported_arm.write_arm`), each file in a process of its own.

    `say` gets a line when a file begins. Without a GPU the tests are only collected, which shows that their imports
    work. The tests need more of the tree than the arm does, so they run with a copy of it: the arm may be timed later.
    """
    root, folder = port.tree.root, arm.parent / "upstream_tests"
    folder.mkdir()
    arm = Path(shutil.copytree(arm, folder / arm.name))
    (folder / "conftest.py").write_text(
        CONFTEST.format(arm=arm.name, modules=port.modules, calls=CALLS), encoding="utf-8"
    )
    for name in SOURCES:
        if (root / name).is_dir():
            shutil.copytree(root / name, arm / "tree" / name, dirs_exist_ok=True)
    done = []
    torch.cuda.empty_cache()  # the grid's oracle ran in this process
    for file in find_tests(port):
        # Tests of models need SGLang's real runtime. They come last, since a real file goes before a stand-in.
        alone = file.parent == port.tree.test(port.task).parent
        for path in _imported(port.tree, file, STANDINS if alone else ()):
            target = arm / "tree" / path
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / path, target)
        say(f"SGLang's {file.name}: {'runs' if has_gpu() else 'is collected'} ...")
        done.append(_run(shutil.copy(file, folder), file.name, folder))
    return done


def _run(path: Path | str, name: str, folder: Path) -> UpstreamTest:
    workers = WORKERS if has_gpu() and find_spec("xdist") is not None else 0
    try:
        done = _pytest(path, folder, workers)
        counts = _counts(done.stdout)
        if workers and "failed" in counts and OUT_OF_MEMORY in done.stdout:
            # The processes share the GPU's memory, which may be too small for several of the large tests at a time.
            done = _pytest(path, folder, 0, "--last-failed")
            alone = _counts(done.stdout)
            counts = alone | {"passed": counts.get("passed", 0) + alone.get("passed", 0)}
    except subprocess.TimeoutExpired:
        return UpstreamTest(file=name, outcome=f"not finished after {TIMEOUT_S} s", ran=False)
    if not has_gpu() and not done.returncode and (collected := COLLECTED.search(done.stdout)):
        return UpstreamTest(file=name, outcome=f"not run: its {collected[1]} tests need a GPU", ran=False)
    errors = [line[1:].strip() for line in (done.stdout + done.stderr).splitlines() if line.startswith("E  ")]
    absent = sorted({found[1] for one in errors if (found := ABSENT.match(one))})
    if absent and "passed" not in counts:
        return UpstreamTest(file=name, outcome=f"not run: it needs {', '.join(absent)}", ran=False)
    if not counts:
        why = (done.stdout + done.stderr).strip().splitlines()
        return UpstreamTest(file=name, outcome=f"not run: {why[-1] if why else done.returncode}", ran=False)
    outcome = ", ".join(f"{number} {word}" for word, number in counts.items())
    if done.returncode:
        outcome += f": {shorten(errors[0], LONGEST)}" if errors else ""
    taken, left = _calls(folder / CALLS)
    outcome += f"; {taken} of {taken + left} calls were the port's"
    ran = done.returncode == 0 and counts.get("passed", 0) > 0
    return UpstreamTest(file=name, outcome=outcome, ran=ran, taken=taken, left=left)


def _pytest(path: Path | str, folder: Path, workers: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a test file in so many processes beside pytest's own, or in that one."""
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", str(folder), "-c", os.devnull, str(path), *more]
    command += [] if has_gpu() else ["--collect-only"]
    command += ["-n", str(workers)] if workers else []
    env = {**os.environ, "PYTHONPATH": import_path(), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def _counts(output: str) -> dict[str, int]:
    """How many tests passed, failed and so on, from the end of pytest's output."""
    return {word.rstrip("s"): int(number) for number, word in COUNTS.findall(output[-2000:])}


def _calls(path: Path) -> tuple[int, int]:
    """Calls done by the port and by SGLang's code, summed over all processes; then removes the file."""
    lines = path.read_text().splitlines() if path.is_file() else []
    path.unlink(missing_ok=True)
    pairs = [tuple(map(int, line.split())) for line in lines]
    return sum(taken for taken, _ in pairs), sum(left for _, left in pairs)


def _imported(tree: Tree, file: Path, replaced: Collection[str]) -> set[str]:
    """The files of the tree that this file imports, directly or not, except the `replaced` modules."""
    found: set[str] = set()
    todo = [file]
    while todo:
        for module in _modules(todo.pop()):
            if module in replaced:
                continue
            path = tree.module_path(module)
            if path not in found and (tree.root / path).is_file():
                found.add(path)
                todo.append(tree.root / path)
    return found


def _names(path: Path) -> set[str]:
    """The names that a file imports from SGLang, and all its strings."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def _modules(path: Path) -> Iterator[str]:
    """Modules of SGLang that a file imports, including imported names that may be modules.

    Found in its text, since parsing thousands of files is slow. An import inside a docstring counts as well, so a file
    that nothing needs may be among them.
    """
    for module, names, plain in IMPORT.findall(path.read_text(encoding="utf-8")):
        if module:
            yield module
            yield from (f"{module}.{name}" for name in WORD.findall(names))
        else:
            yield from MODULE.findall(plain)
