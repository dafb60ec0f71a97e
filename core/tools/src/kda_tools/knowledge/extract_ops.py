"""Read a release's fused diffusion ops out of its wheel, without importing any of it.

An op is a public callable of upstream's folders of diffusion kernels, or one of another folder of kernels that the
diffusion runtime (`sglang/multimodal_gen`) imports by name. Names in the source decide what an op can launch and who
calls it: a name that is only reached through a string, a registry or an object's attribute is not found.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_tools.knowledge.extract_launches import Launches, has_decorator
from kda_tools.knowledge.extract_needs import host_checks
from kda_tools.knowledge.extract_registry import specs, tiers
from kda_tools.knowledge.follow_needs import ConditionReader, Refusal
from kda_tools.knowledge.op_facts import OpFacts, Release
from kda_tools.knowledge.wheel_source import FACADES, Module, Source, Symbol

RUNTIME = "sglang.multimodal_gen.runtime"
MODELS = f"{RUNTIME}.models"


@dataclass(frozen=True)
class Layout:
    """The packages and folders in which a generation of releases keeps its kernels."""

    kernels: str
    diffusion: str
    """Package with the diffusion kernels."""
    sources: str
    """Folder with CUDA C++."""


LAYOUTS = (
    Layout("sglang.kernels", "sglang.kernels.ops.diffusion", "sglang/kernels/jit/csrc/"),
    Layout("sglang.jit_kernel", "sglang.jit_kernel.diffusion", "sglang/jit_kernel/csrc/"),
)
NEIGHBOURS = ("activation", "layernorm", "norm", "quantization", "elementwise", "timestep_embedding")
"""Folders and files beside the diffusion kernels whose ops count if the runtime imports them: work bound by bytes.
Attention, GEMM and communication are left out: no task here is about them."""
PLUMBING = re.compile(r"^(load|prewarm|prepare|expand|swizzle|interleave|build_inv|pack_flux3)_|^tensors_equal$|_hint$")
"""Public names that are not ops: functions that load modules, prepare weights or tables, or serve other devices."""
ASIDE = re.compile(r"\.(common|ext|jit)\.|fallback|bitexact_gate$")
"""Modules without ops: fallbacks of other devices, C++ extensions that are not kernels."""
PREDICATE = re.compile(r"^_?(can_use|can|is|supports?|use|has|should)_|_supported$|_enabled$|^validate_|^_?check_")


def extract(wheel: Path, package: str = "sglang", version: str | None = None) -> Release:
    """The facts of a wheel.

    Raises:
        UsageError: the file is no wheel, is not named as one, or has no folder of diffusion kernels that is known here.
    """
    source, (_, named, *_) = Source(wheel), (*wheel.name.split("-"), "")
    if version is None and not named:
        raise UsageError(f"{wheel}: expected a wheel's name, such as {package}-0.5.23-py3-none-any.whl")
    layout = next((one for one in LAYOUTS if source.modules_under(one.diffusion)), None)
    if layout is None:
        places = " or ".join(one.diffusion.replace(".", "/") for one in LAYOUTS)
        raise UsageError(f"{wheel}: expected {places} in it, found neither: teach extract_ops.py the new layout")
    release = f"{package} {version or named}"
    return Reader(source, layout).release(release, hashlib.sha256(wheel.read_bytes()).hexdigest())


class Reader:
    """Reads the ops of one wheel."""

    def __init__(self, source: Source, layout: Layout) -> None:
        self.source, self.layout = source, layout
        self.inside = (layout.kernels,)
        self.tiers = dict(tiers(source, RUNTIME))
        self.launching: dict[Symbol, bool] = {}
        self.specs = list(specs(source, layout.diffusion))

    def release(self, name: str, sha256: str) -> Release:
        """All facts of the release."""
        runtime = [
            module
            for module in self.source.modules_under(RUNTIME)
            if not re.search(r"\.tests?\.|\.test_|\.benchmarks?\.", module)
        ]
        ops = sorted(self._ops(runtime))
        callers = self._callers(ops, runtime)
        models = self._models(ops, [module for module in runtime if module.startswith(f"{MODELS}.")])
        found = [self._facts(op, callers[op], models[op]) for op in ops]
        known = {op.path for op in found}
        files = [one.replace(".", "/") + ".py" for one in self.source.modules_under(self.layout.diffusion)]
        return Release(
            release=name,
            wheel_sha256=sha256,
            helpers=tuple(path for path in files if path not in known),
            op=tuple(sorted(found, key=lambda op: (op.path, op.name))),
        )

    def _ops(self, runtime: Iterable[str]) -> set[Symbol]:
        """Exports of the facade, targets of the registry, and what the runtime or a sibling imports by name."""
        exported = {one for facade in FACADES for one in self.source.exports(facade).values()}
        exported |= {target for target, _ in self.specs}
        named = {
            symbol
            for where in runtime
            if (module := self.source.module(where))
            for symbol in module.imported.values()
            if symbol.module.startswith((self.layout.diffusion, *self._neighbours()))
        }
        if not exported:  # a release without a facade: names that one file imports from another are public
            for where in self.source.modules_under(self.layout.diffusion):
                module = self.source.module(where)
                beside = module.imported.values() if module else ()
                named |= {one for one in beside if one.module.startswith(self.layout.diffusion)}
        found = {place for one in exported if (place := self.source.resolve(one)) and self._is_op(place, True)}
        return found | {place for one in named if (place := self.source.resolve(one)) and self._is_op(place, False)}

    def _neighbours(self) -> tuple[str, ...]:
        base = self.layout.diffusion.rpartition(".")[0]
        return tuple(f"{base}.{name}" for name in NEIGHBOURS)

    def _is_op(self, symbol: Symbol, exported: bool) -> bool:
        if symbol.name.startswith("_") or PLUMBING.search(symbol.name) or PREDICATE.search(symbol.name):
            return False
        if ASIDE.search(symbol.module) or not symbol.module.startswith(self.layout.kernels):
            return False
        module = self.source.module(symbol.module)
        node = module.defined.get(symbol.name) if module else None
        if isinstance(node, ast.FunctionDef):
            return not has_decorator(node, "jit", "triton_jit")
        return exported and isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)

    def _facts(self, symbol: Symbol, callers: set[str], models: set[str]) -> OpFacts:
        module = self.source.module(symbol.module)
        assert module is not None
        kernels, languages, sources, custom = self._launches(sorted(self.source.reach([symbol], self.inside)))
        guards = self._guards(symbol, module)
        asked = ConditionReader(self.source, self.inside, self.layout.sources, self.launching)
        asked.read(symbol, Refusal.NONE)
        for guard in guards:
            if Symbol(module.name, guard) not in asked.followed:
                asked.read(Symbol(module.name, guard), Refusal.FALSE)
        away = [*asked.falls_back, *(f"the caller's own path, where {guard} says no" for guard in guards)]
        if symbol.name in self.tiers:
            away.append("the model's own modules, where the site is rejected or the request's tier is lower")
        away += _platforms(module, symbol.name)
        return OpFacts(
            name=symbol.name,
            path=module.path,
            signature=_signature(module.defined[symbol.name], module),
            language=tuple(languages) or ("site" if symbol.name in self.tiers else "torch",),
            kernels=tuple(kernels),
            sources=tuple(sources),
            custom_op=tuple(custom),
            guards=tuple(guards),
            needs=tuple(_strictest(asked.needs)),
            raises=tuple(text for text in _strictest(asked.raises) if text not in asked.needs),
            host_checks=tuple(dict.fromkeys(text for path in sources for text in host_checks(self.source.text(path)))),
            falls_back=tuple(dict.fromkeys(away)) or ("nothing in the op: what it checks raises",),
            backends=tuple(backend for target, backend in self.specs if self.source.resolve(target) == symbol),
            quality=self._quality(symbol),
            callers=tuple(sorted(callers)),
            models=tuple(sorted(models)),
            sha256=module.sha256,
        )

    def _launches(self, reached: Iterable[Symbol]) -> tuple[list[str], list[str], list[str], list[str]]:
        """Kernels, languages, sources and custom ops among what an op reaches."""
        found = Launches(self.source, self.layout.sources)
        for one in reached:
            module = self.source.module(one.module)
            node = module.defined.get(one.name) if module else None
            if module is not None and node is not None:
                found.look(one.name, module, node)
        kernels = [name for name in found.kernels if name not in found.helpers]
        return kernels, list(found.languages), list(found.sources), list(found.custom)

    def _guards(self, symbol: Symbol, module: Module) -> list[str]:
        """Public predicates of the op's file whose name contains the op's; if none does, the file's only predicate."""
        public = [name for name in module.defined if re.match(r"can_use_|is_\w+_supported|\w+_device_supported", name)]
        core = re.sub(r"^(try_)?(fused_|fuse_)?|(_cuda|_kernel|_bitexact|_native)?_?$", "", symbol.name)
        close = [name for name in public if core and core in name]
        return close or (public if len(public) == 1 else [])

    def _quality(self, symbol: Symbol) -> str | None:
        if symbol.name in self.tiers:
            return self.tiers[symbol.name]
        if ".sites." not in symbol.module:
            return None
        module = self.source.module(symbol.module)
        return next((self.tiers[name] for name in (module.defined if module else ()) if name in self.tiers), None)

    def _callers(self, ops: Iterable[Symbol], runtime: Iterable[str]) -> dict[Symbol, set[str]]:
        found: dict[Symbol, set[str]] = {op: set() for op in ops}
        for where in runtime:
            module = self.source.module(where)
            if module is None:
                continue
            used = set(module.imported.values()).union(
                *(self.source.uses(Symbol(where, name)) for name in module.defined)
            )
            for one in used:
                if (target := self.source.resolve(one)) in found:
                    found[target].add(module.path.removeprefix("sglang/multimodal_gen/runtime/"))
        return found

    def _models(self, ops: Iterable[Symbol], models: Iterable[str]) -> dict[Symbol, set[str]]:
        found: dict[Symbol, set[str]] = {op: set() for op in ops}
        for where in models:
            module = self.source.module(where)
            starts = [Symbol(where, name) for name in module.defined] if module else []
            for one in self.source.reach(starts, (RUNTIME, self.layout.kernels)):
                if one in found:
                    found[one].add(where.removeprefix(f"{MODELS}.").replace(".", "/"))
        return found


