"""Cut the modules of an export down to what is reachable. Names decide, so the result may keep too much.

A top-level definition stays if kept code of its module names it, or if kept code of another module imports it (or
imports the module and has an attribute of that name, or a string, for `getattr`). A method or property stays if a kept
attribute or string anywhere has its name. Dunder methods, fields and other statements of a kept class always
stay, and so do statements that define nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import PurePosixPath

WIDTH = 120
CALLED_BY_OTHERS = frozenset({"data_ptr"})
"""Methods that Triton calls."""
BASES = frozenset({"Protocol", "Generic", "NamedTuple", "Exception", "RuntimeError", "ValueError"})
"""Base classes from elsewhere that call only dunder methods of their subclasses."""
EMPTY_SECTION = re.compile(r"^( *)# ---.*\n\n*(?=\1# ---|\Z|(?!\1)\S)", re.MULTILINE)
"""A heading with nothing left below it."""


@dataclass(eq=False)
class _Part:
    """A statement of a module, or a method."""

    lines: range
    """Line indices: includes decorators, comments directly above, and the docstring after an assignment."""
    uses: Sequence[ast.AST] = ()
    names: frozenset[str] = frozenset()
    """The names that it defines; a part that defines none always stays."""
    methods: tuple[_Part, ...] = ()
    imports: ast.Import | ast.ImportFrom | None = None
    typing: ast.If | None = None
    """The block `if TYPE_CHECKING` that contains the part."""


@dataclass(frozen=True)
class _Uses:
    """What the code below a node names, without docstrings."""

    names: frozenset[str]
    attributes: frozenset[tuple[str, str]]
    """The first name of an expression, and the attribute that it has of it."""
    strings: frozenset[str]
    words: frozenset[str]
    """Words of the strings that may be code to execute."""
    imports: tuple[ast.Import | ast.ImportFrom, ...]


@dataclass(eq=False)
class _Module:
    path: str
    lines: list[str]
    parts: tuple[_Part, ...]
    whole: bool
    wanted: set[str] = field(default_factory=set)
    """Names that its own kept code uses, and names that other modules import from it."""
    attributes: set[str] = field(default_factory=set)
    """Names of the attributes that its kept code uses, and its strings, any of which `getattr` may get."""
    elsewhere: frozenset[str] = frozenset()
    """What its imports of other packages' modules are called: an attribute of these is no method of a class here."""
    importers: set[_Module] = field(default_factory=set)
    """Modules that import this module itself, not names from it."""
    kept: set[_Part] = field(default_factory=set)
    followed: set[ast.alias] = field(default_factory=set)
    """Imported names whose modules are reached."""


def prune(files: Mapping[str, str], whole: Collection[str]) -> dict[str, str]:
    """The parts of `files` (relative path -> text) reachable from the files of `whole`, which are kept entire."""
    return _Pruning(files, whole).result()


