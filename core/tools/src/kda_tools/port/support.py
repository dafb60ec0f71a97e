"""The package that the ports of a tree share: what their packages import of the runtime, and nothing else.

It is made anew of all packages that import it, so it does not depend on the order in which they came.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.port import tree_files
from kda_tools.port.dispatch_edit import parsed
from kda_tools.port.layouts import Layout, Tree
from kda_tools.port.lean_ops import op_modules
from kda_tools.port.tree_format import formatted
from kda_tools.project.export import plain_table
from kda_tools.project.export.prune import prune
from kda_tools.project.export.sources import runtime_files

SUPPORT = "kda_support"
LICENSE = "# SPDX-License-Identifier: Apache-2.0\n"
ABOUT = '"""What KDA\'s kernels share: of KDA-Pilot\'s runtime, what the packages beside this one import."""\n'
MYPY = re.compile(r"  # type: ignore\[.*?\]")
"""Words for mypy, which SGLang does not run."""
WORDS = {
    "`kda_runtime`": f"`{SUPPORT}`",
    "why a call takes the plain PyTorch path, or None": "why the kernels do not take a call, or None",
    " that uses Triton's own launcher. `bound.entry`\n  makes a much cheaper one.": ".",
    " is bound to the same C object as a Triton kernel, and so can be part of a `launch.Chain`. Calls that\nthis "
    "object does not handle (a misaligned address, another current device, a thread without a context), and all calls\n"
    "where the C half cannot be used, reach the driver": " can be part of a `launch.Chain`. It reaches the driver",
    " and return the cheapest way to launch.": " and return what launches it.",
}
"""What the runtime says of itself, and what is true in a port."""
MADE_HERE = ("recorded.py", "eager.py", "exact.py")
"""Files of it that only ports have."""


def relative_package(tree: Tree, task: Task) -> str:
    """The task's package, relative to the folder that holds the shared one."""
    return Path(tree.package(task)).relative_to(_parent(tree)).as_posix()


def _parent(tree: Tree) -> str:
    return "sglang/kernels/kda_kernels" if tree.layout is Layout.FACADE else "sglang/jit_kernel"


@cache
def uncut_files() -> Mapping[str, str]:
    """Every file that the shared package may have, by its path, uncut."""
    files = runtime_files()
    files["op.py"], files["op_with_plain.py"] = op_modules(files["op.py"])
    files["tuned_table.py"] = Path(plain_table.__file__).read_text(encoding="utf-8")
    files["__init__.py"] = ABOUT
    folder = Path(str(tree_files.__file__)).parent
    files |= {name: (folder / name).read_text(encoding="utf-8") for name in MADE_HERE}
    return {f"{SUPPORT}/{name}": _reworded(text) for name, text in files.items()}


def _reworded(text: str) -> str:
    for words, instead in WORDS.items():
        text = text.replace(words, instead)
    return MYPY.sub("", text)


def shared(tree: Tree, task: Task, package: Mapping[str, str]) -> dict[str, str]:
    """Path from the root -> text of the shared package's files once the tree has the task's `package` too.

    Raises:
        UsageError: the tree has another version of it.
    """
    there, own = _packages(tree), relative_package(tree, task)
    _demand(tree, _support_files(there))
    made = _support_files(_without(there, own) | {f"{own}/{name}": text for name, text in package.items()})
    return {f"{_parent(tree)}/{name}": text for name, text in made.items()}


def files_without(tree: Tree, task: Task) -> dict[str, str | None]:
    """Path from the root -> text of the shared package's files without the task's package; None if none is needed.

    Raises:
        UsageError: the tree has another version of it.
    """
    there = _packages(tree)
    before, after = _support_files(there), _support_files(_without(there, relative_package(tree, task)))
    _demand(tree, before, after)  # `after`: the port broke off before it wrote the file
    return {f"{_parent(tree)}/{name}": after.get(name) for name, text in before.items() if text != after.get(name)}


def _packages(tree: Tree) -> dict[str, str]:
    """The Python files of the packages in the tree that import the shared one.

    Raises:
        UsageError: one does not parse.
    """
    base, found = tree.root / _parent(tree), {}
    for init in sorted(base.rglob("__init__.py")):
        if init.parent.name != SUPPORT and f".{SUPPORT}." in init.read_text(encoding="utf-8"):
            for path in sorted(init.parent.rglob("*.py")):
                text = found[path.relative_to(base).as_posix()] = path.read_text(encoding="utf-8")
                parsed(text, path)
    return found


def _without(packages: Mapping[str, str], own: str) -> dict[str, str]:
    return {name: text for name, text in packages.items() if not name.startswith(f"{own}/")}


def _support_files(packages: Mapping[str, str]) -> Mapping[str, str]:
    """The files of the shared package for these packages' files."""
    return _cut(tuple(sorted((name, text) for name, text in packages.items() if name.endswith(".py"))))


@lru_cache(maxsize=4)
def _cut(packages: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    roots = dict(packages)
    cut = prune({**roots, **uncut_files()}, roots)
    return formatted({name: LICENSE + text for name, text in cut.items() if name not in roots})


def _demand(tree: Tree, *versions: Mapping[str, str]) -> None:
    """Raise UsageError unless every file of the shared package in the tree is as in one of these versions."""
    base = tree.root / _parent(tree)
    there = {path.relative_to(base).as_posix() for path in (base / SUPPORT).rglob("*.py")}
    for name in sorted(there.union(*versions)):
        text = (base / name).read_text(encoding="utf-8") if name in there else None
        if text not in [version.get(name) for version in versions]:
            raise UsageError(
                f"{base / name}: expected what this version of `kda port` makes for the ports in the tree, got "
                f"{'no file' if text is None else 'another file'}; use the commit that wrote them (a port's "
                "provenance.json has it), or undo them all with it first"
            )
