"""`kda port`: makes a task's export into a patch to an SGLang tree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.port import insertions, support
from kda_tools.port.block_files import BLOCK, lines
from kda_tools.port.dispatch_edit import dispatch, into_models, missing_arguments
from kda_tools.port.facade_edit import edit_facade
from kda_tools.port.insertions import Patch, text_without_ports
from kda_tools.port.layouts import DIFFUSION, FAMILIES, Layout, Tree, classes, locked_files, replaced_functions
from kda_tools.port.package_files import RUNS, dispatched, is_gated, package_files, tier
from kda_tools.port.proof_files import proof_files
from kda_tools.port.tree_format import formatted, formatted_bodies
from kda_tools.publish.read_once import unchanged_files


@dataclass(frozen=True)
class Port:
    """A task's patch for one tree."""

    task: Task
    tree: Tree
    patch: Patch
    modules: dict[str, str]
    """Op -> the dotted module with its public function, for the ported ops."""
    new: bool
    """Whether the tree has no such functions. Then only what `sites.toml` names calls the ops, if anything."""
    strangers: tuple[str, ...]
    """Paths of modules whose bytes differ from the pinned release's."""
    exact: bool = False
    """Whether upstream's bits were asked for. Then only ops that can give them are ported."""
    lacking: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Op -> those of its arguments that the tree's function does not have, so that nobody can give them there."""

    @property
    def tier(self) -> str:
        """The port's tier in SGLang's terms."""
        return tier(self.task, self.exact)

    @property
    def unported_ops(self) -> frozenset[str]:
        """Ops of the task that are not ported."""
        return frozenset(one.__name__ for one in dispatched(self.task)) - set(self.modules)

    @property
    def package(self) -> str:
        """The dotted name of the port's package."""
        return self.tree.package(self.task).replace("/", ".")


@unchanged_files()
def make_port(task: Task, tree: Tree, exact: bool = False) -> Port:
    """Make the patch; nothing is written. `exact`: with upstream's bits, see `Port.exact`.

    Raises:
        UsageError: the task is of another family, or the tree does not fit the task; names the task or the file.
    """
    if task.family not in FAMILIES:
        raise UsageError(
            f"{task.folder}: expected a task of {' or '.join(FAMILIES)}, whose places in SGLang are known here, got "
            f"one of {task.family}; `kda export {task.op}` gives its kernels as files of their own"
        )
    functions = {one.__name__: one for one in dispatched(task, exact)}
    found = replaced_functions(task, tree)
    new = not found
    numerics = tier(task, exact)
    sites = classes(task, tree, numerics)
    if new and not (sites or tree.has_levels(task)):
        raise UsageError(
            f"{task.folder}: sglang {tree.layout.value} has no function of it, and nothing in a model would call it"
            f"{' with --exact' * exact}"
        )
    if task.family != DIFFUSION:  # other tasks' arms may have functions that the release lacks
        held = {one.function for one in found}
        functions = {name: function for name, function in functions.items() if name in held}
    place = tree.package(task)
    package = place.replace("/", ".")
    modules = dict.fromkeys(functions, package)
    modules |= {one.function: one.module for one in found if one.function in functions}
    if not new and (homeless := sorted(name for name, module in modules.items() if module == package)):
        raise UsageError(f"{task.folder}: {', '.join(homeless)}: expected in the arm on sglang {tree.layout.value}")
    base = tree.repository
    prefix = tree.prefix
    patch = Patch(base)
    files = package_files(task, tree, list(functions.values()), new, exact)
    patch.created |= {f"{prefix}{place}/{name}": text for name, text in files.items()}
    patch.shared |= {f"{prefix}{path}": text for path, text in support.shared(tree, task, files).items()}
    strangers = []
    absent: dict[str, frozenset[str]] = {}
    pins = locked_files(task, tree.layout)
    for module in dict.fromkeys(modules.values()) if not new else ():
        path = tree.module_path(module)
        where = tree.root / path
        if hashlib.sha256(text_without_ports(base, prefix + path)).hexdigest() != pins[path]:
            strangers.append(path)
        mine = [function for name, function in functions.items() if modules[name] == module]
        text = patch.read(prefix + path)
        absent |= missing_arguments(text, where, mine)
        patch.insert(prefix + path, *dispatch(text, where, package, mine))
    for module in dict.fromkeys(site.module for site in sites):
        path = tree.module_path(module)
        where, mine_there = tree.root / path, [site for site in sites if site.module == module]
        if hashlib.sha256(text_without_ports(base, prefix + path)).hexdigest() != mine_there[0].sha256:
            strangers.append(path)
        runs = f"{RUNS}_{task.op}"  # a name of its own: ports of several tasks may change one module
        ported = {site.holder: lines(site).replace(f"{RUNS}(", f"{runs}(") for site in mine_there}
        ported = formatted_bodies(ported, [site.holder for site in mine_there if site.class_])
        names = modules | dict.fromkeys((f"{RUNS} as {runs}", BLOCK), package)
        patch.insert(prefix + path, *into_models(patch.read(prefix + path), where, ported, names))
    if tree.layout is Layout.FACADE:
        edit_facade(patch, tree, task, list(functions), new, numerics, is_gated(numerics, tree, task, new))
    test, benchmark = proof_files(task, tree, modules, numerics)
    proof = {tree.test(task): test, tree.benchmark(task): benchmark}
    patch.created |= formatted({path.relative_to(base).as_posix(): text for path, text in proof.items()})
    return Port(task, tree, patch, modules, new, tuple(strangers), exact, absent)


def undo(task: Task, tree: Tree) -> list[str]:
    """Remove a task's port from the tree; returns the paths that it touched.

    Raises:
        UsageError: nothing to undo, or a file was changed since the port; then no file is written.
    """

    def shared() -> dict[str, str | None]:
        return {tree.prefix + path: text for path, text in support.files_without(tree, task).items()}

    return insertions.undo(tree.repository, task.op, shared)