class _Pruning:
    def __init__(self, files: Mapping[str, str], whole: Collection[str]) -> None:
        self.files = {path: _without_fallback(path, text, files) for path, text in files.items()}
        trees = {path: _tree(text) for path, text in self.files.items() if path.endswith(".py")}
        own = {node.name for tree in trees.values() for node in _nodes(tree) if isinstance(node, ast.ClassDef)}
        self.modules = {path: self._module(path, tree, path in whole, own | BASES) for path, tree in trees.items()}
        self.reached: dict[str, _Module] = {}
        for path in whole:
            self._reach(path)
        before = None
        while before != (before := self._extent()):
            for module in list(self.reached.values()):
                for part in module.parts:
                    self._look_at(module, part)

    def result(self) -> dict[str, str]:
        """The pruned texts, in the order of `files`."""
        texts = {path: one.lines if one.whole else self._left(one) for path, one in self.reached.items()}
        return {
            path: "".join(texts[path]) if path in self.modules else text
            for path, text in self.files.items()
            if path in texts or path not in self.modules
        }

    def _module(self, path: str, tree: ast.Module, whole: bool, known: Collection[str]) -> _Module:
        lines = self.files[path].splitlines(keepends=True)
        outer = [one for node in _nodes(tree) if isinstance(node, ast.Import) for one in node.names]
        parts = tuple(_parts(tree.body, lines, known))
        return _Module(path, lines, parts, whole, elsewhere=frozenset(map(_bound, outer)))

    def _extent(self) -> tuple[int, ...]:
        return tuple(
            len(one.wanted) + len(one.attributes) + len(one.importers) + len(one.kept) for one in self.reached.values()
        )

    def _wanted_names(self, module: _Module) -> set[str]:
        return module.wanted.union(*(one.attributes for one in module.importers))

    def _look_at(self, module: _Module, part: _Part) -> None:
        if part.imports is not None:
            names = [one for one in part.imports.names if module.whole or _bound(one) in self._wanted_names(module)]
            self._follow(module, part.imports, names)
            module.wanted.update({"TYPE_CHECKING"} if names and part.typing else ())
        elif module.whole or not part.names or part.names & self._wanted_names(module):
            self._keep(module, part)
            others = (one.attributes for one in self.reached.values()) if part.methods else ()
            called = CALLED_BY_OTHERS.union(*others)
            for method in part.methods:
                if module.whole or method.names & called:
                    self._keep(module, method)

    def _keep(self, module: _Module, part: _Part) -> None:
        if part in module.kept:
            return
        module.kept.add(part)
        for uses in map(_uses, part.uses):
            module.wanted |= uses.names | uses.words
            module.attributes |= {name for first, name in uses.attributes if first not in module.elsewhere}
            module.attributes |= uses.strings | uses.words
            for one in uses.imports:
                self._follow(module, one, one.names)

    def _follow(self, module: _Module, node: ast.Import | ast.ImportFrom, names: Sequence[ast.alias]) -> None:
        if not isinstance(node, ast.ImportFrom) or not node.level:
            return  # an import from another package
        for alias in (one for one in names if one not in module.followed):
            module.followed.add(alias)
            if (path := _found(_place(module.path, node, alias.name), self.modules)) is not None:
                self._reach(path).importers.add(module)
            elif (path := _found(_place(module.path, node), self.modules)) is not None:
                self._reach(path).wanted.add(alias.name)

    def _reach(self, path: str) -> _Module:
        for folder in PurePosixPath(path).parents:
            if (init := (folder / "__init__.py").as_posix()) in self.modules:
                self.reached.setdefault(init, self.modules[init])
        return self.reached.setdefault(path, self.modules[path])

    def _left(self, module: _Module) -> list[str]:
        """The text that stays of a module."""
        lines: list[str | None] = list(module.lines)
        wanted = self._wanted_names(module) | {"annotations"}
        typed: dict[ast.If, int] = {}
        for part in [*module.parts, *(method for one in module.parts for method in one.methods)]:
            names = [one for one in part.imports.names if _bound(one) in wanted] if part.imports else []
            if part.typing is not None:
                typed[part.typing] = typed.get(part.typing, 0) + len(names)
            if part.imports is not None and names and len(names) < len(part.imports.names):
                lines[part.lines.start : part.lines.stop] = [None] * len(part.lines)
                lines[part.lines.start] = _import(part.imports, names)
            elif not names and part not in module.kept:
                lines[part.lines.start : part.lines.stop] = [None] * len(part.lines)
        for block in (block for block, names in typed.items() if not names):
            lines[block.lineno - 1] = None
        text = EMPTY_SECTION.sub("", "".join(_spaced(lines))).strip("\n")
        return [f"{text}\n"] if text else []


def _parts(body: Sequence[ast.stmt], lines: list[str], known: Collection[str]) -> Iterator[_Part]:
    for node, behind in zip_longest(body, body[1:]):
        own = _lines(node, lines)
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield _Part(range(node.lineno - 1, own.stop), imports=node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and _all_imports(node):
            for part in _parts(node.body, lines, known):
                part.typing = node
                yield part
        elif isinstance(node, ast.ClassDef):
            methods = [one for one in node.body if _is_method(one)] if {*map(_name, node.bases)} <= set(known) else []
            methods = methods if len(methods) < len(node.body) else methods[1:]  # a class has to have a body
            uses = [
                *node.decorator_list,
                *node.bases,
                *node.keywords,
                *(one for one in node.body if one not in methods),
            ]
            parts = tuple(_Part(_lines(one, lines), (one,), _targets(one)) for one in methods)
            yield _Part(own, uses, _targets(node), parts)
        elif not _is_text(node):
            end = (behind.end_lineno if behind and _is_text(behind) and _is_assignment(node) else None) or own.stop
            yield _Part(range(own.start, end), (node,), _targets(node))


def _lines(node: ast.stmt, lines: list[str]) -> range:
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]) - 1
    while first and lines[first - 1].lstrip().startswith("#"):
        first -= 1
    return range(first, node.end_lineno or node.lineno)


