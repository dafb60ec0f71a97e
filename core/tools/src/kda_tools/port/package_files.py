"""Makes the package that a port adds: the task's export in `kernel/`, and code that decides whether it gets a call."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable
from textwrap import fill
from typing import Any

from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import provenance
from kda_tools.models.apply_site import replacements
from kda_tools.models.chain_sites import Site
from kda_tools.port import support
from kda_tools.port.block_files import BLOCK, LAYOUTS, block_function, layouts_text
from kda_tools.port.dispatch_edit import WIDTH, try_name
from kda_tools.port.layouts import DIFFUSION, Tree, called_from, classes
from kda_tools.port.lean_ops import lean_module
from kda_tools.port.support import LICENSE, MYPY, SUPPORT
from kda_tools.port.tree_format import formatted
from kda_tools.project.export.prune import prune
from kda_tools.project.export.readme import origin_json, port_readme
from kda_tools.project.export.sources import (
    collect,
    exact_ops,
    relative,
    with_docstring,
    with_plain_tables,
    without_unused_tables,
)

KERNEL = "kernel"
"""The export's folder in the package."""
INVISIBLE = {f"{SUPPORT}/cubin.py", f"{SUPPORT}/cuda_cpp.py"}
"""Files that launch kernels without Triton's JIT. `replay_launches` would not repeat these launches."""
SWITCH = "SGLANG_DISABLE_KDA_KERNELS"
"""The environment variable that turns the ports of a process off."""
PLAIN = re.compile(r"take(\s+)(?:a\s+)?plain\s+PyTorch(?:\s+path)?(,[^:]*)?:\s+see\s+`why_not`")
"""In docstrings of solutions: where the calls go that the kernels do not take."""
TIERS = {
    "exact": "made to give the bits of SGLang's own kernels",
    "lossless": "SGLang's maths and precision of every operand and accumulator, rounded elsewhere",
    "high": "a lower precision somewhere than SGLang's own kernels",
}

HEAD = (
    LICENSE
    + '''# KDA extension provenance: KDA-Pilot, task {task}, commit {commit}.
"""{title}.

{told}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

'''
)
IN_FRONT = "Each `try_` function answers None for a call that the kernels do not take: SGLang's own code goes on then."
GATED = (
    "Off until a request's quality level mounts `sites/kda_{op}_site.py`, as `_QUALITY_FUSION_HANDLERS` says. "
    + IN_FRONT
)
COMPARED = "Its test compares them. "
EXACT = (
    "On wherever they can run, each signature after its first call gave the bits of SGLang's own function: `exact.py`. "
    + IN_FRONT
)
UNGATED = "{whom} no quality levels: the kernels are on wherever they can run. " + IN_FRONT
SWITCHED = f"`{SWITCH}=1` in the environment turns them off."
NEW = "No model calls these ops yet: whoever does mounts them behind a site of that level."
CALLED = "They are on in {classes} wherever they can run."
ASKING = (
    "Off until a request's quality level mounts `sites/kda_{op}_site.py`, as `_QUALITY_FUSION_HANDLERS` says. Then "
    "they are on in {classes}."
)
RUNS = "kda_runs"
"""The function by which lines in a model ask whether the kernels run at all."""
ASK = f'''
def {RUNS}(x: torch.Tensor) -> bool:
    """Whether a model calls the ops for this tensor: on an NVIDIA GPU, unless they are turned off."""
    return x.is_cuda and torch.version.hip is None and not _DISABLED{{mounted}}
'''
ABOUT = (
    f"`{KERNEL}/` is the export of a task of KDA-Pilot: README.md says what it is, provenance.json which files of "
    "which commit. Importing this module imports neither Triton nor a kernel."
)
DISABLED = f'_DISABLED = os.environ.get("{SWITCH}") == "1"\n'
FUNCTIONS = '''
_functions: dict[str, Callable[..., Any]] = {{}}


def _function(name: str) -> Callable[..., Any]:
    """The function `name` of the export, imported and wrapped when it is first called."""
    found = _functions.get(name)
    if found is None:
{load}
        found = _functions[name] = {wrapped}
    return found
'''
OPEN_FACADE = '''
def _open(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels are asked at all: no trace, no gradients, an NVIDIA GPU, and a level that allows them."""
    if _DISABLED or torch.compiler.is_compiling() or {closed} or not is_cuda():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
'''
OPEN_JIT = '''
@cache
def _is_cuda() -> bool:
    """Asked late: {why}."""
    from {module} import {name}

    return bool({name}{call}())


def _open(*tensors: torch.Tensor | None) -> bool:
    """Whether the kernels are asked at all: no trace, no gradients, an NVIDIA GPU."""
    if _DISABLED or torch.compiler.is_compiling() or not _is_cuda():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
'''
ASKED = {
    DIFFUSION: {
        "why": "the platform may be a plug-in's",
        "module": "sglang.multimodal_gen.runtime.platforms",
        "name": "current_platform",
        "call": ".is_cuda",
    },
    "llm": {"why": "its package imports much", "module": "sglang.srt.utils.common", "name": "is_cuda", "call": ""},
}
"""Family -> the function of SGLang by which its models ask about the GPU, and why a port imports it late."""
TRY = '''
def {try_name}{signature}:
    """`{name}`, or None for a call that the kernels do not take."""
    if not _open({tensors}):
        return None
    return _function("{name}")({arguments})
'''
GRADIENTS = '''
def _recorded(*tensors: torch.Tensor | None) -> bool:
    """Whether a graph or a tape is being made of the call: then the registered op has to be seen."""
    if torch.compiler.is_compiling():
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
'''
WHOLE = '''
def {name}{signature}:
    """{first_line}

    `{kernel}/` has the details; what its kernels do not take goes a plain PyTorch path there.
    """
    if _recorded({tensors}):
        from .{kernel} import {name} as registered

        return registered({arguments})
    return _function("{name}")({arguments})
'''


