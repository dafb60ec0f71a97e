"""The tasks of this checkout, for tests that every one of them has to pass: a new task gets them for nothing."""

import ast
import shutil
from pathlib import Path

import pytest

from kda_judge.contract.tasks import Task
from kda_tools.project.new_task import IGNORED

ROOT = Path(__file__).resolve().parents[3]
TASKS = [Task(config.parent) for config in sorted(ROOT.glob("*/*/config.toml"))]
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.op)


def copy_of_one_task(folder, *pages):
    """Make the folder a checkout with `qknorm_rope` and these pages, for tests that make other tasks from it."""
    packages = [f"core/{one}/pyproject.toml" for one in ("runtime", "judge", "tools")]
    for name in ("noxfile.py", "pyproject.toml", "README.md", "diffusion/README.md", *pages, *packages):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for one in ("runtime", "judge", "tools"):  # ruff sorts imports by what it finds there
        (folder / "core" / one / "src").symlink_to(ROOT / "core" / one / "src")
    copied = Path("diffusion") / "k03_qknorm_rope"
    shutil.copytree(ROOT / copied, folder / copied, ignore=IGNORED)


def calls_of_chains(task, arm):
    """Function of the arm's own -> what of upstream it calls, itself or through others of the arm.

    An op that upstream has as a chain of calls only is such a function; one that bears the name of an imported one is
    upstream's. Beside upstream's functions a chain may use PyTorch and Triton's arithmetic: an arm that has a kernel of
    its own would not be upstream. FlashInfer's functions are those that SGLang calls at the version that it requires.
    """
    tree = ast.parse(task.path.joinpath(*task.config.arms[arm].module.split(".")).with_suffix(".py").read_text())
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    theirs = {alias.name for node in froms for alias in node.names}
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in theirs}
    if not functions:
        return {}
    assert plain <= {"torch", "triton"}, plain
    package = task.config.upstream[task.config.arms[arm].upstream].module
    known = (f"{package}.", "flashinfer.")
    assert all(str(node.module).startswith(known) for node in froms), [node.module for node in froms]
    assert not [name for name, node in functions.items() if node.decorator_list], "a function that is compiled"
    names = {
        name: {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} for name, node in functions.items()
    }
    for _ in functions:
        names = {name: used.union(*(names[one] for one in used & set(functions))) for name, used in names.items()}
    return {name: used & theirs for name, used in names.items()}
