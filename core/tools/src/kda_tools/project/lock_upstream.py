"""`kda lock`: list the files of a pinned wheel that a task's upstream arms import or compile.

It reads source and runs none of it. It follows imports at any depth, also inside functions; strings that name modules
or C++ and CUDA sources; and `#include`. It does not follow names that a stand-in provides. Patterns of `--also` add
files that no source names, for example modules whose name is built at run time; patterns of `--without` leave out
files that no NVIDIA GPU needs. The list keeps the patterns.
"""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UpstreamError, UsageError
from kda_judge.contract.tasks import Task

SOURCES = (".cu", ".cuh", ".cpp", ".hpp", ".c", ".h")
ALSO, WITHOUT = "# also ", "# without "
"""Prefixes of the lines of a lock file that keep the patterns of `--also` and `--without`."""
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^<>"\n]+)[>"]', re.MULTILINE)


@dataclass(frozen=True)
class Wanted:
    """`import module` or `from module import name`, and the file and line of that import."""

    module: str
    name: str | None
    where: str


@dataclass
class Found:
    """What the arms of a pin need of its wheel."""

    files: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    """Imports that neither the wheel nor a stand-in provides, one line each. Upstream may never execute them."""


def lock(task: Task, pin: Pin, wheel: Path, also: Iterable[str] = (), without: Iterable[str] = ()) -> Found:
    """Write the pin's list; patterns that an earlier list keeps stay.

    Raises:
        UsageError: no arm uses the pin and no pattern names a file of it, or a pattern matches no file.
        UpstreamError: an arm's file is not there or is not Python.
    """
    path = task.path / pin.files
    kept = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    patterns = {
        begin: sorted({*more, *(line.removeprefix(begin) for line in kept if line.startswith(begin))})
        for begin, more in ((ALSO, also), (WITHOUT, without))
    }
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(item.filename for item in archive.infolist() if not item.is_dir())
        chosen, left_out = ({name for one in patterns[b] for name in _matching(names, one)} for b in (ALSO, WITHOUT))
        found = follow(pin.module, _arm_sources(task, pin, chosen), archive, names, chosen, left_out)
        head = f"# Files of {wheel.name} that this arm imports or compiles, written by `kda lock`\n"
        head += "".join(f"{begin}{pattern}\n" for begin, those in patterns.items() for pattern in those)
        lines = (f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}\n" for name in sorted(found.files))
        path.write_text(head + "".join(lines), encoding="utf-8")
    return found


def follow(
    package: str,
    arms: Mapping[str, ast.Module],
    archive: zipfile.ZipFile,
    names: frozenset[str],
    chosen: Collection[str] = (),
    left_out: Collection[str] = (),
) -> Found:
    """What the arms' sources and `chosen` need, transitively."""
    from kda_judge.arms.sglang_standins import STANDINS  # imports torch

    standins: Mapping[str, Mapping[str, object]] = STANDINS
    found = Found()
    todo: list[str] = []

    def add(files: Iterable[str | None]) -> None:
        new_files = sorted({file for file in files if file is not None} - found.files - set(left_out))
        found.files.update(new_files)
        todo.extend(new_files)

    def add_imports(wanted: Iterable[Wanted]) -> None:
        for one in wanted:
            inner = _module(f"{one.module}.{one.name}", names)
            if inner is not None:
                add([inner])
            elif one.module == package or one.name in standins.get(one.module, {}):
                continue  # `sglang.__version__`, or a name that a stand-in provides
            elif (module := _module(one.module, names)) is not None and one.module not in standins:
                add([module])
            else:
                what = f"{one.module}.{one.name}" if one.name else one.module
                found.missing.append(f"{one.where}: {what}: neither in the wheel nor a stand-in")

    add(chosen)
    for where, tree in arms.items():
        add_imports(_imports(tree, package, "", where))
    while todo:
        name = todo.pop()
        text = archive.read(name).decode(errors="replace")
        if not name.endswith(".py"):
            add(_nearest(header, name, names) for header in INCLUDE.findall(text))
            continue
        tree = ast.parse(text)
        module = name.removesuffix(".py").replace("/", ".")
        inside = module.removesuffix(".__init__") if module.endswith(".__init__") else module.rpartition(".")[0]
        add_imports(_imports(tree, package, inside, name))
        add(_named(text, package, name, names) for text in _strings(tree))
    return found


def _matching(names: frozenset[str], pattern: str) -> list[str]:
    matches = fnmatch.filter(names, pattern)
    if not matches:
        raise UsageError(f"{pattern}: the wheel holds no such file")
    return matches


def _arm_sources(task: Task, pin: Pin, chosen: Collection[str]) -> dict[str, ast.Module]:
    """The modules of the arms that use the pin, and the modules beside them that they import."""
    arms = [arm for arm in task.config.arms.values() if arm.upstream and task.config.upstream[arm.upstream] == pin]
    if not arms and not chosen:
        raise UsageError(f"{task.path / 'config.toml'}: no arm has upstream = {pin.package} {pin.version}")
    todo = [task.path.joinpath(*arm.module.split(".")).with_suffix(".py") for arm in arms]
    found: dict[str, ast.Module] = {}
    while todo:
        path = todo.pop()
        if path.name in found:
            continue
        try:
            tree = found[path.name] = ast.parse(path.read_text(encoding="utf-8"))
        except (OSError, SyntaxError) as error:
            raise UpstreamError(f"{path}: expected an arm's Python source: {error}") from None
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                beside = [node.module] if node.module else [alias.name for alias in node.names]
                todo += [file for name in beside if (file := path.parent / f"{name}.py").is_file()]
    return found


def _imports(tree: ast.AST, package: str, inside: str, where: str) -> Iterator[Wanted]:
    """What the source imports of `package`; `inside` is the package that the source is in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted: list[tuple[str, str | None]] = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = inside.split(".")[: len(inside.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            wanted = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in wanted:
            if module.partition(".")[0] == package:
                yield Wanted(module, name, f"{where}:{node.lineno}")


def _strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _named(text: str, package: str, where: str, names: frozenset[str]) -> str | None:
    """The file that a string names: a source to compile, or a module."""
    if text.endswith(SOURCES):
        return _nearest(text, where, names)
    return _module(text, names) if text.startswith(f"{package}.") else None


def _module(module: str, names: frozenset[str]) -> str | None:
    place = module.replace(".", "/")
    return next((file for file in (f"{place}/__init__.py", f"{place}.py") if file in names), None)


def _nearest(name: str, where: str, names: frozenset[str]) -> str | None:
    """The file whose path ends with `name`; of several, the one nearest to `where`. None if the wheel has none."""

    def nearness(path: str) -> tuple[int, int, str]:
        same = takewhile(lambda pair: pair[0] == pair[1], zip(path.split("/"), where.split("/"), strict=False))
        return len(list(same)), -len(path), path

    return max((path for path in names if path.endswith(f"/{name}")), key=nearness, default=None)
