"""Find the conditions that upstream's Python sets for a call, in an op and its callees, and where a refused call goes.

Calls are followed by name within upstream's folder of kernels. A helper's parameters are replaced by the caller's
arguments. Methods and computed names are not followed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

from kda_tools.knowledge.extract_launches import Launches, has_decorator
from kda_tools.knowledge.extract_needs import FALLBACK, any_of, as_texts, conjuncts, negated, parameters, shape_locals
from kda_tools.knowledge.wheel_source import Module, Source, Symbol

ASIDE = re.compile(r"\.jit\.|jit_kernel\.utils$|\.common\.")
"""Modules that build, load and choose kernels: their errors do not depend on a call's arguments."""
DEEPEST = 4
"""Most levels of calls that are followed below the op."""
LONGEST_ARGUMENT = 40
"""Longest argument, in characters, that replaces a helper's parameter. A longer one is a computation."""


class Refusal(Enum):
    """The result by which a function refuses a call. Raising always refuses."""

    RAISES = "only raising"
    NONE = "None"
    FALSE = "False or None"
    REASON = "a text, not None"


@dataclass(frozen=True)
class Place:
    """A function that is being read, and the call through which it was reached."""

    module: Module
    function: ast.FunctionDef
    refusal: Refusal
    names: Mapping[str, ast.expr] = field(default_factory=dict)
    """Name in this function -> the expression for it in the op's names."""
    depth: int = 0
    own: bool = False
    """Whether the function's result is the op's result."""
    raised: bool = False
    """Whether a refusal makes the caller raise."""
    caught: bool = False
    """Whether what is raised is caught again."""

    def refuses(self, body: list[ast.stmt]) -> bool:
        """Whether a block ends in a refusal, or sets a flag by which a later block refuses."""
        last = body[-1] if body else None
        if isinstance(last, ast.Assign) and isinstance(last.value, ast.Constant) and last.value.value is True:
            return ast.unparse(last.targets[0]) in self.flags
        if not isinstance(last, ast.Return) or self.refusal is Refusal.RAISES:
            return isinstance(last, ast.Raise)
        value = last.value.value if isinstance(last.value, ast.Constant) else last.value
        if self.refusal is Refusal.REASON:
            return isinstance(last.value, ast.Constant | ast.JoinedStr) and value is not None
        if value is None:
            return not isinstance(self.function.returns, ast.Constant)  # a function annotated `-> None` just ends here
        return value is False and self.refusal is Refusal.FALSE

    def raising(self, body: list[ast.stmt]) -> bool:
        """Whether a block's refusal raises."""
        last = body[-1]
        return (
            self.flags.get(ast.unparse(last.targets[0]), False)
            if isinstance(last, ast.Assign)
            else isinstance(last, ast.Raise)
        )

    @cached_property
    def flags(self) -> dict[str, bool]:
        """Name of a flag -> whether the block that refuses if the flag is true raises."""
        tests = [one for one in ast.walk(self.function) if isinstance(one, ast.If) and isinstance(one.test, ast.Name)]
        return {
            ast.unparse(one.test): isinstance(one.body[-1], ast.Raise)
            for one in tests
            if not isinstance(one.body[-1], ast.Assign) and self.refuses(one.body)
        }


