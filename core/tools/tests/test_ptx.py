"""The kernels as compiled for sm_90a, executed on the CPU by the PTX machine: no GPU has to be there.

What runs is the PTX that an H200 would load, for the launches that the public functions make. Beside the results,
the machine checks every access of memory and every wait, shared memory for races, and what is done before the kernel
ahead has ended.
"""

import dataclasses
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from core.tools.tests.every_task import TASKS
from core.tools.tests.test_conformance import Case
from kda_judge.arms.float8 import nearest_e4m3
from kda_judge.arms.input_values import Family, make
from kda_judge.contract.workloads import shrink
from kda_runtime.launch import Launch
from kda_runtime.tuned_table import Table
from kda_tools.lab.inspect.aot import meta_tensors
from kda_tools.lab.inspect.arm_alone import with_strides
from kda_tools.lab.ptx import floats, kernels
from kda_tools.lab.ptx.kernels import modules_of, on_the_machine
from kda_tools.lab.ptx.parse import PtxError, without
from kda_tools.lab.ptx.run import DEFAULT, Options

PRODUCTION_ROWS, GRID_ROWS = 3, 2
"""Of every op, spread over its frozen rows and over its thinned grid."""


def spread(rows, count):
    """So many of the rows, evenly apart, the first one included."""
    return rows[:: max(-(-len(rows) // count), 1)]


def taken(task, row):
    """Whether the kernels take a row of the grid, which also has rows that they do not take."""
    return bool(task.load("solution").launches(row.op, meta_tensors(row), row.scalars))


def cases_of(task):
    """Rows of every op: frozen ones, shrunken as on any CPU, and some of the grid that the kernels take."""
    grid = task.load("bench.grid")
    thin = grid.thin(grid.grid())
    return [
        Case(task, row)
        for op in task.config.ops
        for row in (
            *(
                shrink(r, task.config.cpu.keep, task.config.cpu.shrink)
                for r in spread([r for r in task.workloads if r.op == op], PRODUCTION_ROWS)
            ),
            *(r for r in spread([r for r in thin if r.op == op], GRID_ROWS) if taken(task, r)),
        )
    ]


def tables_of(task):
    """The solution's tuning tables, each once; not those of a second import, as by tests of the task's folder."""
    called = task.load("solution").__name__
    modules = [module for module in modules_of(task) if module.__name__.startswith(called)]
    held = [value for module in modules for value in vars(module).values() if isinstance(value, Table)]
    return list({id(table): table for table in held}.values())


def check(case, family=Family.NORMAL, options=DEFAULT):
    """Call the op once on the machine and compare with the oracle; the launches."""
    values, specs = make(case.row, family, 1, "cpu"), case.row.inputs
    op = case.task.config.ops[case.row.op]
    arguments = {name: with_strides(values[name], specs[name], "cpu") if name in specs else None for name in op.inputs}
    kept = {name: value.clone() for name, value in arguments.items() if value is not None}
    want = case.want(arguments)
    with torch.no_grad(), on_the_machine(case.task, options) as launched:
        got = case.call(arguments)
    assert launched
    case.assert_close(got, want, family.magnitude)
    for name, value in kept.items():
        assert name in case.row.inplace or torch.equal(arguments[name], value)
    return launched


def named(cases):
    """Parametrise over cases."""
    ids = [f"{case.task.op}-{case.row.op}-{case.row.id}" for case in cases]
    return pytest.mark.parametrize("case", cases, ids=ids)


def first_of_each_op(task):
    """The first of the task's cases for every op."""
    return list({case.row.op: case for case in reversed(cases_of(task))}.values())


@named([case for task in TASKS for case in cases_of(task)])
def test_rows(case):
    check(case)


@named([case for task in TASKS for case in first_of_each_op(task)])
@pytest.mark.parametrize("family", [Family.OFFSET, Family.MIXED], ids=lambda family: family.value)
@pytest.mark.parametrize("error", [-1, 1], ids=["below", "above"])
def test_other_draws_with_approximations_as_far_off_as_they_may_be(case, family, error):
    check(case, family, Options(error=error))


TABLES = [(task, table) for task in TASKS for table in tables_of(task)]


@pytest.mark.parametrize(
    ("task", "table", "config"),
    [(task, table, config) for task, table in TABLES for config in table.configs],
    ids=lambda value: getattr(value, "op", None) or getattr(value, "name", None) or str(value),
)
def test_every_tuned_configuration(task, table, config):
    ran = 0
    for case in first_of_each_op(task):
        with table.forced(config) as asked:
            launched = check(case)
        ran += bool(asked)
    assert ran
    assert launched


def task_of(op):
    """The task with this name."""
    (task,) = (task for task in TASKS if task.op == op)
    return task


@triton.jit
def multiply_and_add(y, x, scale, shift, CONSTANT: tl.constexpr, N: tl.constexpr):
    """In Triton's own dtypes, as upstream's kernel has it: the compiler chooses where product and sum fuse."""
    col = tl.arange(0, N)
    tl.store(y + col, tl.load(x + col) * (CONSTANT + tl.load(scale + col)) + tl.load(shift + col))


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtypes", list(product(DTYPES, repeat=3)), ids=str)
@pytest.mark.parametrize("constant", [0, 1])
def test_the_exact_mode_of_k06_rounds_where_the_compiler_does(dtypes, constant):
    task = task_of("fuse_scale_shift")
    public = task.load("solution").fuse_scale_shift_kernel
    generator = torch.Generator().manual_seed(0)
    x, scale, shift = (torch.randn(1, 1, 1024, generator=generator).to(dtype) for dtype in dtypes)
    want = torch.empty_like(x)
    launch = Launch.make(multiply_and_add, (1,), want, x, scale, shift, CONSTANT=constant, N=1024, num_warps=4)
    kernels.run_launch(launch, (want, x, scale, shift))
    public.kda_op.set_exact()
    try:
        with on_the_machine(task) as launched:
            assert torch.equal(public(x, scale, shift, constant), want)
    finally:
        public.kda_op.set_exact(False)
    assert launched[0].constexprs["EXACT"]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_l01_runs_upstreams_instructions(dtype):
    """Their roundings and their flushes to zero, one after the other; what is approximate is the machine's there."""
    task = task_of("silu_and_mul")
    public = task.load("solution").silu_and_mul
    x = torch.randn(3, 2048, generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)
    x[0, :4] = torch.tensor([-100.0, 100.0, 0.0, 2.0**-130])
    gate, up = (half.float().numpy() for half in x.chunk(2, dim=-1))
    power = floats.approximate("ex2", floats.flush(floats.flush(gate) * np.float32(-1.442695)), error=0)
    quotient = floats.approximate("div", floats.flush(gate), floats.flush(power) + np.float32(1), error=0)
    want = torch.from_numpy(floats.flush(floats.flush(quotient) * floats.flush(up))).to(dtype)
    with on_the_machine(task) as launched:
        assert torch.equal(public(x), want)
    assert launched[0].constexprs["EXACT"]


@pytest.mark.parametrize("mode", [None, "dense", "legacy"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_l04_runs_upstreams_instructions(dtype, mode):
    """Quotients and exponentials as of a build with fast maths; what is approximate is the machine's there."""
    task = task_of("per_token_group_quant")
    public = task.load("solution").per_token_group_quant
    x = torch.randn(3, 256 * (1 + bool(mode)), generator=torch.Generator().manual_seed(0)).mul(30).to(dtype)
    value = x.float().numpy()
    if mode is not None:
        gate, up = np.split(value, 2, axis=-1)
        power = floats.approximate("ex2", floats.flush(gate * np.float32(-1.442695)), error=0)
        if mode == "dense":
            value = floats.flush(floats.approximate("div", gate, power + np.float32(1), error=0) * up)
        else:
            act = torch.from_numpy(floats.flush(gate * (np.float32(1) / (power + np.float32(1))))).to(dtype)
            value = act.float().numpy() * up
        value = torch.from_numpy(value).to(dtype).float().numpy()
    groups = value.reshape(3, 2, 128)
    largest = np.abs(groups).max(-1)
    factor = floats.approximate("div", np.full_like(largest, 448), largest, error=0)
    with on_the_machine(task) as launched:
        q, s = public(x, fuse_silu_and_mul=mode is not None, silu_and_mul_mode=mode or "legacy")
    assert launched[0].constexprs["EXACT"]
    assert np.array_equal(s.numpy(), largest * np.float32(1 / 448))
    assert np.array_equal(q.view(torch.uint8).numpy(), nearest_e4m3(groups * factor[..., None]).reshape(3, 256))


def test_k03_with_one_tile_and_with_two():
    task = task_of("qknorm_rope")
    (table,) = tables_of(task)
    tuned = table.configs[0]
    for config in {*table.configs, *(dataclasses.replace(tuned, tiles=n, early=n == 2) for n in (1, 2))}:
        for case in cases_of(task):
            with table.forced(config) as asked:
                (launch,) = check(case)
            assert asked
            assert launch.options["num_warps"] == config.warps


# --- faults put into real kernels


@pytest.mark.parametrize(
    ("opcode", "message"),
    [("bar.sync", "a race: "), ("griddepcontrol.wait", "before the thread has waited for the kernel ahead")],
)
def test_a_missing_wait_is_found_in_a_compiled_kernel(opcode, message, monkeypatch):
    case = first_of_each_op(task_of("norm_tanh_mul_add"))[0]
    (launch,) = check(case)
    made = kernels.compiled(launch, (True,) * sum(isinstance(arg, torch.dtype) for arg in launch.args))
    number = sum(instruction.opcode == opcode for instruction in made.program.instructions)
    assert number
    for i in range(number):
        broken = dataclasses.replace(made, program=without(made.program, opcode, i))
        monkeypatch.setattr(kernels, "compiled", lambda *_, broken=broken: broken)
        with pytest.raises(PtxError, match=message):
            check(case)
