"""Check a solution and its evidence by program, at the beginning of every review.

The checks read text and records, and run nothing. A finding has to be looked at and answered; it proves no guilt.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract import solution_imports
from kda_judge.contract.tasks import Task
from kda_tools.campaign.events import Done
from kda_tools.campaign.measure import BASELINE

NEAR_EDGE = 0.5
"""Used share of the tolerance from which a row is reported: real inputs differ from those that the judge draws."""
THREADS = frozenset(
    {"threading", "multiprocessing", "concurrent", "subprocess", "asyncio", "signal", "atexit", "ctypes"}
)
MEMORIES = frozenset({"cache", "lru_cache", "cached_property", "WeakKeyDictionary", "WeakValueDictionary"})
STREAMS = frozenset(
    {"Stream", "ExternalStream", "stream", "set_stream", "wait_stream", "record_stream", "cudaStreamCreate"}
)
WATCHERS = frozenset(
    {
        *("inspect", "traceback", "_getframe", "settrace", "setprofile"),
        *("environ", "getenv", "perf_counter", "elapsed_time"),
    }
)
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
WRITERS = frozenset({"append", "add", "update", "setdefault", "pop", "extend", "clear", "insert"})
MAKERS = frozenset({"dict", "list", "set", "defaultdict", "OrderedDict", "deque", "Counter"})
SMALLEST_DIMENSION = 1_000
"""Smaller sizes are not reported: they are head sizes and blocks, which a kernel may well compare with."""


@dataclass(frozen=True)
class Seen:
    """One finding of the program."""

    check: str
    where: str
    text: str


def solution_findings(task: Task, last: Done | None) -> list[Seen]:
    """All findings in the task's solution, and in the evidence of the iteration that made it."""
    found = [Seen("imports", _where(task, line), line) for line in _imports(task)]
    for path in solution_imports.files(task.path / "solution"):
        try:
            tree = solution_imports.parsed(path)
        except (SyntaxError, ValueError):
            continue  # reported by `_imports`
        name = path.relative_to(task.path).as_posix()
        found += [
            Seen(check, f"{name}:{line}", text) for check, line, text in sorted(_in(tree, task), key=lambda one: one[1])
        ]
    return [*found, *(_evidence(task, last) if last is not None else [])]


def _imports(task: Task) -> list[str]:
    return solution_imports.problems(task.path / "solution", f"{task.folder}.solution")


def _where(task: Task, line: str) -> str:
    path, number, *_ = [*line.split(":"), ""]
    inside = Path(path)
    return f"{inside.relative_to(task.path) if inside.is_relative_to(task.path) else inside.name}:{number}"


def _in(tree: ast.Module, task: Task) -> Iterator[tuple[str, int, str]]:
    yield from _state(tree)
    yield from _names(tree)
    yield from _identities(tree, task)


def _state(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Code that could carry something from one call to the next."""
    for statement in tree.body:
        value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        made = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in MAKERS
        if (isinstance(value, CONTAINERS) and _written(tree, statement)) or made:
            yield (
                "state",
                statement.lineno,
                "a container at module level that code writes to: what does it keep between calls?",
            )
    for node in ast.walk(tree):
        if isinstance(node, (ast.Global, ast.Nonlocal)):
            yield "state", node.lineno, f"assigns {', '.join(node.names)} from inside a function: kept between calls?"
        if isinstance(node, ast.FunctionDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                if isinstance(default, CONTAINERS):
                    yield "state", node.lineno, f"{node.name} has a container as default, which all calls share"


def _written(tree: ast.Module, node: ast.stmt) -> bool:
    """Whether code changes the container that this statement makes."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    changed = set()
    for other in ast.walk(tree):
        if isinstance(other, ast.Subscript) and isinstance(other.ctx, (ast.Store, ast.Del)):
            changed.add(other.value)
        if isinstance(other, ast.Call) and isinstance(other.func, ast.Attribute) and other.func.attr in WRITERS:
            changed.add(other.func.value)
    return any(isinstance(one, ast.Name) and one.id in names for one in changed)


def _names(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    kinds = (
        ("state", MEMORIES, "remembers results: by what key, and never by a value?"),
        ("streams", STREAMS, "work must stay on the current stream"),
        ("threads", THREADS, "may start a thread or a process, or reach past Python"),
        ("benchmark", WATCHERS, "looks at who calls, at the environment or at a clock: why?"),
    )
    for node in ast.walk(tree):
        for name in _mentioned(node):
            for check, names, text in kinds:
                if name in names:
                    yield check, getattr(node, "lineno", 1), f"{name}: {text}"


def _mentioned(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.partition(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").partition(".")[0], *(alias.name for alias in node.names)]
    return [node.attr] if isinstance(node, ast.Attribute) else []


def _identities(tree: ast.Module, task: Task) -> Iterator[tuple[str, int, str]]:
    """Ids of rows and names of models in the code, and sizes of rows that it compares for equality."""
    ids = {row.id for row in task.workloads} | {model for row in task.workloads for model in row.models}
    sizes = {size for row in task.workloads for spec in row.inputs.values() for size in spec.shape}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in ids:
            yield "rows", node.lineno, f"names {node.value!r}: does anything know which row it is called for?"
        if isinstance(node, ast.Compare) and any(isinstance(op, (ast.Eq, ast.In)) for op in node.ops):
            numbers = [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and type(one.value) is int]
            for number in numbers:
                if number in sizes and number >= SMALLEST_DIMENSION:
                    yield (
                        "rows",
                        node.lineno,
                        f"compares with {number}, the size of a frozen row: what of its neighbours?",
                    )


def _evidence(task: Task, last: Done) -> Iterator[Seen]:
    """Rows that use much of the tolerance, break the promised numerics or are slower; and a lack of measurements."""
    where = f"iteration {last.iteration}"
    for row in last.rows:
        if row.used is not None and row.used >= NEAR_EDGE:
            yield Seen(
                "tolerance", f"{where}, {row.id}", f"uses {row.used:.0%} of its tolerance: what of other values?"
            )
        if task.config.task.numerics == "exact" and row.ulps.get(BASELINE, 0) > 0:
            text = f"{row.ulps[BASELINE]} ulp from upstream's bits, and the task promises numerics = 'exact'"
            yield Seen("numerics", f"{where}, {row.id}", text)
    if last.losses:
        yield Seen("rows", where, f"slower than the best before on {', '.join(last.losses)}")
    if last.gpu is None:
        yield Seen("evidence", where, "verified without a GPU: nothing was measured")
