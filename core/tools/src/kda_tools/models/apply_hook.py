"""Replace a framework's functions by solutions, in memory, inside the processes that `kda apply` runs.

`install` puts an import finder before all others. It changes only the modules of the plan. After such a module is
executed, its public function is replaced. The new function tries the solution first. It calls upstream's own function
when the solution would take its plain PyTorch path. Other modules may already hold the function under a name of their
own, for example after a circular import: these names are replaced too.

This file imports only the standard library until the framework itself has imported PyTorch: a copy of it runs in the
processes of the command, beside copies of the solutions.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from .apply_counts import Counted, Counts  # a copy of both files is a package of another name

PLAN = "plan.json"
COUNTS = "KDA_APPLY_COUNTS"
"""The environment variable that names the folder of counters."""


APPLIED = "KDA_APPLY"
"""The environment variable that lists the replaced functions, for programs that record a run."""


class FellBack(Exception):
    """The solution's kernels do not take a call. Arguments: the op and its call, or only the reason as text."""

    @property
    def reason(self) -> str:
        """Why not, in words."""
        if len(self.args) == 1:
            return str(self.args[0])
        op, call = self.args
        return op.why_not(call) or "it has no elements"


def install(site: Path, counts: Path) -> None:
    """Replace functions from now on, by the plan in the folder `site`."""
    plan = json.loads((site / PLAN).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, Finder(plan, Counts(counts)))


class Finder(MetaPathFinder):
    """Finds modules as the other finders do, and replaces functions after a module of the plan is loaded."""

    def __init__(self, plan: dict[str, Any], counts: Counts) -> None:
        self._package: str = plan["package"]
        self._releases: dict[str, list[dict[str, str]]] = plan["releases"]
        self._counts = counts
        self._modules: dict[str, list[dict[str, str]]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The specification of the package or of a module of the plan; for others None, so the next finder is asked."""
        if fullname != self._package and fullname not in self._modules:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is not self and find is not None and (spec := find(fullname, path, target)) is not None:
                break
        else:
            return None
        if spec.loader is None:  # a folder that happens to have the name
            return spec  # type: ignore[no-any-return]
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if fullname == self._package:  # not in find_spec: a program may only check that the package exists
                self._begin()
            execute(module)
            for entry in self._modules.get(fullname, ()):
                self._replace(module, entry)

        spec.loader.exec_module = exec_module
        return spec  # type: ignore[no-any-return]

    def _begin(self) -> None:
        """Learn the release, and refuse one that is not in the plan."""
        self._modules.clear()
        try:
            version = importlib.metadata.version(self._package)
        except importlib.metadata.PackageNotFoundError:
            version = "of no known version"
        if version not in self._releases:
            self._counts.log_event("refused", version=version)
            raise ImportError(
                f"kda apply: {self._package} {version} is not known here; known are {', '.join(self._releases)}. "
                "Install one of these, or run the command without kda apply."
            )
        self._counts.log_event("began", version=version, command=sys.argv)
        for entry in self._releases[version]:
            self._modules.setdefault(entry["module"], []).append(entry)

    def _replace(self, module: ModuleType, entry: dict[str, str]) -> None:
        """Replace one function by its solution, or log why that failed; the command goes on in both cases."""
        name = entry["function"]
        try:
            self._demand_pinned(module, entry)
            solution = getattr(importlib.import_module(entry["solution"]), name)
            if "block" in entry:
                place = defer_in(module, entry, solution, self._counts)
                self._counts.log_event("replaced", function=name, places=[place])
                return
            original = getattr(module, name)
            replaced = replacement(solution, original, self._counts)
        except Exception as error:  # noqa: BLE001  # whatever it is, upstream's function still works
            self._counts.log_event("left", function=name, reason=f"{type(error).__name__}: {error}")
            return
        places = []
        for loaded in [other for key, other in sys.modules.items() if key.partition(".")[0] == self._package]:
            for bound in [key for key, value in list(vars(loaded).items()) if value is original]:
                setattr(loaded, bound, replaced)
                places.append(f"{loaded.__name__}.{bound}")
        self._counts.log_event("replaced", function=name, places=places)

    @staticmethod
    def _demand_pinned(module: ModuleType, entry: dict[str, str]) -> None:
        got = hashlib.sha256(Path(str(module.__file__)).read_bytes()).hexdigest()
        if got != entry["sha256"]:
            raise ValueError(f"{module.__file__}: expected the release's file, sha256 {entry['sha256']}, got {got}")


def defer_in(module: ModuleType, entry: dict[str, str], solution: Any, counts: Counts) -> str:
    """Make every later instance of the block's class, or a function, leave its part of the work to the solution."""
    from . import deferred_lines  # it imports PyTorch, as the module has done
    from .deferred_ways import WAYS

    block, place, op, way = entry["block"], entry["place"], entry["function"], WAYS[entry["kind"]]
    kind: Any = getattr(module, block)
    call = replacement(solution, way.ORIGINAL, counts)
    is_class = isinstance(kind, type)
    if not is_class:
        way.defer(deferred_lines.block_of(module, block), place, op, call)
        return f"{module.__name__}.{block}"
    make = kind.__init__
    way.put(module, place, (), op, call)

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        way.defer(self, place, op, call)

    kind.__init__ = made
    return f"{module.__name__}.{block}.{'forward' if entry['kind'] == 'ported' else place}"


def replacement(solution: Any, original: Any, counts: Counts) -> Callable[..., Any]:
    """A function that takes `original`'s place.

    Outside of a trace it calls the solution. If the solution would take its plain path or rejects the arguments, it
    calls `original` with the same arguments; nothing has been written by then. Inside a trace of torch.compile it is
    the solution. Its custom op decides only when the graph runs; it can then no longer call `original`, and takes the
    plain path instead. Replays of CUDA graphs call no Python function, so they are not counted.
    """
    from torch.compiler import is_dynamo_compiling

    op: Any = solution.kda_op
    name: str = solution.__name__
    taken = counts.slot(Counted(name, "taken"))
    type(op).refusal = FellBack
    _watch(op, counts)

    def also(*args: Any, **kwargs: Any) -> Any:
        call = solution.kda_call(*args, **kwargs)
        if isinstance(call, str):
            raise FellBack(call)
        return op.call(*call)

    def meaningless(*args: Any, **kwargs: Any) -> bool:
        """Whether the solution rejects these arguments, so that its ValueError was no fault inside the call."""
        try:
            op.check_call(solution.kda_call(*args, **kwargs))
        except ValueError:
            return True
        return False

    # A function may use the op of another function. Its `kda_call` then says which calls do not reach that op.
    run = solution if op.name == name else also

    @functools.wraps(solution)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return solution(*args, **kwargs)
        try:
            result = run(*args, **kwargs)
        except FellBack as why:
            reason = why.reason
        except ValueError as error:
            if not meaningless(*args, **kwargs):
                raise
            reason = str(error)
        else:
            counts.view[taken] += 1
            return result
        counts.add(Counted(name, "fell_back", reason))
        return original(*args, **kwargs)

    return replaced


def _watch(op: Any, counts: Counts) -> None:
    """Count calls of `op.run`, which only compiled graphs make; several functions may share the op, so wrap it once."""
    if "run" in vars(op):
        return
    run = op.run

    def watched(call: Any) -> Any:
        result = run(call)
        reason = op.why_not(call)
        counts.add(Counted(op.name, "compiled") if reason is None else Counted(op.name, "plain", reason))
        return result

    object.__setattr__(op, "run", watched)  # a plain assignment fails: the dataclass is frozen