def package_files(
    task: Task, tree: Tree, functions: list[Callable[..., Any]], new: bool, exact: bool = False
) -> dict[str, str]:
    """The text of every file of the package by its path.

    `functions` are ported. `new`: the tree has none of them. `exact`: the port gives upstream's bits.
    """
    names = [one.__name__ for one in functions]
    exported = with_plain_tables(task, collect(task, runtime=True))
    exported["__init__.py"] = with_docstring(task, exported["__init__.py"], "The README beside this folder says more.")
    numerics = tier(task, exact)
    place, init = support.relative_package(tree, task), "__init__.py"
    files = {f"{place}/{KERNEL}/{name}": _leaner(name, text, place, new, exact) for name, text in exported.items()}
    files[f"{place}/{LAYOUTS}"] = _reworded(layouts_text(), new)  # kept only where `kda_block` imports it
    for replayed in (tree.has_levels(task), False):
        files[f"{place}/{init}"] = _init(task, tree, functions, new, replayed, numerics)
        cut = prune({**files, **support.uncut_files()}, [f"{place}/{init}"])
        if not INVISIBLE & set(cut):
            break
    files = without_unused_tables({name.removeprefix(f"{place}/"): cut[name] for name in files if name in cut})
    files[f"{KERNEL}/{init}"] += f"\n__all__ = {sorted(names)}\n"
    files |= {name: LICENSE + text for name, text in files.items() if name.endswith(".py") and name != init}
    files = formatted(files)
    package = tree.package(task).replace("/", ".")
    shared = f"{package.removesuffix(place.replace('/', '.'))}{SUPPORT}"
    files["README.md"] = port_readme(task, package, shared, names, _about(task, tree, names, new, numerics), exact)
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sorted(files.items())}
    return {**files, "provenance.json": origin_json(task, hashes)}


def _reworded(text: str, new: bool) -> str:
    """A file of the export whose comments name what a port has: no `why_not`, for old functions no plain path."""
    end = r"take\1a plain PyTorch path\2" if new else r"are\1left to SGLang's own code\2"
    text = PLAIN.sub(end, text)
    if not new:
        text = text.replace("so does a call", "so is a call").replace(", and the path for the rest", "")
    return MYPY.sub("", text).replace("`kda_runtime", f"`{SUPPORT}")


