"""Inserts a dispatch to a port before the body of a public function, which is found in the syntax tree."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path
from textwrap import indent
from typing import Any

from kda_judge.contract.errors import UsageError
from kda_tools.port.insertions import Insertion

WIDTH = 88
"""Line length of SGLang's formatter, in columns."""
FIRST = "# KDA's kernels first. What they do not take goes on below, as before."
"""The comment above what is inserted."""
REGISTERS = "register_custom_op"
"""SGLang's function that makes an op of PyTorch from a function."""
REPLAYS = "replay_launches"
"""SGLang's decorator that repeats the launches of a call's first run. It sees Triton's alone: a function that returns
nothing, and whose first run had none that it saw, is never run again."""


def dispatch(text: str, where: Path, package: str, functions: Sequence[Callable[..., Any]]) -> list[Insertion]:
    """Insertions into the module `text` that make its functions of these names try those of `package` first.

    Raises:
        UsageError: a function is missing, its parameters do not fit the solution's, or its launches are repeated
            without it; names it.
    """
    tree = parsed(text, where)
    found = imports(text, where, package, [*map(try_name, functions)])
    for function in functions:
        node = definition(tree, function.__name__, where)
        if returns_nothing(function) and REPLAYS in map(ast.unparse, node.decorator_list):
            raise UsageError(f"{where}:{node.lineno}: {node.name}: expected a result, or no {REPLAYS}")
        found.append(Insertion(_head_of(node, text, where) - 1, _front(node, function, where)))
    return found


def parsed(text: str, where: Path) -> ast.Module:
    """The syntax tree of a module of SGLang.

    Raises:
        UsageError: it does not parse; names file and line.
    """
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise UsageError(f"{where}:{error.lineno}: expected Python, got: {error.msg}") from None


def _head_of(node: ast.FunctionDef, text: str, where: Path) -> int:
    """The line (from 1) of a function's first statement behind its docstring, or of the comment above it.

    Another port's lines begin with a comment: what goes between them could not be taken back in any order.
    """
    body = node.body
    first = body[1] if ast.get_docstring(node) is not None and len(body) > 1 else body[0]
    if first.lineno == node.lineno:
        raise UsageError(f"{where}:{node.lineno}: {node.name}: expected a body on lines of its own")
    line: int = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))])
    lines = text.splitlines()
    while lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


def into_models(text: str, where: Path, sites: Mapping[str, str], names: Mapping[str, str]) -> list[Insertion]:
    """Insertions into the module `text` that put lines at the head of functions, and of the `forward` of classes.

    `sites`: class or function -> its lines. `names`: what the lines may call -> the module that has it. It is imported
    from there if they do; `one as other` is called `other`.

    Raises:
        UsageError: a function, a class, or its `forward`, is missing; names it.
    """
    tree = parsed(text, where)
    lines = "".join(sites.values())
    modules: dict[str, list[str]] = {}
    for name, module in names.items():
        if re.search(rf"\b{name.split()[-1]}\(", lines):
            modules.setdefault(module, []).append(name)
    found = [one for module, used in sorted(modules.items()) for one in imports(text, where, module, used)]
    for name, inserted in sites.items():
        block = next((one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name), None)
        node = _forward(block, where) if block else definition(tree, name, where)
        pad = " " * (8 if block else 4)
        found.append(Insertion(_head_of(node, text, where) - 1, indent(f"{FIRST}\n{inserted.strip()}\n", pad)))
    return found


def _forward(block: ast.ClassDef, where: Path) -> ast.FunctionDef:
    for node in block.body:
        if isinstance(node, ast.FunctionDef) and node.name == "forward":
            return node
    raise UsageError(f"{where}: expected a class {block.name} with a method forward, found none")


def definition(tree: ast.Module, name: str, where: Path) -> ast.FunctionDef:
    """The first function of this name on the module's top level; later ones replace it on other platforms.

    For `name = register_custom_op(inner, ...)` it is `inner`: what stands there runs in eager mode and, since the op is
    opaque, under torch.compile as well.
    """
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    if (inner := registered(tree, name)) and inner != name:
        return definition(tree, inner, where)
    raise UsageError(f"{where}: expected a function {name} on its top level, found none")


def missing_arguments(text: str, where: Path, functions: Sequence[Callable[..., Any]]) -> dict[str, frozenset[str]]:
    """Name of each function -> the solution's arguments that the module's function of that name does not have."""
    tree, found = parsed(text, where), {}
    for function in functions:
        theirs = {name for name, _, _ in _named(definition(tree, function.__name__, where), where)}
        found[function.__name__] = frozenset(inspect.signature(function).parameters.keys() - theirs)
    return found


def registered(tree: ast.Module, name: str) -> str | None:
    """The function of which `name = register_custom_op(function, ...)` makes an op; None where no op is made so."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            made = node.value
            if isinstance(made, ast.Call) and ast.unparse(made.func) == REGISTERS and made.args:
                return ast.unparse(made.args[0])
    return None


def try_name(function: Callable[..., Any]) -> str:
    """The name of the port's function that does a call, or returns None if it does not take the call."""
    return f"try_{function.__name__}"


def returns_nothing(function: Callable[..., Any]) -> bool:
    """Whether a public function works in place and returns nothing."""
    return inspect.signature(function).return_annotation in (None, "None")


