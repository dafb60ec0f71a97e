"""Find the tasks: folders with a `config.toml`, in the checkout or installed from wheels."""

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from kda_judge.contract.config import Config, load_config
from kda_judge.contract.errors import UsageError
from kda_judge.contract.near_names import nearest
from kda_judge.contract.task_import import import_from
from kda_judge.contract.workloads import Workload, load_workloads

NUMBER = re.compile(r"^[a-z]\d{2,}_")
"""How a task's folder begins: a letter for the family, and a number within it."""


@dataclass(frozen=True)
class Task:
    """One task folder; its TOML files are read when first asked for."""

    path: Path

    @property
    def folder(self) -> str:
        """Folder name, for example `k03_qknorm_rope`; the import name, too."""
        return self.path.name

    @property
    def family(self) -> str:
        """Parent folder's name, for example `diffusion`."""
        return self.path.parent.name

    @property
    def op(self) -> str:
        """Folder name without its number: names sessions and commands."""
        return NUMBER.sub("", self.folder)

    @property
    def number(self) -> str:
        """How the folder begins, `k03`: names the task on the command line."""
        return self.folder.partition("_")[0]

    @cached_property
    def config(self) -> Config:
        """The task's contract; also checks that it is about this folder."""
        config = load_config(self.path / "config.toml")
        if config.task.op != self.op:
            raise UsageError(
                f"{self.path / 'config.toml'}: key 'task.op': expected {self.op!r} (the folder without its "
                f"number), got {config.task.op!r}"
            )
        return config

    @cached_property
    def workloads(self) -> tuple[Workload, ...]:
        """The frozen rows, each checked against the ops of the config."""
        path = self.path / "bench" / "workloads.toml"
        rows = load_workloads(path)
        for row in rows:
            self.check_row(row, path)
        return rows

    def check_row(self, row: Workload, path: Path) -> None:
        """Raise a UsageError, naming `path`, for a row that does not fit the op it names."""
        op = self.config.ops.get(row.op)
        if op is None:
            raise UsageError(
                f"{path}: row {row.id!r}: key 'op': no [ops.{row.op}] in config.toml; "
                f"nearest: {', '.join(nearest(row.op, self.config.ops))}"
            )
        unknown = sorted(set(row.inputs) - set(op.inputs))
        if unknown:
            raise UsageError(f"{path}: row {row.id!r}: inputs {unknown} are not inputs of {row.op}: {list(op.inputs)}")
        declared = tuple(name for name in op.outputs if name in op.inputs)
        if set(declared) != set(row.inplace):
            raise UsageError(
                f"{path}: row {row.id!r}: key 'inplace': {row.op} writes {list(declared)} in place, "
                f"got {list(row.inplace)}"
            )
        stray = sorted(set(row.outputs) - set(op.per_row))
        if stray:
            raise UsageError(
                f"{path}: row {row.id!r}: key 'outputs.{stray[0]}': expected only what `per_row` of [ops.{row.op}] in "
                f"config.toml names, {list(op.per_row)}, got {sorted(row.outputs)}"
            )
        for name, slots in op.pools.items():
            pool, places = row.inputs.get(name), row.inputs.get(slots)
            rows = pool.shape[0] if pool and pool.shape else 0
            if not places or places.fill not in ("slots", "captured") or not 0 < (places.high or 0) <= rows:
                raise UsageError(
                    f"{path}: row {row.id!r}: `pools` of [ops.{row.op}] in config.toml: expected a pool {name!r} and "
                    f"{slots!r} with fill = 'slots' or 'captured' and `high` = the pool's rows or less, got "
                    f"{pool and list(pool.shape)} and {places and (places.fill, places.high)}"
                )
        for name in op.per_row:
            if name not in row.outputs:
                raise UsageError(
                    f"{path}: row {row.id!r}: missing key 'outputs.{name}': `per_row` of [ops.{row.op}] in config.toml "
                    f'names it, so expected {{ shape = [...], dtype = "..." }}, got {sorted(row.outputs)}'
                )

    def load(self, module: str) -> ModuleType:
        """The task's module of this name, for example `bench.reference`."""
        return import_from(self.path, module)

    @property
    def ledger(self) -> Path:
        """The machine-written record of every recorded run."""
        return self.path / "docs" / "ledger.jsonl"


def checkout_root() -> Path | None:
    """The checkout: `$KDA_ROOT`, or the nearest folder upwards that holds `noxfile.py` and `core/`."""
    named = os.environ.get("KDA_ROOT")
    if named:
        root = Path(named).resolve()
        if not root.is_dir():
            raise UsageError(f"KDA_ROOT: expected a folder, got {named!r}")
        return root
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "noxfile.py").is_file() and (folder / "core").is_dir():
            return folder
    return None


def find_tasks() -> list[Task]:
    """Every task of the checkout, else every installed one, ordered by family and folder."""
    root = checkout_root()
    tasks = list(_in_checkout(root)) if root else list(_installed())
    tasks.sort(key=lambda task: (task.family, task.folder))
    by_op: dict[str, Task] = {}
    for task in tasks:
        if task.op in by_op:
            raise UsageError(f"{task.path}: op {task.op!r} is taken by {by_op[task.op].path}; op names are unique")
        by_op[task.op] = task
    return tasks


def all_tasks() -> list[Task]:
    """As `find_tasks`, for commands that make no sense without a task: to find none is a UsageError."""
    tasks = find_tasks()
    if not tasks:
        raise UsageError("no tasks found; run inside a checkout, set KDA_ROOT, or install a task's wheel")
    return tasks


def find_task(name: str) -> Task:
    """The task called `name`: by its op, its folder with or without the family, how the folder begins, or a path.

    These are `qknorm_rope`, `k03_qknorm_rope`, `diffusion/k03_qknorm_rope` and `k03`.
    A path is what a shell completes, `diffusion/k03_qknorm_rope/` or `.`; its folder need not lie in a checkout.

    Raises:
        UsageError: no task has this name, or several folders begin with it.
    """
    plain, place = name.rstrip("/"), Path(name)
    tasks = find_tasks()
    for task in tasks:
        if plain in (task.op, task.folder, f"{task.family}/{task.folder}") or place.resolve() == task.path.resolve():
            return task
    if (place / "config.toml").is_file():
        return Task(place.resolve())
    tasks = tasks or all_tasks()
    begun = [task for task in tasks if plain == task.number]
    if len(begun) == 1:
        return begun[0]
    if begun:
        folders = [f"{task.family}/{task.folder}" for task in begun]
        raise UsageError(f"task {name!r}: expected the beginning of one folder, got that of {', '.join(folders)}")
    numbered = NUMBER.match(f"{plain}_")
    known = [task.number if numbered else task.op for task in tasks]
    raise UsageError(f"unknown task {name!r}; nearest: {', '.join(nearest(name, known))}")


def _in_checkout(root: Path) -> Iterable[Task]:
    for folder in root.glob("*/*"):
        if os.path.lexists(folder / "config.toml"):  # a link to nowhere as well: its error names the task
            yield Task(folder)


def _installed() -> Iterable[Task]:
    """Tasks that are packages on the import path, where wheels and editable installations put them."""
    found: dict[str, Task] = {}
    for place in map(Path, sys.path):
        for config in sorted(place.glob("*/config.toml")):
            if NUMBER.match(config.parent.name):
                found.setdefault(config.parent.name, Task(config.parent))
    return found.values()