def _leaner(name: str, text: str, place: str, new: bool, exact: bool) -> str:
    """A file of the export with the shared package in the runtime's place, and ops without what the port needs not."""
    if not name.endswith(".py"):
        return text
    text = _reworded(lean_module(text, plain=new, exact=exact), new)
    text = relative(text, f"{place}/{KERNEL}/{name}".count("/"), SUPPORT)
    return text.replace(f"{SUPPORT}.op import", f"{SUPPORT}.op_with_plain import") if new else text


def dispatched(task: Task, exact: bool = False) -> list[Callable[..., Any]]:
    """The public functions with an op of their own; the others call one of these, in SGLang's code as in ours.

    `exact`: only those that can give upstream's bits.
    """
    solution = task.load("solution")
    wanted = exact_ops(task) if exact else task.config.ops
    found = [getattr(solution, name) for name in solution.__all__ if hasattr(getattr(solution, name), "kda_op")]
    return [one for one in found if one.kda_op.name == one.__name__ and one.__name__ in wanted]


def tier(task: Task, exact: bool) -> str:
    """The port's tier in SGLang's terms: `exact` if that was asked for, else the tier in the contract."""
    return "exact" if exact else task.config.task.numerics


def is_gated_by_bits(numerics: str, tree: Tree, task: Task, new: bool) -> bool:
    """Whether a port of this tier is switched by comparing its bits with SGLang's, not by a request's quality level."""
    return tree.has_levels(task) and not new and numerics == "exact"


def is_gated(numerics: str, tree: Tree, task: Task, new: bool) -> bool:
    """Whether a port of this tier has a gate: in front of SGLang's functions, or of new ops of other bits in models."""
    calling = numerics != "exact" and bool(called_from(task, tree.layout, numerics))
    return tree.has_levels(task) and (not new or calling)


def gate_name(op: str) -> str:
    """The name of a port's gate."""
    return f"KDA_{op.upper()}"


def _init(task: Task, tree: Tree, functions: list[Callable[..., Any]], new: bool, replayed: bool, numerics: str) -> str:
    facade, exact = tree.has_levels(task), is_gated_by_bits(numerics, tree, task, new)
    shared = f"{'.' * (support.relative_package(tree, task).count('/') + 2)}{SUPPORT}"
    parts = (ABOUT, _numerics(task, tree, new, numerics))
    text = HEAD.format(
        task=task.folder,
        commit=provenance.git_state(checkout_root()).commit or "unknown",
        title=task.config.task.title,
        told="\n\n".join(fill(part, WIDTH) for part in parts),
    )
    called = classes(task, tree, numerics)
    if called or not new:
        text = text.replace("from collections", "import os\nfrom collections", 1)
    gated = is_gated(numerics, tree, task, new)
    if facade:
        if not new:
            text += "from sglang.kernels.ops.diffusion.common.platform import is_cuda\n"
        if gated:
            site = f"sglang.kernels.ops.diffusion.sites.kda_{task.op}_site"
            text += f"from {site} import {gate_name(task.op)}\n"
        if exact:
            names = [one.__name__ for one in functions]
            hosts = "".join(f'    "{op}": "{module}",\n' for op, module in _hosts(task, tree, names).items())
            text += f"from {shared}.exact import checked, own\n\n_HOSTS = {{\n{hosts}}}\n"
    elif not new:
        text = text.replace("from typing import Any\n", "from functools import cache\nfrom typing import Any\n", 1)
    wrapper = "whole" if new else "kernels_only"
    # Where nobody records the launches, `Op.call` with its memory per signature costs least.
    load = [f"from {shared}.{'recorded' if replayed or new else 'eager'} import {wrapper}", "from . import kernel"]
    wrapped = f"{wrapper}(getattr(kernel, name))"
    if replayed:
        load.insert(0, "from sglang.kernels.ops.diffusion.common.fast_launch import replay_launches\n")
        wrapped = f"replay_launches({wrapped})"
    if exact:
        wrapped = f"checked({gate_name(task.op)}, getattr(kernel, name), _HOSTS[name], {wrapped})"
    closed = f"{gate_name(task.op)}.disabled or own.active" if exact else f"not {gate_name(task.op)}.mounted"
    text += "\n" + DISABLED if called or not new else ""
    text += FUNCTIONS.format(load="\n".join(f"        {line}" if line else "" for line in load), wrapped=wrapped)
    if new:
        text += "\n" + GRADIENTS
    else:
        text += "\n" + (OPEN_FACADE.format(closed=closed) if facade else OPEN_JIT.format(**ASKED[task.family]))
    for function in functions:
        text += "\n" + _function(function, new)
    names = [one.__name__ if new else try_name(one) for one in functions]
    asked = _for_models(called, names, f" and {gate_name(task.op)}.mounted" if gated else "")
    text += "".join("\n" + one for one in asked.values())
    return text + "\n\n__all__ = [" + ", ".join(f'"{name}"' for name in sorted([*names, *asked])) + "]\n"


