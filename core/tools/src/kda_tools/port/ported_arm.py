"""Writes a ported tree as an arm of `kda bench` and of the grid: its files, and code to import them with stand-ins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_tools.models.apply_site import replacements
from kda_tools.port import tree_files
from kda_tools.port.layouts import locked_files
from kda_tools.port.package_files import gate_name, is_gated_by_bits
from kda_tools.port.port_task import Port

NAME = "ported"
"""Name of the arm in a run's record."""
BESIDE = tuple(
    f"sglang/kernels/ops/diffusion/{name}"
    for name in ("common/fast_launch.py", "common/platform.py", "sites/quality_gate.py", "sites/bitexact_gate.py")
)
"""Files that a port's package imports in a release with levels, even if the op's own module does not."""


def write_arm(port: Port, folder: Path) -> Path:
    """Fill the new folder `folder` with the arm. It includes the port even if that is not written to the tree.

    Raises:
        UsageError: a file that the op's module imports is not in the tree.
    """
    texts = port.patch.texts()
    prefix = port.tree.prefix
    package = f"{prefix}{port.tree.package(port.task)}/"
    beside = BESIDE if port.tree.has_levels(port.task) else ()
    wanted = dict.fromkeys([*locked_files(port.task, port.tree.layout), *beside])
    files: dict[str, bytes] = {}
    for path in wanted:
        if prefix + path in texts:
            files[path] = texts[prefix + path].encode()
        elif (port.tree.root / path).is_file():
            files[path] = (port.tree.root / path).read_bytes()
        else:
            raise UsageError(
                f"{port.tree.root / path}: expected the file that {port.task.op}'s module imports, got none"
            )
    for path, text in {**port.patch.created, **port.patch.shared}.items():
        if path in port.patch.shared or path.startswith((package, f"{prefix}sglang/kernels/ops/diffusion/sites/")):
            files[path.removeprefix(prefix)] = text.encode()
    gated = port.tree.has_levels(port.task) and not port.new
    site = f"sglang.kernels.ops.diffusion.sites.kda_{port.task.op}_site"
    gate = [site, gate_name(port.task.op)] if gated else None
    exact = is_gated_by_bits(port.tier, port.tree, port.task, port.new)
    return write_files(folder, files, port.tree.layout.value, functions(port), gate, exact)


def write_files(
    folder: Path,
    files: Mapping[str, bytes],
    version: str,
    functions: Mapping[str, str | None],
    gate: Sequence[str] | None = None,
    exact: bool = False,
) -> Path:
    """Fill the new folder `folder` with an arm, and return it.

    Args:
        folder: the arm's folder.
        files: path -> content of the tree's files that the arm imports.
        version: the release that the tree belongs to.
        functions: every public function and its module.
        gate: the module and the name of the gate to mount.
        exact: whether that gate compares bits.
    """
    for path, content in files.items():
        target = folder / "tree" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    words = {"left": tree_files.LEFT, "refused": tree_files.REFUSED}
    plan = {"version": version, "gate": gate, "exact": exact, "functions": functions, **words}
    (folder / "arm.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
    source = Path(str(tree_files.__file__)).parent / "ported_arm.py"
    (folder / "__init__.py").write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def functions(port: Port) -> dict[str, str]:
    """Public function of the task -> its module in the tree; includes functions that call another function's op."""
    held = {one.function: one.module for one in replacements([port.task]) if one.version == port.tree.layout.value}
    return {**port.modules, **held}
