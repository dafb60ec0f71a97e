"""Record the inputs of a step's calls of the tasks' ops, and find the frozen rows with the same inputs."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from kda_judge.contract.strict_models import Count, Strict
from kda_judge.contract.tasks import Task
from kda_tools.models.fitting import parameters, unknown

Spec = tuple[tuple[int, ...], str] | None
"""Shape and dtype of an input; None if the argument is None."""
Signature = tuple[tuple[str, Spec], ...]
MODULE_INPUTS = ("weight", "bias")
"""Inputs that are read from a module among the arguments: `apply_group_norm_silu`, for one, takes the norm module."""


class Call(Strict):
    """Calls of one op with inputs of the same shapes and dtypes, in one step."""

    task: str
    op: str
    inputs: dict[str, str]
    """Input -> `4096x3072:bfloat16`; inputs that were None are left out."""
    count: Count
    row: str | None
    """Id of the frozen row with these inputs, a production row if there is one; None: no row has this shape."""
    production: bool


class Fallback(Strict):
    """Calls for which a solution takes its plain PyTorch path."""

    task: str
    op: str
    reason: str
    count: Count


def signature_of(task: Task, op: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Signature:
    """The inputs of a call, by the names of the task's contract.

    `function` has upstream's signature: its first arguments are the op's inputs, in the contract's order. If the
    contract does not list the op, its first op is used; a module argument then gives its `MODULE_INPUTS`.
    """
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    contract = task.config.ops[op if op in task.config.ops else next(iter(task.config.ops))]
    names, values = contract.inputs, list(bound.arguments.values())
    given = dict(bound.arguments) if contract.by_name else dict(zip(names, values, strict=False))
    for value in values:
        if isinstance(value, torch.nn.Module) and all(hasattr(value, name) for name in MODULE_INPUTS):
            given |= {name: getattr(value, name) for name in MODULE_INPUTS}
    return tuple((name, _spec(given.get(name))) for name in names)


def _spec(value: Any) -> Spec:
    return (tuple(value.shape), str(value.dtype).removeprefix("torch.")) if isinstance(value, torch.Tensor) else None


class Rows:
    """The frozen rows of tasks, found by op and inputs.

    Some ops write into pools. For them, the number of rows of a pool and of a cos-sin table does not matter: a row is
    found whatever these lengths are.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._rows: dict[tuple[str, Signature], tuple[str, bool]] = {}
        self._loose: dict[str, set[str]] = {}
        for task in tasks:
            for row in task.workloads:
                if pools := task.config.ops[row.op].pools:
                    tables = {name for name, spec in row.inputs.items() if spec.fill == "cos_sin"}
                    self._loose.setdefault(self._op(task, row.op), set()).update(pools, tables)
            for row in task.workloads:
                given = {name: (tuple(spec.shape), str(spec.dtype)) for name, spec in row.inputs.items()}
                key = tuple((name, given.get(name)) for name in task.config.ops[row.op].inputs)
                key = self._key(task, row.op, key)
                known = self._rows.get((self._op(task, row.op), key))
                if known is None or (row.production and not known[1]):
                    self._rows[self._op(task, row.op), key] = (row.id, row.production)

    @staticmethod
    def _op(task: Task, op: str) -> str:
        return f"{task.folder}:{op if op in task.config.ops else next(iter(task.config.ops))}"

    def find(self, task: Task, op: str, signature: Signature) -> tuple[str | None, bool]:
        """Id of the row with these inputs, and whether it is a production row; (None, False) if there is none."""
        return self._rows.get((self._op(task, op), self._key(task, op, signature)), (None, False))

    def _key(self, task: Task, op: str, signature: Signature) -> Signature:
        loose = self._loose.get(self._op(task, op), set())
        return tuple(
            (name, ((0, *spec[0][1:]), spec[1]) if spec and name in loose else spec) for name, spec in signature
        )


class Log:
    """Counts the calls of one step. A call made inside another counted call is not counted."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str, Signature]] = Counter()
        self._reasons: Counter[tuple[str, str, str]] = Counter()
        self._tasks: dict[str, Task] = {}
        self._inside = False

    def wrap(
        self, task: Task, op: str, call: Callable[..., Any], like: Callable[..., Any], solution: Any | None
    ) -> Callable[..., Any]:
        """`call`, counted; with a `solution`, its reasons for the plain path too. `like` names the arguments."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._tasks[task.folder] = task
            self._calls[task.folder, op, signature_of(task, op, like, args, kwargs)] += 1
            if solution is not None and (reason := why_not(solution, op, like, args, kwargs)) is not None:
                self._reasons[task.folder, op, reason] += 1
            self._inside = True
            try:
                return call(*args, **kwargs)
            finally:
                self._inside = False

        return counted

    def calls(self, rows: Rows) -> tuple[Call, ...]:
        """One entry for each op and inputs, with the matching row."""
        found = []
        for (folder, op, signature), count in sorted(self._calls.items(), key=str):
            row, production = rows.find(self._tasks[folder], op, signature)
            inputs = {name: "x".join(map(str, spec[0])) + f":{spec[1]}" for name, spec in signature if spec}
            found.append(Call(task=folder, op=op, inputs=inputs, count=count, row=row, production=production))
        return tuple(found)

    def fallbacks(self) -> tuple[Fallback, ...]:
        """Every reason for the plain path."""
        return tuple(
            Fallback(task=folder, op=op, reason=reason, count=count)
            for (folder, op, reason), count in sorted(self._reasons.items())
        )


def why_not(solution: Any, op: str, like: Callable[..., Any], args: Any, kwargs: Any) -> str | None:
    """Why a solution takes its plain path for a call; for CPU tensors, why it would on a GPU. None: it does not."""
    function = getattr(solution, op)
    if (reason := unknown(function, like, kwargs)) is not None:
        return reason
    kwargs = {name: value for name, value in kwargs.items() if name in parameters(function)}
    on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in (*args, *kwargs.values()))
    if on_gpu or not hasattr(function, "kda_op"):
        answer: str | None = solution.why_not(op, *args, **kwargs)
        return answer
    call = function.kda_call(*args, **kwargs)
    if isinstance(call, str):
        return None if "CPU" in call or "cpu" in call else call
    uncovered: str | None = function.kda_op.uncovered(call)
    return uncovered
