"""Where an SGLang tree keeps kernels, their tests and their benchmarks: the layouts of both pinned releases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from kda_judge.arms.upstream import read_lock
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.models.apply_site import PACKAGE, Replacement, replacements
from kda_tools.models.chain_sites import Site, sites_of
from kda_tools.port.block_files import lines

DIFFUSION = "diffusion"
"""The family whose ops have a facade and quality levels, in releases that have these."""
FAMILIES = (DIFFUSION, "llm")
"""The families of tasks that can be ported, because their places in a tree are known."""
FACADE = "sglang/kernels/ops/diffusion/__init__.py"
"""The file with the public imports and the registry's entries, in releases that have a facade."""
FACADE_MODULE = FACADE.removesuffix("/__init__.py").replace("/", ".")


class Layout(Enum):
    """How a release is laid out; the value is the pinned release that has it."""

    JIT_KERNEL = "0.5.12.post1"
    """Kernels, tests and benchmarks below `sglang/jit_kernel/`; nothing decides at run time which of them run."""
    FACADE = "0.5.23"
    """Ported kernels below `sglang/kernels/kda_kernels/`, behind a facade and quality levels; tests below `test/`."""


@dataclass(frozen=True)
class Tree:
    """An SGLang tree: a checkout, or what is in a wheel."""

    root: Path
    """The folder that holds `sglang/`."""
    repository: Path
    """The folder that holds `test/`: above `python/` in a checkout, else the root."""
    layout: Layout

    @property
    def prefix(self) -> str:
        """The root's path relative to the repository: empty, or `python/` in a checkout."""
        return "" if self.root == self.repository else f"{self.root.relative_to(self.repository).as_posix()}/"

    def package(self, task: Task) -> str:
        """The folder of a port's package, relative to the root."""
        if self.layout is Layout.FACADE:
            return f"sglang/kernels/kda_kernels/{task.op}"
        return f"sglang/jit_kernel/{_group(task)}kda_{task.op}"

    def test(self, task: Task) -> Path:
        """The file of a port's test."""
        if self.layout is Layout.FACADE:
            return self.repository / f"test/registered/kernels/ops/{_group(task)}test_kda_{task.op}.py"
        return self.root / f"sglang/jit_kernel/tests/{_group(task)}test_kda_{task.op}.py"

    def benchmark(self, task: Task) -> Path:
        """The file of a port's benchmark."""
        if self.layout is Layout.FACADE:
            return self.repository / f"test/registered/kernels/benchmark/{_group(task)}bench_kda_{task.op}.py"
        return self.root / f"sglang/jit_kernel/benchmark/{_group(task)}bench_kda_{task.op}.py"

    def module_path(self, module: str) -> str:
        """A module's file, relative to the root."""
        return module_path(module, lambda path: (self.root / path).is_file())

    def has_levels(self, task: Task) -> bool:
        """Whether the task's ops are in a facade, where quality levels decide which of them run."""
        return self.layout is Layout.FACADE and task.family == DIFFUSION


def _group(task: Task) -> str:
    """The folder of the task's family among tests and kernels; empty for language models' ops, which have none."""
    return f"{DIFFUSION}/" if task.family == DIFFUSION else ""


def find_tree(path: Path) -> Tree:
    """The tree at `path`: a checkout of SGLang, or a folder with the package `sglang` in it.

    Raises:
        UsageError: there is none, or its layout is none of the pinned releases'.
    """
    for root in (path / "python", path):
        if not (root / "sglang" / "__init__.py").is_file():
            continue
        repository = path if root != path else root
        if (root / FACADE).is_file() and (root / "sglang/kernels/kda_kernels").is_dir():
            return Tree(root, repository, Layout.FACADE)
        if (root / "sglang/jit_kernel/diffusion").is_dir():
            return Tree(root, repository, Layout.JIT_KERNEL)
        raise UsageError(
            f"--sglang {path}: expected the layout of {' or '.join(one.value for one in Layout)}, found neither "
            f"{FACADE} nor sglang/jit_kernel/diffusion/"
        )
    raise UsageError(f"--sglang {path}: expected a checkout of SGLang or a folder with sglang/ in it, found none there")


def pin_of(task: Task, layout: Layout) -> Pin | None:
    """The task's pin of the release with this layout; None if no arm of the task is from there."""
    pins = task.config.upstream.values()
    return next((pin for pin in pins if pin.package == PACKAGE and pin.version == layout.value), None)


def replaced_functions(task: Task, tree: Tree) -> list[Replacement]:
    """The functions of the tree that the task's solution replaces; empty if the task's ops are new to the tree.

    Raises:
        UsageError: the module of such a function is not in the tree.
    """
    found = [one for one in replacements([task]) if one.version == tree.layout.value]
    for one in found:
        path = tree.root / tree.module_path(one.module)
        if not path.is_file():
            raise UsageError(
                f"{path}: expected the module of {one.function} as in {PACKAGE} {one.version}, got no file"
            )
    return found


def classes(task: Task, tree: Tree, tier: str) -> list[Site]:
    """The classes and functions of the tree that call the task's ops once they are ported, in place of statements.

    A port of the tier `exact` leaves out those that would get other bits than their statements have.

    Raises:
        UsageError: the module of such a class or function is not in the tree.
    """
    found = called_from(task, tree.layout, tier)
    for one in found:
        if not (path := tree.root / tree.module_path(one.module)).is_file():
            raise UsageError(f"{path}: expected the module of {one.holder} as in {PACKAGE} {one.release}, got no file")
    return found


def called_from(task: Task, layout: Layout, tier: str) -> list[Site]:
    """The same for any tree of the release with this layout; no file is looked for."""
    found = [one for one in sites_of(task) if one.release == layout.value and lines(one)]
    return [one for one in found if tier != "exact" or one.keeps_bits(task)]


def module_path(module: str, is_there: Callable[[str], bool]) -> str:
    """A module's file, relative to the root; for a package its `__init__.py`."""
    place = module.replace(".", "/")
    package = f"{place}/__init__.py"
    return package if is_there(package) else f"{place}.py"


def locked_files(task: Task, layout: Layout) -> dict[str, str]:
    """Path -> sha256 of the release's files that the task's arm there needs; none without such an arm."""
    pin = pin_of(task, layout)
    return read_lock(task.path / pin.files) if pin else {}
