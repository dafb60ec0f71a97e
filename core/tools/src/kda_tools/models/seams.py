"""Find the places in SGLang's loaded modules that hold the tasks' ops, and put one of several arms there.

`upstream`  the release's own functions. On the CPU these cannot run, and the tasks' eager modules replace them.
`solution`  the tasks' solutions. With `portable`: their exports, which need only torch and triton. With `exact`: the
            solutions' ops that can give upstream's bits, set to do so, and upstream's own functions for the others.
`eager`     upstream's native PyTorch paths: layers run `forward_native`, no fusion is mounted, the ops are eager.
`plain`     as `upstream`, but the tasks' ops are eager.
`rounded`   as `plain`, with one more rounding of every output of these ops. The difference between `plain` and
            `rounded` shows what a single rounding of these outputs does to a model.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_tools.models import natives
from kda_tools.models.calls import Log
from kda_tools.models.chain_sites import Site, blocks, sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.deferred_ways import WAYS
from kda_tools.models.fitting import fitted, named
from kda_tools.project.export.sources import exact_ops

ARMS = ("upstream", "solution", "eager", "plain", "rounded")
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
"""Dtype -> the largest relative change of a number by one rounding to nearest."""


@dataclass
class Seam:
    """One op of a task and every place that holds it."""

    task: Task
    op: str
    arms: Mapping[str, Callable[..., Any]]
    solution: ModuleType
    signature: Callable[..., Any]
    """A function with upstream's arguments by their names."""
    places: set[tuple[str, str]] = field(default_factory=set)
    """(module, name in it) of every place that holds the op."""
    site: Site | None = None
    """The class or function that runs the op as several statements; None where the op's own function is called."""


