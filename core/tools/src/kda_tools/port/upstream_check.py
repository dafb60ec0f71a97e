"""`kda upstream check`: shows what another SGLang release changed in the functions and files that the tasks pin."""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kda_judge.arms.upstream import obtain, read_lock
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_tools.models.apply_site import PACKAGE, replacements
from kda_tools.port.dispatch_edit import REGISTERS, definition, parameters
from kda_tools.port.layouts import module_path
from kda_tools.port.ported_arm import write_files
from kda_tools.project.lock_upstream import WITHOUT, Found, follow
from kda_tools.publish.report import table_md

LATEST = "latest"
VERSION = re.compile(r"[0-9]+(\.[0-9A-Za-z]+)*(\+[0-9A-Za-z.]+)?")
ELSEWHERE = re.compile(r"(^|/)(tests?|benchmark|csrc)/")
"""Pattern of the wheel's files that define no op."""


@dataclass(frozen=True)
class Function:
    """One public function that a task pins, in the pinned and in the other release."""

    task: Task
    name: str
    pin: Pin
    was: str
    """The module in the pinned release."""
    now: str | None
    """The module in the other release; None where no module defines such a function."""
    signature: str
    """How the arguments changed; `same` if they did not, `-` if no module defines the function."""


@dataclass
class Checked:
    """The comparison of one task with the other release."""

    task: Task
    pin: Pin
    functions: list[Function]
    changed: dict[str, str] = field(default_factory=dict)
    """Pinned file -> `changed`, `gone`, or the path of a file with the same bytes; unchanged files are left out."""
    total: int = 0
    """Number of pinned files."""
    broken: str = ""
    """Why the functions cannot be imported beside the stand-ins; empty if they can."""

    @property
    def fits(self) -> bool:
        """Whether the release can be an arm as it is."""
        return not self.broken and all(one.now is not None for one in self.functions)


def find_wheel(version: str, tasks: Sequence[Task], cache: Path) -> tuple[str, Path]:
    """The release's number and its wheel: pinned, in the cache, or downloaded into it; `latest` is always downloaded.

    Raises:
        UsageError: `version` is no version, or no task pins SGLang.
        MissingRequirement: pip cannot download it.
    """
    if version != LATEST and VERSION.fullmatch(version) is None:
        raise UsageError(f"VERSION: expected a release such as 0.5.23, or {LATEST}, got {version!r}")
    pins = [pin for task in tasks for pin in task.config.upstream.values() if pin.package == PACKAGE]
    if not pins:
        raise UsageError(f"expected tasks that pin {PACKAGE}, found none")
    if known := next((pin for pin in pins if pin.version == version), None):
        return version, obtain(known, cache, offline=False)
    kept = sorted((cache / "wheels").glob(f"{PACKAGE}-{version}-*.whl")) if version != LATEST else []
    if kept:
        return version, kept[0]
    folder = cache / "wheels"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = PACKAGE if version == LATEST else f"{PACKAGE}=={version}"
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", wanted, "--dest", temporary, "--no-deps", "--no-input"]
        command += ["--only-binary=:all:", "--python-version", pins[-1].python, "--implementation", "cp"]
        command += ["--platform", pins[-1].platform, "--disable-pip-version-check", "--progress-bar=off"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        got = sorted(Path(temporary).glob("*.whl"))
        if ran.returncode or len(got) != 1:
            output = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()
            raise MissingRequirement(
                f"expected pip to download {wanted} for {pins[-1].platform}, got {len(got)} wheels (exit code "
                f"{ran.returncode})\npip: {output[-1]}\nCheck the version and the network."
            )
        return got[0].name.split("-")[1], got[0].replace(folder / got[0].name)


def older_pin(task: Task, version: str) -> Pin | None:
    """The task's pin to compare with: the one before `version` in its contract, else the last."""
    pins = [pin for pin in task.config.upstream.values() if pin.package == PACKAGE]
    before = []
    for pin in pins:
        if pin.version == version:
            break
        before.append(pin)
    return next(iter([*before[-1:], *pins[-1:]]), None)


def check(
    tasks: Iterable[Task], version: str, wheel: Path, cache: Path, say: Callable[[str], None] = lambda _: None
) -> list[Checked]:
    """Compare every task's pinned files with the release's, and import the release's functions beside our stand-ins.

    `say` gets a line for every step.
    """
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = frozenset(item.filename for item in archive.infolist() if not item.is_dir())
        chosen = [(task, pin) for task in tasks if (pin := older_pin(task, version)) is not None]
        wanted = [one.function for task, pin in chosen for one in replacements([task]) if one.version == pin.version]
        say(f"{PACKAGE} {version}: looking for {len(set(wanted))} functions in {len(names)} files ...")
        places = _definitions(archive, names, set(wanted))
        hashes: dict[str, str] = {}
        for number, (task, pin) in enumerate(chosen, 1):
            say(f"{number} of {len(chosen)}: {task.op}: its files, and an import ...")
            held = [one for one in replacements([task]) if one.version == pin.version]
            with zipfile.ZipFile(obtain(pin, cache, offline=False)) as old:
                functions = [
                    _function(task, pin, one.function, one.module, places.get(one.function, []), old, archive)
                    for one in held
                ]
            checked = Checked(task, pin, functions)
            _compare_files(checked, archive, names, hashes)
            if functions and all(one.now for one in functions):
                checked.broken = _imports(checked, version, archive)
            found.append(checked)
    return found


def table(checked: Sequence[Checked], version: str) -> str:
    """Two tables in Markdown, one of functions and one of files, for a terminal or an issue."""
    functions, files = [], []
    for one in checked:
        for function in one.functions:
            now = "same module" if function.now == function.was else function.now or "**gone**"
            where = f"{one.pin.version} `{function.was}`"
            functions.append((one.task.op, f"`{function.name}`", where, now, function.signature))
        states = list(one.changed.values())
        changed, gone = states.count("changed"), states.count("gone")
        moved = len(states) - changed - gone
        importable = "no op left" if not all(f.now for f in one.functions) else one.broken or "yes"
        counts = map(str, (one.total - len(states), moved, changed, gone))
        files.append((one.task.op, f"{one.total} of {one.pin.version}", *counts, importable))
    first = table_md(("task", "function", "in", f"in {PACKAGE} {version}", "arguments"), functions)
    head = ("task", "pinned files", "unchanged", "moved", "changed", "gone", "importable")
    return f"{first}\n{table_md(head, files)}"


def write_arm(checked: Checked, version: str, archive: zipfile.ZipFile, folder: Path) -> Path:
    """Write the release's functions as an arm of `kda bench`: the files that they need, beside our stand-ins."""
    names = frozenset(item.filename for item in archive.infolist() if not item.is_dir())
    files = {name: archive.read(name) for name in sorted(_needed(checked, archive, names).files)}
    return write_files(folder, files, version, {one.name: one.now for one in checked.functions})


def _needed(checked: Checked, archive: zipfile.ZipFile, names: frozenset[str]) -> Found:
    text = "".join(f"from {one.now} import {one.name}\n" for one in checked.functions)
    lock = (checked.task.path / checked.pin.files).read_text(encoding="utf-8").splitlines()
    left_out = {line.removeprefix(WITHOUT) for line in lock if line.startswith(WITHOUT)}
    dropped = {name for name in names for pattern in left_out if Path(name).match(pattern)}
    return follow(PACKAGE, {"the arm": ast.parse(text)}, archive, names, (), dropped)


def _imports(checked: Checked, version: str, archive: zipfile.ZipFile) -> str:
    """The error of importing the arm, in a new process, on a CPU that claims to be CUDA; empty if there is none."""
    with tempfile.TemporaryDirectory(prefix="kda-upstream-") as temporary:
        folder = write_arm(checked, version, archive, Path(temporary) / f"upstream_{checked.task.op}")
        code = f"import sys; sys.path.insert(0, {temporary!r}); import {folder.name}"
        env = {**os.environ, "PYTHONPATH": import_path(), "CUDA_VISIBLE_DEVICES": ""}
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=env)
    return "" if ran.returncode == 0 else ran.stderr.strip().splitlines()[-1].replace("|", "/")