def _for_models(called: list[Site], ops: list[str], mounted: str) -> dict[str, str]:
    """Name -> text of the functions that lines in models call besides the ops."""
    found = {RUNS: ASK.format(mounted=mounted)} if called else {}
    return found | ({BLOCK: block_function(RUNS, ops)} if any(site.layout for site in called) else {})


def _hosts(task: Task, tree: Tree, ops: list[str]) -> dict[str, str]:
    """Op -> the module of SGLang's own function, for the given ops."""
    held = [one for one in replacements([task]) if one.version == tree.layout.value and one.function in ops]
    return {one.function: one.module for one in held}


def _numerics(task: Task, tree: Tree, new: bool, numerics: str) -> str:
    """How the kernels round, and when they are used."""
    by_bits = is_gated_by_bits(numerics, tree, task, new)
    ungated = UNGATED.format(whom="This release has" if task.family == DIFFUSION else "Language models have")
    called = ", ".join(dict.fromkeys(f"`{one.holder}`" for one in classes(task, tree, numerics))) if new else ""
    asking = ASKING if is_gated(numerics, tree, task, new) else CALLED
    front = asking.format(op=task.op, classes=called) if called else NEW
    gate = front if new else EXACT if by_bits else GATED.format(op=task.op) if tree.has_levels(task) else ungated
    compared = COMPARED if numerics == "exact" and not by_bits else ""
    return f"Numerics: {numerics}, {TIERS[numerics]}. {compared}{gate}" + ("" if gate == NEW else f" {SWITCHED}")


def _about(task: Task, tree: Tree, ops: list[str], new: bool, numerics: str) -> list[str]:
    """What the README says about the calls and the numerics."""
    asked = [f"- `{module}.{op}` asks `try_{op}` first." for op, module in _hosts(task, tree, ops).items()]
    calling = [
        f"- `{one.module}.{one.holder}{'.forward' * bool(one.class_)}` calls `{one.op}`."
        for one in classes(task, tree, numerics)
    ]
    names = f"Its functions are {', '.join(f'`{op}`' for op in ops)}."
    who = ["\n".join([names, *(["", *calling] if calling else [])])] if new else ["\n".join([*asked, *calling])]
    return [*who, _numerics(task, tree, new, numerics)]


def _function(function: Callable[..., Any], new: bool) -> str:
    signature = inspect.signature(function)
    parts = []
    for name, parameter in signature.parameters.items():
        parts.append(f"{name}={name}" if parameter.kind is parameter.KEYWORD_ONLY else name)
    tensors = [name for name, p in signature.parameters.items() if "Tensor" in inspect.formatannotation(p.annotation)]
    return (WHOLE if new else TRY).format(
        name=function.__name__,
        try_name=try_name(function),
        signature=_signature(signature),
        tensors=", ".join(tensors),
        arguments=", ".join(parts),
        first_line=(inspect.getdoc(function) or "").partition("\n")[0],
        kernel=KERNEL,
    )


def _signature(signature: inspect.Signature) -> str:
    """The parameters, one a line, as SGLang's formatter has them."""
    lines = []
    starred = False
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            lines.append("*")
        annotation = inspect.formatannotation(parameter.annotation)
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        lines.append(f"{name}: {annotation}{default}")
    return "(\n" + "".join(f"    {line},\n" for line in lines) + ") -> Any"
