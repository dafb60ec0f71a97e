"""What every public op of every task has to do around its kernels, on rows of the task: no task tests it again.

On a CPU a call takes the plain PyTorch path (in Triton's interpreter the kernels, which `test_interpreted.py` starts);
on a GPU the kernels, through entries that remember what an earlier call led to.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from core.tools.tests.every_task import TASKS
from kda_judge.arms.arm_import import tensors_first
from kda_judge.arms.input_values import Family, make
from kda_judge.contract.tasks import Task
from kda_judge.contract.workloads import Workload, shrink
from kda_judge.judge.oracle import ask_oracle, load_reference
from kda_judge.judge.output_rules import judged
from kda_runtime.op import forget_plans
from kda_tools.lab.inspect.aot import meta_tensors
from kda_tools.lab.inspect.arm_alone import with_strides

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GRID_ROWS = 3
"""Of every op, spread over its thinned grid."""


@dataclass(frozen=True)
class Case:
    """A public op and a row for it."""

    task: Task
    row: Workload

    @property
    def solution(self):
        return self.task.load("solution")

    @property
    def op(self):
        """What is around the kernels; a solution in plain PyTorch has nothing there."""
        found = getattr(getattr(self.solution, self.row.op), "kda_op", None)
        return found or pytest.skip("plain PyTorch: no kernels")

    def arguments(self, seed=1):
        """The op's tensors by name, None where the row leaves one out."""
        values = make(self.row, Family.NORMAL, seed, "cpu")
        specs, names = self.row.inputs, self.task.config.ops[self.row.op].inputs
        device = "cuda" if CUDA else "cpu"
        return {name: with_strides(values[name], specs[name], device) if name in values else None for name in names}

    def call(self, arguments, op: Callable[..., object] | None = None):
        """What a call gives, as a list: what it wrote to in place (of a pool its slots), else what it returned."""
        op = op or getattr(self.solution, self.row.op)
        returned = self._tensors_first(op)(*arguments.values(), **self.row.scalars)
        if self.row.inplace:
            written = [arguments[name] for name in self.contract.outputs] if self.contract.returns == "argument" else []
            got = list(returned) if isinstance(returned, tuple) else [returned] * len(written)
            assert all(one is other for one, other in zip(got, written, strict=True))
            assert written or returned is None
            return [self.judged_part(name, arguments) for name in self.contract.outputs]
        return list(returned) if isinstance(returned, tuple) else [returned]

    def judged_part(self, name, arguments):
        """A tensor that is written in place; of a pool the rows of the slots."""
        slots = self.contract.pools.get(name)
        return arguments[name] if slots is None else arguments[name][arguments[slots].flatten().long()]

    def why_not(self, arguments):
        assert self.op
        why_not = self._tensors_first(partial(self.solution.why_not, self.row.op))
        return why_not(*arguments.values(), **self.row.scalars)

    @property
    def contract(self):
        return self.task.config.ops[self.row.op]

    def _tensors_first(self, function):
        return tensors_first(function, self.contract.inputs, self.contract.by_name)

    def want(self, arguments):
        """The oracle's outputs and keys; ask before a call in place."""
        with torch.no_grad():
            return ask_oracle(load_reference(self.task), self.contract, self.row, arguments)

    def assert_close(self, got, want, magnitude=1.0):
        for name, out, expected in zip(self.contract.outputs, got, want, strict=True):
            rule, keys = self.contract.rules.get(name), want.keys.get(name)
            found = judged(name, rule, self.task.config.tolerance, out, expected, magnitude, None, keys)
            assert found.failure is None

    def assert_right(self, arguments=None, op: Callable[..., object] | None = None):
        """Call `op` and compare with the oracle."""
        arguments = arguments or self.arguments()
        want = self.want(arguments)
        self.assert_close(self.call(arguments, op), want)