def _compare_files(checked: Checked, archive: zipfile.ZipFile, names: frozenset[str], hashes: dict[str, str]) -> None:
    entries = read_lock(checked.task.path / checked.pin.files)
    checked.total = len(entries)
    for path, digest in entries.items():
        if path in names:
            if _sha256(archive.read(path)) != digest:
                checked.changed[path] = "changed"
            continue
        if not hashes:
            hashes.update({_sha256(archive.read(name)): name for name in names if name.endswith((".py", ".cuh", ".h"))})
        checked.changed[path] = hashes.get(digest, "gone")


def _definitions(archive: zipfile.ZipFile, names: frozenset[str], functions: set[str]) -> dict[str, list[str]]:
    """Function -> the modules that define it on their top level, or register it as an op."""
    names_of = "|".join(sorted(functions)) or "(?!)"
    wanted = re.compile(rf"^(?:def ({names_of})\(|({names_of}) = {REGISTERS}\()", re.MULTILINE)
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".py") and not ELSEWHERE.search(name):
            text = archive.read(name).decode("utf-8", errors="replace")
            for function in dict.fromkeys(defined or made for defined, made in wanted.findall(text)):
                module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found.setdefault(function, []).append(module)
    return found


def _function(
    task: Task, pin: Pin, name: str, was: str, places: Sequence[str], old: zipfile.ZipFile, new: zipfile.ZipFile
) -> Function:
    now = was if was in places else next(iter(places), None)
    signature = "-"
    if now is not None:
        then = _arguments(old, module_path(was, old.namelist().__contains__), name)
        signature = _difference(then, _arguments(new, module_path(now, new.namelist().__contains__), name))
    return Function(task, name, pin, was, now, signature)


def _arguments(archive: zipfile.ZipFile, place: str, name: str) -> dict[str, str]:
    """Argument -> its default, or `required` if it has none."""
    node = definition(ast.parse(archive.read(place)), name, Path(place))
    return {one: ast.unparse(default) if default else "required" for one, _, default in parameters(node)}


def _difference(then: dict[str, str], now: dict[str, str]) -> str:
    changes = [f"new `{name}` ({now[name]})" for name in now if name not in then]
    changes += [f"without `{name}`" for name in then if name not in now]
    changes += [f"`{name}`: {then[name]} -> {now[name]}" for name in now if name in then and now[name] != then[name]]
    kept_then, kept_now = [n for n in then if n in now], [n for n in now if n in then]
    return ", ".join([*changes, *(["another order"] if kept_then != kept_now else [])]) or "same"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
