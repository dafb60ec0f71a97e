"""Read upstream's own lists: its registry of kernels, and the quality tiers at which it mounts fused sites."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from kda_tools.knowledge.op_facts import Backend
from kda_tools.knowledge.wheel_source import Source, Symbol


def specs(source: Source, diffusion: str) -> Iterator[tuple[Symbol, Backend]]:
    """The lines of upstream's registry of kernels, if the package has a table `_SPECS`."""
    module = source.module(diffusion)
    node = module.defined.get("_SPECS") if module else None
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    for row in value.elts if isinstance(value, ast.Tuple | ast.List) else ():
        assert isinstance(row, ast.Tuple)
        op, backend, target, requires = (
            one.value if isinstance(one, ast.Constant) else ast.unparse(one) for one in row.elts
        )
        where, _, name = str(target).partition(":")
        owner = where if where.startswith("sglang.") else f"{diffusion}.{where}"
        capability = str(requires).removeprefix("frozenset({CapabilityRequirement.").removesuffix("})").lstrip("_")
        yield (
            Symbol(owner, name),
            Backend(op=str(op), backend=str(backend).rpartition(".")[2], target=str(target), requires=capability),
        )


def tiers(source: Source, runtime: str) -> Iterator[tuple[str, str]]:
    """Site -> the lowest quality tier of a request that mounts it."""
    module = source.module(f"{runtime}.pipelines_core.stages.denoising")
    node = module.defined.get("_QUALITY_FUSION_HANDLERS") if module else None
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    for row in value.elts if isinstance(value, ast.Tuple | ast.List) else ():
        if isinstance(row, ast.Tuple) and isinstance(row.elts[0], ast.Constant):
            yield ast.unparse(row.elts[1]), str(row.elts[0].value)