def _strictest(texts: Iterable[str]) -> list[str]:
    """The conditions without those that another one implies: `a or b` if `b` is also there."""
    alone = {text for text in texts if " or " not in text}
    return [text for text in texts if text in alone or text.rpartition(" or ")[2] not in alone]


def _platforms(module: Module, name: str) -> Iterator[str]:
    """Lines `platform: replacement` for `name`: from `select_impl`, or from an `if` that tests for the platform."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _assigns(node, name):
            if ast.unparse(node.value.func) == "select_impl":
                for word in node.value.keywords:
                    named = " ".join(str(one.value) for one in ast.walk(word.value) if isinstance(one, ast.Constant))
                    yield f"{word.arg}: {named or ast.unparse(word.value)}"
        elif isinstance(node, ast.If):
            asked = re.findall(r"\bis_(npu|mps|cpu|musa|xpu|hip)\(\)", ast.unparse(node.test))
            for one in node.body if asked else ():
                if isinstance(one, ast.Assign) and _assigns(one, name):
                    yield f"{', '.join(asked)}: {ast.unparse(one.value)}"
                elif isinstance(one, ast.ImportFrom) and any((x.asname or x.name) == name for x in one.names):
                    yield f"{', '.join(asked)}: {one.module}"


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _signature(node: ast.AST, module: Module) -> str:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):  # a function that something wraps
        wrapped = next((module.defined.get(one.id) for one in node.value.args if isinstance(one, ast.Name)), None)
        return _signature(wrapped, module) if wrapped is not None else "a site that a quality tier mounts"
    if not isinstance(node, ast.FunctionDef):
        return "not a function"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}".replace("torch.", "")
