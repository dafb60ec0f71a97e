"""Write the folder that `kda apply` puts first on a command's PYTHONPATH: hook, plan, and copies of the solutions.

The plan is derived from the tasks. A task's upstream arm imports the public functions from the modules of one release,
and the task's lock file has the sha256 of these modules. So a task that is measured against a release can be applied to
it without further data. A model may run several statements instead of one function that the op replaces: then
`sites.toml` of the task names the class or function (`chain_sites.py`).
"""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from kda_judge.arms.upstream import read_lock
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_counts, apply_hook, deferred_ways
from kda_tools.models.chain_sites import sites_of
from kda_tools.project.export.sources import exact_ops
from kda_tools.project.export.write import write_texts

PACKAGE = "sglang"
"""The framework whose functions are replaced."""
COPIED = "kda_applied"
"""Package of the copies; its name is no one else's."""
SITECUSTOMIZE = f'''"""Written by `kda apply`; Python runs it when it starts."""
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from os import environ
from pathlib import Path

site = Path(__file__).resolve().parent
if "{apply_hook.COUNTS}" in environ:
    from {COPIED}.apply_hook import install

    install(site, Path(environ["{apply_hook.COUNTS}"]))
# The one that this file stands before.
spec = PathFinder.find_spec("sitecustomize", [place for place in sys.path if Path(place).resolve() != site])
if spec is not None and spec.loader is not None:
    spec.loader.exec_module(module_from_spec(spec))
'''


class Replacement(NamedTuple):
    """One function of one release, and what takes its place."""

    task: str
    """The task's op."""
    version: str
    module: str
    function: str
    sha256: str
    """sha256 of the module's file."""
    block: str = ""
    """A class or a function of the module: what is replaced are statements in it, not the op's own function."""
    kind: str = ""
    """The key of `sites.toml` that says how such a block runs the op, for `deferred_ways`."""
    place: str = ""
    """The value of that key."""
    keeps_bits: bool = True
    """Whether upstream's bits come out if the solution gives them."""


def chosen_tasks(tasks: Sequence[Task], wanted: Iterable[str]) -> list[Task]:
    """The tasks that `--ops` names, each by op, folder or the folder's prefix (`k03`); without names all measured ones.

    A solution that no GPU has run yet may be slower than what it replaces. The order is that of `tasks`, in which the
    later one of two tasks for one class is asked first.

    Raises:
        UsageError: a name is no task; the message has the nearest names.
    """
    names = [name.strip() for some in wanted for name in some.split(",")]
    if not names:
        return [task for task in tasks if task.ledger.is_file()]
    chosen: set[str] = set()
    for name in names:
        found = [task for task in tasks if name in (task.op, task.folder, task.folder.partition("_")[0])]
        if not found:
            near = nearest(name, [known for task in tasks for known in (task.op, task.folder.partition("_")[0])])
            raise UsageError(f"--ops {name or repr(name)}: expected a task, nearest: {', '.join(near)}")
        chosen |= {task.folder for task in found}
    return [task for task in tasks if task.folder in chosen]


def replacements(tasks: Iterable[Task]) -> list[Replacement]:
    """Every function of every pinned release that the tasks have a solution for.

    Raises:
        UsageError: two tasks replace one function.
    """
    found: dict[tuple[str, str], Replacement] = {}
    for task in tasks:
        for arm in task.config.arms.values():
            pin = task.config.upstream.get(arm.upstream or "")
            if pin is None or pin.package != PACKAGE:
                continue
            for one in _of_arm(task, task.path.joinpath(*arm.module.split(".")).with_suffix(".py"), pin):
                other = found.setdefault((one.version, one.function), one)
                if other != one:
                    raise UsageError(f"{one.task} and {other.task} both replace {one.function}: name one with --ops")
    return list(found.values())


def sites(tasks: Iterable[Task]) -> list[Replacement]:
    """One entry for each class or function that runs, as several statements, what a task has a solution for."""
    return [
        Replacement(
            *(task.op, site.release, site.module, site.op, site.sha256),
            *(site.holder, site.kind, site.place, site.keeps_bits(task)),
        )
        for task in tasks
        for site in sites_of(task)
    ]


def exact_only(tasks: Iterable[Task], plan: Iterable[Replacement]) -> list[Replacement]:
    """Those of the plan whose solution can give upstream's bits.

    Raises:
        UsageError: there are none.
    """
    ops: set[str] = set()
    for task in tasks:
        with suppress(UsageError):
            ops.update(exact_ops(task))
    found = [one for one in plan if one.function in ops and one.keeps_bits]
    if not found:
        raise UsageError(f"--exact: expected a task with an exact mode, got {', '.join(task.op for task in tasks)}")
    return found


def _of_arm(task: Task, path: Path, pin: Pin) -> Iterable[Replacement]:
    """What the arm's module imports of upstream and exports under the same name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    exported = {
        name
        for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
        for name in ast.literal_eval(node.value)
    }
    locked = read_lock(task.path / pin.files)
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != PACKAGE:
            continue
        module = str(node.module)
        place = module.replace(".", "/")
        sha256 = locked.get(f"{place}.py") or locked[f"{place}/__init__.py"]
        for name in [alias.name for alias in node.names if alias.name in exported and alias.asname is None]:
            yield Replacement(task.op, pin.version, module, name, sha256)


def write(folder: Path, plan: Iterable[Replacement], solutions: Mapping[str, Mapping[str, str]], runtime: bool) -> None:
    """Fill `folder` with everything that the command needs.

    `solutions`: op -> path of a file -> its text. With `runtime` kda_runtime is copied too, as the solutions import it.
    """
    package = folder / COPIED
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for module in (apply_hook, apply_counts, deferred_ways, *deferred_ways.WAYS.values()):
        shutil.copy(str(module.__file__), package)
    for op, files in solutions.items():
        write_texts(package / op, files)
    if runtime:
        spec = find_spec("kda_runtime")
        assert spec is not None
        assert spec.submodule_search_locations
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(spec.submodule_search_locations[0], folder / "kda_runtime", ignore=ignored)
    releases: dict[str, list[dict[str, str]]] = {}
    for one in plan:
        entry = {"module": one.module, "function": one.function, "sha256": one.sha256}
        entry |= {"block": one.block, "kind": one.kind, "place": one.place} if one.block else {}
        releases.setdefault(one.version, []).append({**entry, "solution": f"{COPIED}.{one.task}"})
    text = json.dumps({"package": PACKAGE, "releases": releases}, indent=1)
    (folder / apply_hook.PLAN).write_text(text, encoding="utf-8")
    (folder / "sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
