"""Read the Python source in a wheel: parse modules when they are needed, and resolve the names in them."""

from __future__ import annotations

import ast
import copy
import hashlib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

from kda_judge.contract.errors import UsageError
from kda_tools.knowledge.extract_needs import Written

FACADES = ("sglang.kernels.ops.diffusion",)
"""Packages whose `_EXPORTS` maps a public name to the module that defines it."""
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True, order=True)
class Symbol:
    """A name at the top level of a module."""

    module: str
    name: str


@dataclass(frozen=True)
class Module:
    """One parsed module."""

    name: str
    path: str
    """Path of the module's file in the wheel."""
    tree: ast.Module
    sha256: str

    @cached_property
    def defined(self) -> dict[str, Definition]:
        """Top-level definitions, in branches of `if` and `try` too; the first definition of a name counts."""
        found: dict[str, Definition] = {}
        for node in _flat(self.tree.body):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, node)
        return found

    @cached_property
    def constants(self) -> dict[str, ast.expr]:
        """Top-level name -> its value, if that is a constant, tuple, set or arithmetic."""
        return {
            name: node.value
            for name, node in self.defined.items()
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Constant | ast.Tuple | ast.Set | ast.BinOp)
        }

    @cached_property
    def imported(self) -> dict[str, Symbol]:
        """Local name -> the imported symbol (with an empty name for a whole module). Imports in functions count too.

        If a name is imported twice, as in the branches of a test for the platform, the first import counts.
        """
        found: dict[str, Symbol] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom):
                base = self.absolute(node)
                for alias in node.names:
                    found.setdefault(alias.asname or alias.name, Symbol(base, alias.name))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        found.setdefault(alias.asname, Symbol(alias.name, ""))
        return found

    @cached_property
    def packages(self) -> frozenset[str]:
        """The top-level packages that the module imports."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").partition(".")[0])
        return frozenset(found)

    def absolute(self, node: ast.ImportFrom) -> str:
        """The absolute name of the module that an import names."""
        if not node.level:
            return node.module or ""
        package = self.name.split(".")
        keep = len(package) - node.level + self.path.endswith("__init__.py")
        return ".".join([*package[:keep], *([node.module] if node.module else [])])


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _flat(node.body)
            yield from _flat(node.orelse)
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                yield from _flat(handler.body)


@dataclass
class Source:
    """A wheel's modules."""

    wheel: Path
    _archive: zipfile.ZipFile = field(init=False, repr=False)
    _modules: dict[str, Module | None] = field(default_factory=dict, init=False, repr=False)
    _exports: dict[str, dict[str, Symbol]] = field(default_factory=dict, init=False, repr=False)
    _uses: dict[Symbol, set[Symbol]] = field(default_factory=dict, init=False, repr=False)
    _local: dict[int, dict[str, Symbol]] = field(default_factory=dict, init=False, repr=False)
    """`id` of a definition -> its imports. An id stays valid, because parsed modules are kept."""

    def __post_init__(self) -> None:
        try:
            self._archive = zipfile.ZipFile(self.wheel)
        except (OSError, zipfile.BadZipFile) as error:
            raise UsageError(f"{self.wheel}: expected a wheel, got: {error}") from None
        self.names = frozenset(self._archive.namelist())

    def text(self, path: str) -> str:
        """The text of a file in the wheel."""
        return self._archive.read(path).decode("utf-8", "replace")

    def module(self, name: str) -> Module | None:
        """The module of that dotted name; None if the wheel has none or this interpreter cannot parse it."""
        if name not in self._modules:
            base = name.replace(".", "/")
            path = next((one for one in (f"{base}.py", f"{base}/__init__.py") if one in self.names), None)
            self._modules[name] = self._parsed(name, path) if path else None
        return self._modules[name]

    def _parsed(self, name: str, path: str) -> Module | None:
        data = self._archive.read(path)
        try:
            return Module(name, path, ast.parse(data), hashlib.sha256(data).hexdigest())
        except SyntaxError:
            return None

    def modules_under(self, package: str) -> list[str]:
        """Dotted names of all modules of a package, without the `__init__` modules."""
        prefix = package.replace(".", "/") + "/"
        paths = sorted(path for path in self.names if path.startswith(prefix) and path.endswith(".py"))
        return [path[:-3].replace("/", ".") for path in paths if not path.endswith("__init__.py")]

    def exports(self, facade: str) -> dict[str, Symbol]:
        """Public name -> the symbol that defines it, by the package's table `_EXPORTS`."""
        if facade not in self._exports:
            self._exports[facade] = self._table(facade)
        return self._exports[facade]

    def _table(self, facade: str) -> dict[str, Symbol]:
        module = self.module(facade)
        node = module.defined.get("_EXPORTS") if module else None
        table = ast.literal_eval(node.value) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else {}
        return {
            name: Symbol(owner if owner.startswith("sglang.") else f"{facade}.{owner}", name)
            for name, owner in table.items()
        }

    def resolve(self, symbol: Symbol) -> Symbol | None:
        """The defining symbol, found through facades and re-exports; None if the wheel does not define it."""
        for _ in range(8):
            if symbol.module in FACADES and (owner := self.exports(symbol.module).get(symbol.name)):
                symbol = owner
            module = self.module(symbol.module)
            if module is None or not symbol.name:
                return None
            if symbol.name in module.defined:
                return symbol
            if symbol.name in module.imported:
                symbol = module.imported[symbol.name]
                continue
            return None
        return None

    def uses(self, symbol: Symbol) -> set[Symbol]:
        """The top-level symbols of the wheel that the definition of a symbol names."""
        if symbol not in self._uses:
            self._uses[symbol] = self._used(symbol)
        return self._uses[symbol]

    def _used(self, symbol: Symbol) -> set[Symbol]:
        module = self.module(symbol.module)
        node = module.defined.get(symbol.name) if module else None
        if module is None or node is None:
            return set()
        found = {self.defining_symbol(module, node, one) for one in ast.walk(node)}
        return {where for where in found if where is not None} - {symbol}

    def defining_symbol(self, module: Module, inside: ast.AST, node: ast.AST) -> Symbol | None:
        """The defining symbol of a name, or of an attribute of a name, inside a definition of the module."""
        if id(inside) not in self._local:
            self._local[id(inside)] = _local_imports(module, list(ast.walk(inside)))
        local = self._local[id(inside)]
        if isinstance(node, ast.Name):
            own = Symbol(module.name, node.id) if node.id in module.defined else None
            found = own or _named(module, local, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            base = _named(module, local, node.value.id)
            whole = "" if base is None else base.module if not base.name else f"{base.module}.{base.name}"
            found = Symbol(whole, node.attr) if base else None
        else:
            return None
        return self.resolve(found) if found else None

    def written_out(self, module: Module, node: ast.expr, names: Mapping[str, ast.expr]) -> ast.expr:
        """The expression with `names` and constants (the module's own or imported ones) replaced by their values."""
        write = Written(lambda name: names.get(name) or self._constant(module, name))
        return cast(ast.expr, write.visit(copy.deepcopy(node)))

    def _constant(self, module: Module, name: str) -> ast.expr | None:
        where = None if name in module.defined else module.imported.get(name)
        if where and (place := self.resolve(where)) and (other := self.module(place.module)):
            module, name = other, place.name
        value = module.constants.get(name)
        if value is None:
            return None
        write = Written(lambda other: None if other == name else self._constant(module, other))
        return cast(ast.expr, write.visit(copy.deepcopy(value)))

    def reach(self, starts: Iterable[Symbol], inside: tuple[str, ...]) -> set[Symbol]:
        """`starts` and all symbols they use, directly or not, in modules whose names begin with one of `inside`."""
        todo = list(starts)
        seen = set(todo)
        while todo:
            for one in self.uses(todo.pop()):
                if one not in seen and one.module.startswith(inside):
                    seen.add(one)
                    todo.append(one)
        return seen


def _local_imports(module: Module, nodes: list[ast.AST]) -> dict[str, Symbol]:
    """Local name -> symbol of the imports inside a definition, which hide those of the module."""
    found = {}
    for one in nodes:
        if isinstance(one, ast.ImportFrom):
            base = module.absolute(one)
            found.update({alias.asname or alias.name: Symbol(base, alias.name) for alias in one.names})
    return found


def _named(module: Module, local: dict[str, Symbol], name: str) -> Symbol | None:
    return local.get(name) or module.imported.get(name)