def imports(text: str, where: Path, module: str, names: Sequence[str]) -> list[Insertion]:
    """Insertions that import names from a module of SGLang, in isort's order within the first run of imports."""
    tree = parsed(text, where)
    run = list(takewhile(_is_import, dropwhile(lambda node: not _is_import(node), tree.body)))
    own = [node for node in run if _source(node).partition(".")[0] == "sglang"]
    same = [node for node in own if isinstance(node, ast.ImportFrom) and node.module == module]
    if same and same[0].names[0].lineno > same[0].lineno and not any(" as " in name for name in names):
        return [Insertion(_among(same[0].names, name), f"    {name},\n") for name in names]
    together = sorted((name for name in names if " as " not in name), key=_by_kind)
    groups = [*([together] if together else []), *([name] for name in names if " as " in name)]
    inserted = "".join(_import(module, group) for group in sorted(groups, key=lambda group: _by_kind(group[0])))
    if not own:
        outer = [node for node in run if not getattr(node, "level", 0)]
        has_docstring = ast.get_docstring(tree) is not None
        last = outer[-1] if outer else tree.body[0] if has_docstring else None
        return [Insertion(last.end_lineno or 0, f"\n{inserted}") if last else Insertion(0, inserted)]
    after = next((node for node in own if _source(node).lower() > module.lower()), None)
    # Where ports alone import from SGLang, the empty line above came with the first of them: nothing may go between.
    if after is None or all("kda_" in _source(node) for node in own):
        return [Insertion(own[-1].end_lineno or 0, inserted)]
    line, lines = after.lineno - 1, text.splitlines()
    while lines[line - 1].startswith("#"):
        line -= 1
    return [Insertion(line, inserted)]


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _source(node: ast.stmt) -> str:
    """The module that an import is from; empty for a relative one. `import a` comes before `from b import c`."""
    if isinstance(node, ast.ImportFrom):
        return "" if node.level else str(node.module)
    return "sglang" if isinstance(node, ast.Import) and node.names[0].name.partition(".")[0] == "sglang" else ""


def _among(names: Sequence[ast.alias], name: str) -> int:
    """The line (from 0) of a name in a list of names with one a line."""
    behind = next((one for one in names if _by_kind(one.name) > _by_kind(name)), None)
    return behind.lineno - 1 if behind else int(names[-1].end_lineno or 0)


def _by_kind(name: str) -> tuple[bool, bool, str]:
    """The order of names in an import: constants, classes, all else."""
    return not name.isupper(), not name[0].isupper(), name


def _import(package: str, names: Sequence[str]) -> str:
    line = f"from {package} import {', '.join(names)}\n"
    if len(line) <= WIDTH + 1:
        return line
    return f"from {package} import (\n" + "".join(f"    {name},\n" for name in names) + ")\n"


def _front(node: ast.FunctionDef, function: Callable[..., Any], where: Path) -> str:
    """The lines to insert before a body: they call the port, and go on to the body if it returns None."""
    arguments, conditions = _passed(node, function, where)
    name = try_name(function)
    pad = " " * 4
    lines = [FIRST]
    inner = ""
    if conditions:
        lines.append(f"if {' and '.join(conditions)}:")
        inner = pad
    call = f"kda_result = {name}({', '.join(arguments)})"
    if len(f"{pad}{inner}{call}") > WIDTH:
        lines += [f"{inner}kda_result = {name}(", *(f"{inner}{pad}{one}," for one in arguments), f"{inner})"]
    else:
        lines.append(f"{inner}{call}")
    lines += [f"{inner}if kda_result is not None:"]
    lines += [f"{inner}{pad}return" if returns_nothing(function) else f"{inner}{pad}return kda_result"]
    return "".join(f"{pad}{line}\n" for line in lines)


def _passed(node: ast.FunctionDef, function: Callable[..., Any], where: Path) -> tuple[list[str], list[str]]:
    """The arguments for the port's call, and conditions on the parameters that the solution does not have."""
    known = dict(inspect.signature(function).parameters)
    arguments: list[str] = []
    conditions = []
    for name, keyword, default in _named(node, where):
        if name not in known:
            if default is None:
                raise UsageError(
                    f"{where}:{node.lineno}: {node.name} has the argument {name}, without a default, which "
                    "the solution does not know"
                )
            conditions.append(_is_default(name, default))
            continue
        parameter = known.pop(name)
        if keyword or parameter.kind is parameter.KEYWORD_ONLY or any("=" in one for one in arguments):
            arguments.append(f"{name}={name}")
        else:
            arguments.append(name)
    missing = [name for name, parameter in known.items() if parameter.default is parameter.empty]
    if missing:
        raise UsageError(
            f"{where}:{node.lineno}: {node.name} has no argument {', '.join(missing)}, which the solution needs"
        )
    positional = [one for one in arguments if "=" not in one]
    order = [name for name in inspect.signature(function).parameters if name in positional]
    if order != positional or (known and positional != list(inspect.signature(function).parameters)[: len(positional)]):
        arguments = [one if "=" in one else f"{one}={one}" for one in arguments]
    return arguments, conditions


def _named(node: ast.FunctionDef, where: Path) -> Iterator[tuple[str, bool, ast.expr | None]]:
    """`parameters` of a function that has no others."""
    if node.args.vararg or node.args.kwarg:
        raise UsageError(f"{where}:{node.lineno}: {node.name}: expected named parameters, got * or **")
    return parameters(node)


def parameters(node: ast.FunctionDef) -> Iterator[tuple[str, bool, ast.expr | None]]:
    """For each named parameter: its name, whether it is keyword-only, and its default."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults: list[ast.expr | None] = [*([None] * (len(plain) - len(given.defaults))), *given.defaults]
    for argument, default in zip(plain, defaults, strict=True):
        yield argument.arg, False, default
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield argument.arg, True, default


def _is_default(name: str, default: ast.expr) -> str:
    if isinstance(default, ast.Constant) and default.value is False:
        return f"not {name}"
    if isinstance(default, ast.Constant) and (default.value is None or default.value is True):
        return f"{name} is {default.value}"
    return f"{name} == {ast.unparse(default)}"