@dataclass
class ConditionReader:
    """Reads the conditions of one op. Dictionaries without values serve as ordered sets."""

    source: Source
    inside: tuple[str, ...]
    """Prefixes of the modules whose functions are followed."""
    folder: str
    """Folder with CUDA C++."""
    launching: dict[Symbol, bool]
    """Function -> whether it launches a kernel; a cache that all ops share."""
    needs: dict[str, None] = field(default_factory=dict)
    raises: dict[str, None] = field(default_factory=dict)
    falls_back: dict[str, None] = field(default_factory=dict)
    followed: set[Symbol] = field(default_factory=set)
    _seen: set[tuple[Symbol, Refusal, str]] = field(default_factory=set)

    def read(self, symbol: Symbol, refusal: Refusal) -> None:
        """Read a function in its own names; for a wrapper or a site, the functions that it wraps or rejects with."""
        for found, keyword in self._functions(symbol):
            self._enter(found, Refusal.REASON if keyword == "reject_reason" else refusal)

    def _enter(self, symbol: Symbol, refusal: Refusal, outer: Place | None = None, call: ast.Call | None = None,
               given: tuple[ast.expr, ...] = (), raised: bool = False, answers: bool = False) -> bool:  # fmt: skip
        """Read a function; returns whether it gave conditions, or was read before."""
        module = self.source.module(symbol.module)
        node = module.defined.get(symbol.name) if module else None
        if isinstance(node, ast.ClassDef):
            node = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        if module is None or not isinstance(node, ast.FunctionDef) or has_decorator(node, "jit", "triton_jit"):
            return False
        place = Place(module, node, refusal, own=refusal is Refusal.NONE, raised=raised)
        if outer and call:
            arguments = {name: self._own(outer, value) for name, value in parameters(node, call).items()}
            short = {name: one for name, one in arguments.items() if len(ast.unparse(one)) <= LONGEST_ARGUMENT}
            own = outer.own and answers
            place = replace(place, names=shape_locals(node, short), depth=outer.depth + 1, own=own, caught=outer.caught)
        names = {name: ast.unparse(one) for name, one in place.names.items()}
        key = (symbol, refusal, f"{names} {[ast.unparse(one) for one in given]}")
        if key in self._seen or place.depth > DEEPEST:
            return key in self._seen
        self._seen.add(key)
        self.followed.add(symbol)
        before = len(self.needs) + len(self.raises)
        self._block(place, node.body, given)
        return len(self.needs) + len(self.raises) > before

    def _block(
        self, place: Place, body: list[ast.stmt], given: tuple[ast.expr, ...], after: Iterable[ast.stmt] = ()
    ) -> None:
        """Read statements in order. `given`: conditions under which they run, in the op's names. `after`: next ones."""
        left: list[ast.expr] = []
        for index, node in enumerate(body):
            if isinstance(node, ast.If):
                self._branch(place, node, body[index + 1 :] or list(after), given)
                if _leaves(node.body) and not place.refuses(node.body):
                    left.append(node.test)
                    if place.depth and _accepts(place, node.body[0]):
                        given = (*given, self._own(place, negated(node.test)))
            elif isinstance(node, ast.Assert):
                self._need(place, node.test, given, raised=True)
            elif place.refuses([node]) and left and place.refusal is not Refusal.REASON:
                self._need(place, any_of(left), given, isinstance(node, ast.Raise))
            elif isinstance(node, ast.Return) and node.value is not None:
                self._result(place, node.value, given)
            elif isinstance(node, ast.For | ast.While | ast.With | ast.Try):
                caught = place.caught or (isinstance(node, ast.Try) and bool(node.handlers))
                self._block(replace(place, caught=caught), node.body, given)
            else:
                self._calls(place, node, given)

    def _branch(self, place: Place, node: ast.If, rest: list[ast.stmt], given: tuple[ast.expr, ...]) -> None:
        yes, no = self._own(place, node.test), self._own(place, negated(node.test))
        then, other = (*given, yes), (*given, no)
        if place.refuses(node.body):
            self._need(place, negated(node.test), given, place.raising(node.body))
            self._away(place, node.body[-1])
            other = given
        elif place.refuses(node.orelse):
            self._need(place, node.test, given, place.raising(node.orelse))
            self._away(place, node.orelse[-1])
            then = given
        elif place.refusal is Refusal.NONE and (node.orelse or _leaves(node.body)):
            tail = node.orelse or rest
            here, there = self._launches(place, node.body), self._launches(place, tail)
            if here and not there and _computes(tail):
                self._need(place, node.test, given, raised=False)
                self._away(place, tail[-1])
                then = given
            elif there and not here and _computes(node.body):
                self._need(place, negated(node.test), given, raised=False)
                self._away(place, node.body[-1])
                other = given
        self._calls(place, node.test, given)
        self._block(place, node.body, then, () if isinstance(node.body[-1], ast.Return) else rest)
        self._block(place, node.orelse, other)

    def _result(self, place: Place, value: ast.expr, given: tuple[ast.expr, ...]) -> None:
        """Read a returned value: a predicate's conjuncts, or the function that it calls, with the same refusal."""
        if isinstance(value, ast.IfExp):
            self._block(place, [ast.If(value.test, [ast.Return(value.body)], [ast.Return(value.orelse)])], given)
        elif place.refusal is Refusal.FALSE and isinstance(value, ast.BoolOp | ast.Compare | ast.UnaryOp | ast.Call):
            self._need(place, value, given, raised=False)
        elif isinstance(value, ast.Call) and (target := self._target(place, value)):
            self._calls(place, value, given, but=value)
            for found, _ in self._functions(target):
                self._enter(found, place.refusal, place, value, given, place.raised, answers=True)
        else:
            self._calls(place, value, given)

    def _need(self, place: Place, condition: ast.expr, given: tuple[ast.expr, ...], raised: bool) -> None:
        """Record a condition; for a call of a predicate, the predicate's own conditions."""
        raised = (raised or place.raised) and not place.caught
        for one in conjuncts(condition):
            asked, refusal = _asked(one)
            call = self._assigned(place, asked)
            target = self._target(place, call) if call else None
            within = self._functions(target) if target else ()
            if call and any(self._enter(found, refusal, place, call, given, raised) for found, _ in within):
                continue
            if isinstance(one, ast.UnaryOp) and ast.unparse(one.operand) in place.flags:
                continue  # the block that sets the flag is read separately
            texts = as_texts(self._own(place, one), [negated(other) for other in given])
            (self.raises if raised else self.needs).update(dict.fromkeys(texts))

    def _calls(self, place: Place, node: ast.AST, given: tuple[ast.expr, ...], but: ast.AST | None = None) -> None:
        """Read every function called in `node`, because it may raise."""
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and call is not but and (target := self._target(place, call)):
                for found, _ in self._functions(target):
                    self._enter(found, Refusal.RAISES, place, call, given)

    def _away(self, place: Place, last: ast.stmt) -> None:
        """Record where a refused call goes, if the op's own code shows it."""
        if not place.own or not isinstance(last, ast.Return):
            return
        value = last.value
        name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            self.falls_back["returns None: the caller takes its own path"] = None
        elif isinstance(value, ast.Call) and (self._target(place, value) or FALLBACK.search(name.rpartition(".")[2])):
            self.falls_back[name] = None
        else:
            self.falls_back["PyTorch's operators, in the op itself"] = None

    def _assigned(self, place: Place, node: ast.expr | None) -> ast.Call | None:
        """The call itself, or the call whose result a name holds; None if there is no single one."""
        if isinstance(node, ast.NamedExpr):
            node = node.value
        if isinstance(node, ast.Name):
            values = [
                one.value
                for one in ast.walk(place.function)
                if isinstance(one, ast.Assign) and any(isinstance(x, ast.Name) and x.id == node.id for x in one.targets)
            ]
            node = values[0] if len(values) == 1 else None
        return node if isinstance(node, ast.Call) else None

    def _target(self, place: Place, call: ast.Call) -> Symbol | None:
        found = self.source.defining_symbol(place.module, place.function, call.func)
        return found if found and found.module.startswith(self.inside) and not ASIDE.search(found.module) else None

    def _functions(self, symbol: Symbol) -> Iterator[tuple[Symbol, str | None]]:
        """The function of that name, or the functions that it wraps, each with the keyword that passes it."""
        module = self.source.module(symbol.module)
        node = module.defined.get(symbol.name) if module else None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield symbol, None
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            words = [(word.value, word.arg) for word in node.value.keywords if word.arg == "reject_reason"]
            for value, keyword in [*((one, None) for one in node.value.args), *words]:
                if isinstance(value, ast.Name) and (found := self.source.resolve(Symbol(symbol.module, value.id))):
                    yield found, keyword

    def _own(self, place: Place, node: ast.expr) -> ast.expr:
        return self.source.written_out(place.module, node, place.names)

    def _launches(self, place: Place, body: Iterable[ast.stmt]) -> bool:
        """Whether statements reach a kernel."""
        for one in (x for statement in body for x in ast.walk(statement)):
            found = self.source.defining_symbol(place.module, place.function, one)
            if found is None or not found.module.startswith(self.inside):
                continue
            if found not in self.launching:
                launches = Launches(self.source, self.folder)
                for reached in self.source.reach([found], self.inside):
                    module = self.source.module(reached.module)
                    if module and (node := module.defined.get(reached.name)):
                        launches.look(reached.name, module, node)
                self.launching[found] = bool(launches.languages)
            if self.launching[found]:
                return True
        return False


