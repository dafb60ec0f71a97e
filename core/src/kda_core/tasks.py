"""Find the tasks: folders with a `config.toml`, in the checkout or installed from wheels."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from kda_core.config import Config, load_config
from kda_core.errors import UsageError
from kda_core.suggest import nearest
from kda_core.workloads import Workload, load_workloads

ENTRY_POINTS = "kda.tasks"
"""Entry-point group through which an installed task names its package."""


@dataclass(frozen=True)
class Task:
    """One task folder; its TOML files are read when first asked for."""

    path: Path
    package: str
    """Import name, for example `diffusion.k03_qknorm_rope`."""

    @property
    def folder(self) -> str:
        """Folder name, for example `k03_qknorm_rope`."""
        return self.path.name

    @property
    def family(self) -> str:
        """Parent folder's name, for example `diffusion`."""
        return self.path.parent.name

    @property
    def op(self) -> str:
        """Folder name without the `kNN_` prefix: names sessions and commands."""
        return re.sub(r"^k\d+_", "", self.folder)

    @cached_property
    def config(self) -> Config:
        """The task's contract; also checks that it is about this folder."""
        config = load_config(self.path / "config.toml")
        if config.task.op != self.op:
            raise UsageError(
                f"{self.path / 'config.toml'}: key 'task.op': expected {self.op!r} (the folder without its "
                f"kNN_ prefix), got {config.task.op!r}"
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
        for name in op.per_row:
            if name not in row.outputs:
                raise UsageError(
                    f"{path}: row {row.id!r}: missing key 'outputs.{name}': `per_row` of [ops.{row.op}] in config.toml "
                    f'names it, so expected {{ shape = [...], dtype = "..." }}, got {sorted(row.outputs)}'
                )

    @property
    def ledger(self) -> Path:
        """The machine-written record of every recorded run."""
        return self.path / "docs" / "ledger.jsonl"


def checkout_root() -> Path | None:
    """The checkout: `$KDA_ROOT`, or the nearest folder upwards that holds `noxfile.py` and `core/pyproject.toml`."""
    named = os.environ.get("KDA_ROOT")
    if named:
        root = Path(named).resolve()
        if not root.is_dir():
            raise UsageError(f"KDA_ROOT: expected a folder, got {named!r}")
        return root
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "noxfile.py").is_file() and (folder / "core" / "pyproject.toml").is_file():
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
    """As `find_tasks`, for what makes no sense without any: none is a UsageError."""
    tasks = find_tasks()
    if not tasks:
        raise UsageError("no tasks found; run inside a checkout, set KDA_ROOT, or install a task's wheel")
    return tasks


def find_task(name: str) -> Task:
    """The task called `name`: its op (`qknorm_rope`), its folder (`k03_qknorm_rope`), both with the family, or a path.

    A path is what a shell completes: `diffusion/k03_qknorm_rope/` in the checkout, `../k03_qknorm_rope` beside it.
    """
    tasks = all_tasks()
    plain, place = name.rstrip("/"), Path(name).resolve()
    for task in tasks:
        if plain in (task.op, task.folder, f"{task.family}/{task.folder}") or place == task.path.resolve():
            return task
    raise UsageError(f"unknown task {name!r}; nearest: {', '.join(nearest(name, [task.op for task in tasks]))}")


def _in_checkout(root: Path) -> Iterable[Task]:
    for config in root.glob("*/*/config.toml"):
        folder = config.parent
        yield Task(path=folder, package=f"{folder.parent.name}.{folder.name}")


def _installed() -> Iterable[Task]:
    for entry in entry_points(group=ENTRY_POINTS):
        spec = find_spec(entry.value)
        for location in (spec.submodule_search_locations or []) if spec else []:
            if (Path(location) / "config.toml").is_file():
                yield Task(path=Path(location), package=entry.value)
                break