def each(grid_rows=0):
    """Every op on its first frozen row, shrunken, and on so many rows of its grid."""
    cases = []
    for task in TASKS:
        grid = task.load("bench.grid")
        thin = grid.thin(grid.grid()) if grid_rows else []
        for op in task.config.ops:
            frozen = next(row for row in task.workloads if row.op == op)
            rest = [row for row in thin if row.op == op]
            step = max(len(rest) // max(grid_rows, 1), 1)
            cases += [
                Case(task, row)
                for row in (
                    shrink(frozen, task.config.cpu.keep, task.config.cpu.shrink),
                    *rest[step // 2 :: step][:grid_rows],
                )
            ]
    return pytest.mark.parametrize("case", cases, ids=[f"{case.task.op}-{case.row.op}-{case.row.id}" for case in cases])


def changed(arguments, change):
    """The same with every floating-point tensor changed."""
    given = {name: value for name, value in arguments.items() if value is not None and value.is_floating_point()}
    return arguments | {name: change(value) for name, value in given.items()}


@pytest.fixture(autouse=True)
def _no_plans(case):
    forget_plans(case.task.path / "solution")


@each(GRID_ROWS)
def test_outputs_are_right_and_of_memory_of_their_own(case):
    arguments = case.arguments()
    given = {name: value for name, value in arguments.items() if value is not None}
    want, kept = case.want(arguments), {name: value.clone() for name, value in given.items()}
    first = case.call(arguments)
    case.assert_close(first, want)
    assert all(torch.equal(given[name], value) for name, value in kept.items() if name not in case.row.inplace)
    if not case.row.inplace:
        second = case.call(arguments)
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
        outputs, inputs = (
            {value.untyped_storage().data_ptr() for value in held} for held in ((*first, *second), given.values())
        )
        assert len(outputs) == len(first) + len(second)
        assert not outputs & inputs


@each(1)
def test_why_not_agrees_with_what_runs(case, monkeypatch):
    plain, path = [], case.op.plain
    monkeypatch.setitem(vars(case.op), "plain", lambda call: plain.append(call) or path(call))
    arguments = case.arguments()
    reason = case.why_not(arguments)
    case.assert_right(arguments)
    assert bool(plain) == (reason is not None)
    launches = case.solution.launches(case.row.op, meta_tensors(case.row), case.row.scalars)
    assert launches or reason is not None
    if not (CUDA or (INTERPRETED and case.op.kernel)):
        assert " is on cpu; " in reason
    else:
        if case.row.production and reason is not None:
            assert "interpreter" in reason, "a production row takes a kernel, unless it is too much for the interpreter"
        assert case.why_not(changed(arguments, torch._neg_view)) is not None, "memory that does not hold the values"


BROKEN = {
    "another device": lambda tensor: tensor.to("meta"),
    "another kind of number": lambda tensor: tensor.int() if tensor.is_floating_point() else tensor.float(),
    "no tensor": lambda tensor: "tensor",
}


@pytest.mark.parametrize("fault", BROKEN)
@each()
def test_meaningless_arguments_are_named(case, fault):
    op = case.task.config.ops[case.row.op]
    if fault == "another device" and len(case.row.inputs) == 1:
        pytest.skip("one tensor: there is no other device than its own")
    for name in case.row.inputs:
        arguments = case.arguments()
        arguments[name] = BROKEN[fault](arguments[name])
        for ask in (case.call, case.why_not):
            with pytest.raises(ValueError, match=rf"^{case.row.op}: \w+: expected .*, got ") as raised:
                ask(arguments)
            blamed = str(raised.value).split(": ")[1]
            # The tensor that the outputs are like sets what is expected of the others: one of those may be named. Where
            # they are like none, the first one does.
            assert blamed == name or name in {*(op.like.values() or op.inputs[:1]), *op.outputs}


@each()
def test_tensors_that_do_not_fit_together_are_named(case):
    """A kernel reads beyond a tensor that is shorter than the first one lets it expect."""
    assert case.op
    for name in [name for name, value in case.arguments().items() if value is not None][1:]:
        for dim, size in enumerate(case.arguments()[name].shape):
            if size < 3:  # one would be left, which broadcasts
                continue
            arguments = case.arguments()
            arguments[name] = arguments[name].narrow(dim, 0, size - 1)
            try:
                case.why_not(arguments)
            except ValueError:
                continue
            oracle = getattr(load_reference(case.task), case.row.op)
            with suppress(IndexError):  # values say how far a table is read: no check looks at them
                oracle(*arguments.values(), **case.row.scalars)  # a size of its own, which has a meaning


@each()
def test_before_a_launch_is_nothing_but_allocations_and_views(case):
    """SGLang's `replay_launches` repeats only such calls without their Python."""
    seen = []

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **kwargs or {})
            if "empty" not in func.__name__ and not func.is_view:
                seen.append(str(func))
            return result

    assert case.op
    with Watcher():
        case.solution.launches(case.row.op, meta_tensors(case.row), case.row.scalars)
    assert seen == []


@each(1)
@pytest.mark.parametrize("layout", ["as it is", "permuted"])
def test_the_registered_op_is_truthful(case, layout):
    recorded = []

    class Recorder(TorchDispatchMode):
        @classmethod
        def is_infra_mode(cls):
            return True  # as tracers' modes are: others do not see the op

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace.startswith(case.task.folder):
                recorded.append((func, args, kwargs))
            return func(*args, **kwargs or {})

    arguments = case.arguments()
    if layout == "permuted":
        # The tensor that the outputs are like, with the same values in another order of memory.
        op = case.task.config.ops[case.row.op]
        like = {op.like.get(name, name) for name in op.outputs if name not in op.per_row}
        wide = [name for name in like if arguments[name].dim() > 1]
        arguments |= {name: arguments[name].transpose(0, 1).contiguous().transpose(0, 1) for name in wide}
    want = case.want(arguments)
    with Recorder():
        case.assert_close(case.call(arguments), want)
    ((func, args, kwargs),) = recorded
    # PyTorch compares results by arithmetic that it has not got for float8: what was written is compared above.
    float8 = any(isinstance(arg, torch.Tensor) and arg.dtype == torch.float8_e4m3fn for arg in args)
    torch.library.opcheck(func, args, kwargs, **{"test_utils": "test_faketensor"} if float8 else {})


@each()
def test_compiles_to_a_full_graph(case):
    torch.compiler.reset()
    op = getattr(case.solution, case.row.op)
    compiled = torch.compile(op, fullgraph=True, backend="inductor" if CUDA else "aot_eager")
    case.assert_right(op=compiled)


@each()
def test_gradients_are_recorded_also_where_a_plan_was_made_without_them(case):
    arguments = case.arguments()
    learned = [
        value.requires_grad_()
        for name, value in arguments.items()
        if value is not None and value.is_floating_point() and name not in case.row.inplace
    ]
    if not learned:
        pytest.skip("integers have no gradients")
    with torch.no_grad():
        case.call(arguments)
    outputs = [output for output in case.call(arguments) if output.is_floating_point()]
    recorded = [output for output in outputs if output.requires_grad]
    # What is added in place, say, has no parameter in it.
    assert recorded if case.row.inplace else len(recorded) == len(outputs)
    # Weighted by place: a softmax adds up to 1, so the gradient of its plain sum is nothing but rounding.
    weights = [torch.linspace(1, 2, output.numel(), device=output.device) for output in recorded]
    sum((output.float().flatten() * weight).sum() for output, weight in zip(recorded, weights, strict=True)).backward()
    assert any(value.grad is not None and value.grad.abs().sum() > 0 for value in learned)


@pytest.mark.gpu
class TestOnGpu:
    @each(GRID_ROWS)
    def test_second_call_runs_the_plan_of_the_first(self, case, monkeypatch):
        if case.why_not(case.arguments()) is not None:
            pytest.skip("takes the plain path")
        copied, path = [], case.op.ready

        def ready(call):
            made = path(call)
            copied.append(made is not call)
            return made

        monkeypatch.setitem(vars(case.op), "ready", ready)
        case.assert_right()
        monkeypatch.setitem(vars(case.op), "plan", None)
        # A hot entry takes the call before `run` is asked; only a copy is made there, and has a plan of its own.
        if not any(copied):
            monkeypatch.setitem(vars(case.op), "run", None)
        case.assert_right()

    @each(GRID_ROWS)
    def test_misaligned_views(self, case):
        def misaligned(tensor):
            # A broadcast dimension is one element of memory: what lies behind the view is copied, element by element.
            behind = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,))
            buffer = torch.empty(behind.numel() + 1, dtype=tensor.dtype, device=tensor.device)
            buffer[1:].copy_(behind)
            return buffer.as_strided(tensor.shape, tensor.stride(), 1)

        case.assert_right()
        case.assert_right(
            {name: None if value is None else misaligned(value) for name, value in case.arguments().items()}
        )

    @each()
    def test_a_cuda_graph_follows_its_inputs(self, case):
        arguments = case.arguments()
        case.call(arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = case.call(arguments)
        for seed in (2, 3):
            fresh = case.arguments(seed)
            want = case.want(fresh)
            for name, value in fresh.items():
                if value is not None:
                    arguments[name].copy_(value)
            graph.replay()
            case.assert_close(outputs, want)

    @each()
    def test_lazy_views_are_resolved(self, case):
        case.assert_right()
        case.assert_right(changed(case.arguments(), torch._neg_view))

    @each()
    def test_a_plan_made_in_one_mode_serves_no_other(self, case):
        for mode in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cuda"), torch.no_grad()):
            with mode:
                for _ in range(2):
                    case.assert_right()
