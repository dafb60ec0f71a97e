"""Adds a port to the facade of a tree: registry entries, exports, its gate and its tier, and its provenance."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.port.dispatch_edit import imports, parsed
from kda_tools.port.insertions import Insertion, Patch
from kda_tools.port.layouts import FACADE, FACADE_MODULE, Tree
from kda_tools.port.package_files import gate_name
from kda_tools.port.tree_format import formatted

KDA_README = "sglang/kernels/kda_kernels/README.md"
STAGE = "sglang/multimodal_gen/runtime/pipelines_core/stages/denoising.py"
"""Where the levels of all gated fusions are declared."""
HANDLERS = "_QUALITY_FUSION_HANDLERS"
ADAPTERS = "sglang/multimodal_gen/test/unit/test_quality_fusion_lora.py"
"""SGLang's test that demands a reason, for every gated fusion, why adapters keep their effect."""
SITE = '''# SPDX-License-Identifier: Apache-2.0
"""Gate of KDA's kernels for {names}.

They are `{tier}`: other roundings than the kernels that run today, so a
request's quality level decides. The ops are shared by many models, so there is
no module to mark: one switch for the process, turned where a batch begins to
denoise. Stages before that keep the level of the batch before.
"""

from __future__ import annotations

from torch import nn

from sglang.kernels.ops.diffusion.sites.quality_gate import QualityGatedFusion


class SharedOps(QualityGatedFusion):
    """Ops that are called from everywhere, mounted for the process."""

    __slots__ = ("mounted",)

    def __init__(self, name: str) -> None:
        super().__init__(
            name=name,
            marker_attr="_sgl_kda_{op}",
            enabled_attr="_sgl_kda_{op}_enabled",
        )
        self.mounted = False

    def mount(self, root: nn.Module) -> bool:
        """On for every model of the process."""
        self.mounted = True
        return True

    def unmount(self, root: nn.Module) -> None:
        """Off for every model of the process."""
        self.mounted = False


{gate} = SharedOps("KDA {op}")
'''
EXACT_SITE = '''# SPDX-License-Identifier: Apache-2.0
"""Gate of KDA's kernels for {names}.

They are `exact`: the bits of the functions that they stand in front of. Each
signature is compared with them when it is first seen.
"""

from __future__ import annotations

from sglang.kernels.ops.diffusion.sites.bitexact_gate import BitExactFusionGate

{gate} = BitExactFusionGate("KDA {op}", per_signature=True)
'''


def edit_facade(
    patch: Patch, tree: Tree, task: Task, functions: Sequence[str], new: bool, tier: str, gated: bool
) -> None:
    """Add to `patch` the entries of a port of this tier in the tree's facade, quality levels and tables.

    `gated`: the port has a gate.

    Raises:
        UsageError: a table is not where the release has it.
    """
    prefix = tree.prefix
    _edit_readme(patch, prefix, task, functions, tier)
    if not tree.has_levels(task):
        return  # a second backend of an op would make SGLang ask which one to use
    owner = f"sglang.kernels.kda_kernels.{task.op}"
    entries = "".join(
        f'    (\n        "diffusion.{name}",\n        KernelBackend.KDA,\n'
        f'        "{owner}:{name if new else f"try_{name}"}",\n        _CUDA,\n    ),\n'
        for name in functions
    )
    exports = dict.fromkeys(functions, owner) if new else {}
    exports |= {gate_name(task.op): f"sites.kda_{task.op}_site"} if gated else {}
    exported = "".join(f'    "{name}": "{module}",\n' for name, module in exports.items())
    text, where = patch.read(f"{prefix}{FACADE}"), patch.base / prefix / FACADE
    patch.insert(
        f"{prefix}{FACADE}",
        Insertion(_end_of(text, "_SPECS", where), entries),
        Insertion(_end_of(text, "_EXPORTS", where), exported),
    )
    if gated:
        _mount(patch, prefix, task, functions, tier)


def _mount(patch: Patch, prefix: str, task: Task, functions: Sequence[str], tier: str) -> None:
    gate = gate_name(task.op)
    site = f"{prefix}sglang/kernels/ops/diffusion/sites/kda_{task.op}_site.py"
    names = ", ".join(f"`{name}`" for name in functions)
    template = EXACT_SITE if tier == "exact" else SITE
    patch.created |= formatted({site: template.format(names=names, tier=tier, op=task.op, gate=gate)})
    if tier == "exact":
        return  # no level of a request mounts it
    text, where = patch.read(prefix + STAGE), patch.base / prefix / STAGE
    patch.insert(
        prefix + STAGE,
        *imports(text, where, FACADE_MODULE, [gate]),
        Insertion(_end_of(text, HANDLERS, where), f'    ("{tier}", {gate}),\n'),
    )
    if (patch.base / prefix / ADAPTERS).is_file():
        text, where = patch.read(prefix + ADAPTERS), patch.base / prefix / ADAPTERS
        patch.insert(
            prefix + ADAPTERS,
            *imports(text, where, FACADE_MODULE, [gate]),
            Insertion(_end_of(text, "_ADAPTER_SAFE_FUSIONS", where), f'    {gate}: "shared ops, no linear",\n'),
        )


def _edit_readme(patch: Patch, prefix: str, task: Task, functions: Sequence[str], tier: str) -> None:
    """Add a row at the end of the table of provenance."""
    lines = patch.read(prefix + KDA_README).splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    if not rows:
        raise UsageError(f"{patch.base / prefix / KDA_README}: expected the table of kernel families, found none")
    names = ", ".join(f"`{name}`" for name in functions)
    row = (
        f"| {task.config.task.title} ({names}; {tier}) | `{task.op}/` | "
        f"KDA-Pilot task {task.folder}; see the package README |\n"
    )
    patch.insert(prefix + KDA_README, Insertion(rows[-1] + 1, row))


def _end_of(text: str, name: str, where: Path) -> int:
    """The line (from 0) after the last entry of the table `name`, a tuple or a dict on the module's top level."""
    for node in parsed(text, where).body:
        if not isinstance(node, ast.AnnAssign | ast.Assign):
            continue
        target: ast.expr = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        value = node.value
        if not (isinstance(target, ast.Name) and target.id == name):
            continue
        entries = value.elts if isinstance(value, ast.Tuple) else value.values if isinstance(value, ast.Dict) else []
        if entries and (line := int(entries[-1].end_lineno or 0)) < int(node.end_lineno or 0):
            return line
    raise UsageError(f"{where}: expected the table {name}, a tuple or a dict with one entry or more, found none")