class Seams:
    """All seams of a release; `use` puts an arm into all of them."""

    def __init__(
        self,
        tasks: Sequence[Task],
        release: str,
        solutions: Mapping[str, ModuleType],
        device: torch.device,
        exact: bool = False,
    ) -> None:
        self.device, self._exact = device, exact
        self.natives = natives.Natives(device)
        self.seams: list[Seam] = []
        self._noise = torch.Generator(device=device)
        self._model: torch.nn.Module | None = None
        for task in tasks:
            eager, solution = task.load("baseline.eager"), solutions[task.folder]
            for site in sites_of(task):
                if site.release == release:
                    self.seams.append(self._seam(task, site.op, WAYS[site.kind].ORIGINAL, eager, solution, site))
            arm = next((a for a in task.config.arms.values() if a.upstream == f"sglang-{release}"), None)
            if arm is None:
                continue
            upstream = task.load(arm.module)
            for op in upstream.__all__:
                self.seams.append(self._seam(task, op, getattr(upstream, op), eager, solution))
        self.find_places()

    def _seam(
        self,
        task: Task,
        op: str,
        upstream: Callable[..., Any],
        eager: ModuleType,
        solution: ModuleType,
        site: Site | None = None,
    ) -> Seam:
        for name, module in (("solution", solution), ("eager arm", eager)):
            if not callable(getattr(module, op, None)):
                raise UsageError(f"{task.folder}: its {name} has no {op}, which upstream's arm has")
        signature = named(upstream, getattr(solution, op))
        kept = site is None or site.keeps_bits(task)
        bits = not self._exact or (kept and self._gives_bits(task, getattr(solution, op)))
        if upstream is refuse:  # upstream runs statements; their ops are seams of other tasks
            arms = dict.fromkeys((*ARMS, "original"), upstream) | ({"solution": getattr(solution, op)} if bits else {})
            return Seam(task, op, arms, solution, signature, site=site)
        plain = fitted(getattr(eager, op), upstream)
        arms = {
            "upstream": upstream if self.device.type == "cuda" else plain,
            "original": upstream,
            "solution": fitted(getattr(solution, op), upstream),
            "eager": plain,
            "plain": plain,
            "rounded": self._rounding(task, op, plain, signature),
        }
        arms |= {} if bits else {"solution": arms["upstream"]}
        return Seam(task, op, arms, solution, signature, site=site)

    def _gives_bits(self, task: Task, solution: Any) -> bool:
        """Set a solution's op to give upstream's bits; False if it cannot."""
        with suppress(UsageError):
            if getattr(solution, "kda_op", None) and solution.kda_op.name in exact_ops(task):
                solution.kda_op.set_exact()
                return True
        return False

    def find_places(self) -> None:
        """Find every place of the ops in SGLang's loaded modules; call it again after a class is imported and has run.

        SGLang's facade module loads a name at its first use and then keeps it. So each op's name is read here, while
        it still gives upstream's function, and not later, when an arm may be in its place.
        """
        self.natives.find()
        facade = sys.modules.get(natives.FACADE)
        for seam in self.seams:
            if seam.site is not None:
                continue
            if facade is not None and seam.op in facade._EXPORTS:
                getattr(facade, seam.op)
            held = list(seam.arms.values())
            seam.places |= {  # known places stay, whatever function they hold now
                (known, name)
                for known, module in list(sys.modules.items())
                if known.startswith("sglang.")
                for name, value in list(vars(module).items())
                if any(value is one for one in held)
            }

    def attach(self, model: torch.nn.Module) -> None:
        """Look at this model from now on."""
        self._model = model
        self.find_places()
        self.natives.attach(model)

    def use(self, arm: str, log: Log | None = None, annotate: bool = False) -> None:
        """Put `arm` into every place. `log` counts the calls; with `annotate` a profile has a range for each call."""
        if arm not in ARMS:
            raise UsageError(f"arm {arm!r}: expected one of {', '.join(ARMS)}")
        self.natives.use(native=arm == "eager")
        self._noise.manual_seed(0)
        for seam in self.seams:
            call = seam.arms[arm]
            if call is refuse:
                self._defer(seam, call)
                continue
            if log is not None and not (self._exact and call is seam.arms["upstream"]):
                call = log.wrap(seam.task, seam.op, call, seam.signature, seam.solution if arm == "solution" else None)
            if annotate:
                call = _annotated(f"kda::{seam.task.folder}", call)
            for module, name in seam.places:
                setattr(sys.modules[module], name, call)
            self._defer(seam, call)

    def restore(self) -> None:
        """Put the release's own functions back, as if there had been no seams."""
        self.natives.use(native=False)
        for seam in self.seams:
            for module, name in seam.places:
                setattr(sys.modules[module], name, seam.arms["original"])
            self._defer(seam, seam.arms["original"])

    def _defer(self, seam: Seam, call: Callable[..., Any]) -> None:
        """Put `call` into the blocks of the seam's site; the release's own statements need nothing there."""
        if seam.site is None or self._model is None:
            return
        if found := list(blocks(self._model, seam.site)):
            way, place = WAYS[seam.site.kind], (sys.modules[seam.site.module], seam.site.place, found)
            if call is way.ORIGINAL:
                way.take_back(*place)
            else:
                way.put(*place, seam.op, call)

    def _rounding(self, task: Task, op: str, call: Callable[..., Any], like: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with noise on each floating-point output, as large as the error of one rounding to its dtype."""
        contract = task.config.ops.get(op)
        inplace = [name for name in contract.outputs if name in contract.inputs] if contract else []
        signature = inspect.signature(like)

        def moved(value: torch.Tensor) -> torch.Tensor:
            if value.dtype not in UNIT:
                return value
            noise = torch.empty(value.shape, device=value.device, dtype=torch.float32)
            noise.uniform_(-1, 1, generator=self._noise)
            return (value.float() * (1 + UNIT[value.dtype] * noise)).to(value.dtype)

        def rounded(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            for name in inplace:
                given[name].copy_(moved(given[name]))
            if isinstance(result, torch.Tensor):
                return moved(result)
            return tuple(map(moved, result)) if isinstance(result, tuple) else result

        return rounded


def _annotated(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def annotated(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(name):
            return call(*args, **kwargs)

    return annotated


def solutions_of(tasks: Sequence[Task], exports: Mapping[str, str]) -> dict[str, ModuleType]:
    """Task folder -> its solution, or the exported package if `exports` names a folder for the task.

    Raises:
        MissingRequirement: an export is not there.
    """
    import importlib
    from pathlib import Path

    found = {}
    for task in tasks:
        if task.folder not in exports:
            found[task.folder] = task.load("solution")
            continue
        package = Path(exports[task.folder])
        if not package.is_dir():
            raise MissingRequirement(f"{package}: expected the export of {task.folder}, got no folder")
        if str(package.parent) not in sys.path:
            sys.path.insert(0, str(package.parent))
        found[task.folder] = importlib.import_module(package.name)
    return found