def _targets(node: ast.stmt) -> frozenset[str]:
    """The names that a statement defines; none if it may do something else."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return frozenset({node.name})
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    flat = [each for one in targets for each in (one.elts if isinstance(one, ast.Tuple) else [one])]
    named = frozenset(one.id for one in flat if isinstance(one, ast.Name))
    return named if len(named) == len(flat) else frozenset()


@lru_cache(maxsize=1024)
def _tree(text: str) -> ast.Module:
    """The parsed text. Nobody changes it: exports of several tasks, and a port's package again, share most files."""
    return ast.parse(text)


@lru_cache(maxsize=1024)
def _nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@lru_cache(maxsize=1 << 15)
def _uses(node: ast.AST) -> _Uses:
    nodes = list(_walk(node))
    strings = {one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    attributes = (one for one in nodes if isinstance(one, ast.Attribute))
    return _Uses(
        names=frozenset(one.id for one in nodes if isinstance(one, ast.Name)),
        attributes=frozenset((ast.unparse(one).partition(".")[0], one.attr) for one in attributes),
        strings=frozenset(strings),
        words=frozenset(word for one in strings if "\n" in one for word in re.findall(r"\w+", one)),
        imports=tuple(one for one in nodes if isinstance(one, ast.Import | ast.ImportFrom)),
    )


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, without docstrings."""
    if not _is_text(node):
        yield node
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_assignment(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign | ast.AnnAssign)


def _is_method(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and not (node.name.startswith("__") and node.name.endswith("__"))


def _all_imports(node: ast.If) -> bool:
    return not node.orelse and all(isinstance(one, ast.Import | ast.ImportFrom) for one in node.body)


def _name(base: ast.expr) -> str:
    """`dsl.Launch[C]` -> `Launch`."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _place(path: str, node: ast.ImportFrom, name: str = "") -> PurePosixPath:
    """The path of the module that a relative import names, without a suffix."""
    return PurePosixPath(path).parents[node.level - 1].joinpath(*(node.module or "").split("."), name)


def _found(place: PurePosixPath, files: Collection[str]) -> str | None:
    """The file of the module or package at `place`; None if `files` has neither."""
    return next((one for one in (f"{place}.py", (place / "__init__.py").as_posix()) if one in files), None)


def _without_fallback(path: str, text: str, files: Mapping[str, str]) -> str:
    """Replace a `try: from .a import b` whose module is not exported by the body of its `except`.

    If that body returns, what follows in the function goes too.
    """
    lines, tree = text.splitlines(keepends=True), _tree(text if path.endswith(".py") else "")
    blocks = [node for node in _nodes(tree) if isinstance(node, ast.Module | ast.FunctionDef)]
    for block, node in sorted(((one, node) for one in blocks for node in one.body), key=lambda pair: -pair[1].lineno):
        if not isinstance(node, ast.Try) or not isinstance(first := node.body[0], ast.ImportFrom) or not first.level:
            continue
        names = [""] if first.module else [one.name for one in first.names]
        if all(_found(_place(path, first, name), files) is None for name in names):
            instead = node.handlers[0].body
            last = block.body[-1] if isinstance(instead[-1], ast.Return) else node
            pad = " " * node.col_offset
            lines[node.lineno - 1 : last.end_lineno] = [f"{pad}{ast.unparse(one)}\n" for one in instead]
    return "".join(lines)


def _import(node: ast.Import | ast.ImportFrom, names: list[ast.alias]) -> str:
    """The source line of an import, with only these names."""
    pad = " " * node.col_offset
    imports = [f"{one.name} as {one.asname}" if one.asname else one.name for one in names]
    if isinstance(node, ast.Import):
        return f"{pad}import {', '.join(imports)}\n"
    begin = f"{pad}from {'.' * node.level}{node.module or ''} import "
    if len(line := begin + ", ".join(imports)) <= WIDTH:
        return f"{line}\n"
    return f"{begin}(\n" + "".join(f"{pad}    {one},\n" for one in imports) + f"{pad})\n"


def _spaced(lines: list[str | None]) -> Iterator[str]:
    """The remaining lines; a cut leaves as many empty lines as its longest run of them before, inside or after."""
    most = empty = 0
    for line in lines:
        if line == "\n":
            empty += 1
            most = max(most, empty)
        elif line is None:
            empty = 0
        else:
            yield "\n" * most
            yield line
            most = empty = 0
