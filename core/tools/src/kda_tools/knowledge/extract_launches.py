"""Find what a definition in upstream's source launches: kernels by name, their language, and the CUDA C++ it builds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kda_tools.knowledge.wheel_source import Definition, Module, Source

PACKAGES = {"cutlass": "cute", "flydsl": "flydsl"}
"""Imported package -> language of kernels that are decorated functions or methods."""
CALLS = {"sgl_kernel": "sycl", "prims_ts_gemm": "library"}
"""Module whose functions launch kernels -> language."""


@dataclass
class Launches:
    """What the definitions seen so far launch. Dictionaries without values serve as ordered sets."""

    source: Source
    folder: str
    """Folder with CUDA C++."""
    kernels: dict[str, None] = field(default_factory=dict)
    helpers: set[str] = field(default_factory=set)
    """Names that Triton functions use: a Triton function among them is a helper, not a kernel."""
    languages: dict[str, None] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)
    custom: dict[str, None] = field(default_factory=dict)

    def look(self, name: str, module: Module, node: Definition) -> None:
        """Add what one definition launches."""
        imports = module.packages
        if (
            isinstance(node, ast.FunctionDef)
            and has_decorator(node, "triton.jit", "triton_jit", "jit")
            and "triton" in imports
        ):
            self._triton(name)
            self.helpers |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - {name}
        elif isinstance(node, ast.Assign) and (made := _jitted(node.value)):
            self._triton(made)
        if _registered(node):
            self.custom[name] = None
        for method in ast.walk(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else ():
            if isinstance(method, ast.FunctionDef) and has_decorator(method, "cute.kernel", "flyc.kernel"):
                self.kernels[name if method is node else f"{name}.{method.name}"] = None
                self.languages.update(dict.fromkeys(PACKAGES[one] for one in PACKAGES if one in imports))
        for launcher, paths in _cuda(node):
            files = list(self._files(module, paths))
            named = [kernel for path in files for kernel in cuda_kernels(self.source.text(path))]
            self.kernels.update(dict.fromkeys(named or [launcher]))
            self.languages["cuda"] = None
            self.sources.update(dict.fromkeys(files))
        for one in ast.walk(node):
            if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id in CALLS:
                self.languages[CALLS[one.value.id]] = None
            elif isinstance(one, ast.Attribute) and ast.unparse(one).startswith("torch.ops.sgl_kernel."):
                self.languages["sycl" if "sycl" in module.path else "cuda"] = None

    def _triton(self, kernel: str) -> None:
        self.kernels[kernel], self.languages["triton"] = None, None

    def _files(self, module: Module, paths: Iterable[str]) -> Iterator[str]:
        """The existing files that `load_jit` names, in the common folder or in the module's own `csrc/`."""
        for path in paths:
            for base in (self.folder, module.path.rpartition("/")[0] + "/csrc/"):
                if f"{base}{path}" in self.source.names:
                    yield f"{base}{path}"


def cuda_kernels(source: str) -> Iterator[str]:
    """Names of the `__global__` functions of a C++ file; the plain name `kernel` gets its namespace in front."""
    for match in re.finditer(r"\b__global__\b", source):
        rest = re.sub(r"__\w+__\s*\([^)]*\)", " ", source[match.end() : match.end() + 400])
        if found := re.search(r"(\w+)\s*\(", rest):
            spaces = re.findall(r"\bnamespace\s+(\w+)", source[: match.start()])
            yield f"{spaces[-1]}::{found[1]}" if found[1] == "kernel" and spaces else found[1]


def _cuda(node: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Launcher's name and files of every `load_jit` in a definition."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "load_jit":
            words = {word.arg: word.value for word in call.keywords}
            files = ast.walk(words["cuda_files"]) if "cuda_files" in words else ()
            paths = [one.value for one in files if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            for pair in ast.walk(words["cuda_wrappers"]) if "cuda_wrappers" in words else ():
                if isinstance(pair, ast.Tuple) and pair.elts:
                    first = pair.elts[0]
                    stem = str(paths[0]).rpartition("/")[2].partition(".")[0] if paths else ""
                    name = first.value if isinstance(first, ast.Constant) else stem
                    yield str(name), [str(path) for path in paths]


def _registered(node: Definition) -> bool:
    if isinstance(node, ast.FunctionDef):
        return has_decorator(node, "register_custom_op")
    value = node.value if isinstance(node, ast.Assign) else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == "register_custom_op"


def _jitted(value: ast.expr | None) -> str | None:
    """The function's name in `triton.jit(...)(function)` or `triton.jit(function)`."""
    if isinstance(value, ast.Call) and "triton.jit" in ast.unparse(value.func):
        return next((ast.unparse(one) for one in value.args if isinstance(one, ast.Name)), None)
    return None


def has_decorator(node: ast.FunctionDef, *names: str) -> bool:
    """Whether a function has a decorator of one of these names, called or not."""
    texts = [ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list]
    return any(text == name or text.endswith(f".{name}") for text in texts for name in names)