def _leaves(body: list[ast.stmt]) -> bool:
    last = body[-1]
    return isinstance(last, ast.Return) or (isinstance(last, ast.If | ast.Try) and _leaves(last.body))


def _accepts(place: Place, node: ast.stmt) -> bool:
    """Whether a helper's statement accepts the call, or returns without a further check."""
    value = node.value if isinstance(node, ast.Return) else node
    if value is None or (isinstance(value, ast.Constant) and value.value is None):
        return place.refusal is Refusal.RAISES
    return isinstance(value, ast.Constant) or (isinstance(value, ast.Name) and value.id.isupper())


def _computes(body: list[ast.stmt]) -> bool:
    """Whether a block returns a computed result, not an existing or an empty one."""
    value = body[-1].value if body and isinstance(body[-1], ast.Return) else None
    return isinstance(value, ast.Call | ast.BinOp) and "empty" not in ast.unparse(value)


def _asked(condition: ast.expr) -> tuple[ast.expr, Refusal]:
    """The expression that decides the condition, and its result that means a refusal."""
    if isinstance(condition, ast.Compare) and ast.unparse(condition.comparators[0]) == "None":
        return condition.left, Refusal.REASON if isinstance(condition.ops[0], ast.Is) else Refusal.NONE
    return condition, Refusal.FALSE
