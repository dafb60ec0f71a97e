"""The kernels as compiled for sm_90a, executed on the CPU by the machine of `core/tests/ptx`: no GPU has to be there.

What runs is the PTX that an H200 would load, for the launches that the public functions make. Beside the results,
the machine checks every access of memory and every wait, shared memory for races, and what is done before the kernel
ahead has ended.
"""

import dataclasses
import importlib

import pytest
import torch

from core.tests.every_task import TASKS
from core.tests.ptx import kernels
from core.tests.ptx.kernels import modules_of, on_the_machine
from core.tests.ptx.parse import PtxError
from core.tests.ptx.run import DEFAULT, Options
from core.tests.test_conformance import Case
from kda_core.alone import _place
from kda_core.correctness import compare
from kda_core.inputs import Family, make
from kda_core.oracle import load_reference
from kda_core.tuning import Table
from kda_core.workloads import shrink

PRODUCTION_ROWS, GRID_ROWS = 3, 2
"""Of every op, spread over its frozen rows and over its thinned grid."""


def spread(rows, count):
    """So many of the rows, evenly apart, the first one included."""
    return rows[:: max(-(-len(rows) // count), 1)]


def cases_of(task):
    """Rows of every op: frozen ones, shrunken as on any CPU, and some of the grid."""
    grid = importlib.import_module(f"{task.package}.bench.grid")
    thin = grid.thin(grid.grid())
    return [
        Case(task, row)
        for op in task.config.ops
        for row in (
            *(
                shrink(r, task.config.cpu.keep)
                for r in spread([r for r in task.workloads if r.op == op], PRODUCTION_ROWS)
            ),
            *spread([r for r in thin if r.op == op], GRID_ROWS),
        )
    ]


def tables_of(task):
    """The solution's tuning tables, each once."""
    held = [value for module in modules_of(task) for value in vars(module).values() if isinstance(value, Table)]
    return list({id(table): table for table in held}.values())


def check(case, family=Family.NORMAL, options=DEFAULT):
    """Call the op once on the machine and compare with the oracle; the launches."""
    values, specs = make(case.row, family, 1, "cpu"), case.row.inputs
    op = case.task.config.ops[case.row.op]
    arguments = {name: _place(values[name], specs[name], "cpu") if name in specs else None for name in op.inputs}
    kept = {name: value.clone() for name, value in arguments.items() if value is not None}
    want = case.want(arguments)
    with torch.no_grad(), on_the_machine(case.task, options) as launched:
        got = case.call(arguments)
    assert launched
    for name, out, expected in zip(op.outputs, got, want, strict=True):
        tolerance = case.task.config.tolerance[str(out.dtype).removeprefix("torch.")]
        assert compare(name, out, expected, tolerance, family.magnitude).failure is None
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


def test_k03_in_both_of_its_configurations():
    task = task_of("qknorm_rope")
    (table,) = tables_of(task)
    assert len(table.configs) == 2
    for config in table.configs:
        for case in cases_of(task):
            with table.forced(config) as asked:
                (launch,) = check(case)
            assert asked
            assert launch.options["num_warps"] == config.warps


FLOWS = {
    "no more ahead than it must be": {"warps": 1, "tiles": 1, "ahead_mb": 0},
    "front to back": {"warps": 2, "tiles": 2, "ahead_mb": 1e-3, "reverse": False, "hints": True, "store": ".cs"},
}


@pytest.mark.parametrize("name", FLOWS)
def test_k07_flows_in_whatever_order_blocks_run(name):
    task = task_of("group_norm_silu")
    (table,) = tables_of(task)
    case = first_of_each_op(task)[0]
    with table.forced(table.config("flow", **FLOWS[name])):
        for options in (DEFAULT, Options(apart=True), *(Options(turns=seed) for seed in range(3))):
            assert [launch.name for launch in check(case, options=options)] == ["statistics_kernel", "flow_kernel"]


# --- faults put into real kernels


def without(program, opcode, number):
    """The program with its so-many-th instruction of this kind replaced by one that does nothing."""
    places = [i for i, instruction in enumerate(program.instructions) if instruction.opcode == opcode]
    instructions = list(program.instructions)
    instructions[places[number]] = dataclasses.replace(instructions[places[number]], opcode="membar.gl", operands=())
    return dataclasses.replace(program, instructions=tuple(instructions))


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


# --- CuTe DSL


def assert_near(got, want):
    """Half a step of a 16-bit dtype, twenty of float32, whose sums are rounded too, and 1e-5 for terms that cancel."""
    steps = 20 if got.dtype == torch.float32 else 0.51
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=steps * torch.finfo(got.dtype).eps)


CLUSTERS = {
    # dtypes of x, weight and bias, blocks, warps, shape of x, groups, offset
    "several batches": ("bbb", 8, 4, (2, 16, 4, 8, 8), 4, 3),
    "most blocks have nothing": ("hhh", 8, 1, (1, 6, 9, 8), 3, 3),
    "the last block has less": ("fff", 16, 2, (1, 4, 1000), 2, 3),
    "many warps": ("bbb", 16, 16, (1, 8, 128, 132), 1, 3),
    "floats are kept": ("hhh", 2, 1, (3, 10, 1024), 5, 3),
    "the last block has one warp": ("fff", 4, 8, (2, 2, 12), 2, 3),
    "floats are not kept": ("hfb", 4, 2, (1, 6, 3600), 3, 1000),
    "as many tiles as there may be": ("bhf", 4, 1, (1, 4, 8072), 2, 64),
    "all tiles full": ("hhh", 2, 1, (1, 2, 4096), 1, 0),
    "more channels than threads": ("bff", 4, 1, (1, 210, 1, 8), 3, 3),
    "one block": ("fbh", 1, 2, (1, 3, 520), 1, 3),
}


def drawn(names, shape, groups, offset):
    """x, weight and bias of dtypes by their letters, and what the oracle makes of them."""
    dtypes = [{"b": torch.bfloat16, "h": torch.float16, "f": torch.float32}[name] for name in names]
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(shape, generator=generator) + offset).to(dtypes[0])
    weight, bias = (torch.randn(shape[1], generator=generator).to(dtype) for dtype in dtypes[1:])
    (want,) = load_reference(task_of("group_norm_silu")).triton_group_norm_silu(x, weight, bias, groups, 1e-5)
    return (x, weight, bias), want


def cluster_launch(x, weight, bias, groups, blocks, warps):
    """k07's cluster launch, as its plans make it."""
    from diffusion.k07_group_norm_silu.solution.cluster import ClusterLaunch
    from kda_core.launch import Chain

    total, channels = x.shape[0] * groups, x.shape[1]
    elements = x.numel() // total
    return ClusterLaunch(
        dtypes=(x.dtype, weight.dtype, bias.dtype),
        sizes=(elements, x.numel() // (x.shape[0] * channels), total, groups, channels // groups),
        eps=1e-5,
        warps=warps,
        tiles=-(-elements * x.itemsize // (blocks * warps * 512)),
        pdl=True,
        otherwise=Chain((), ()),
        blocks=blocks,
    )


@pytest.mark.parametrize("case", CLUSTERS)
def test_k07_cluster(case):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from core.tests.ptx.cute import run_cute

    names, blocks, warps, shape, groups, offset = CLUSTERS[case]
    tensors, want = drawn(names, shape, groups, offset)
    launch = cluster_launch(*tensors, groups, blocks, warps)
    outputs = []
    for options in (Options(), Options(late=False, apart=True), Options(error=1), Options(error=-1)):
        y = torch.full_like(tensors[0], float("nan"))
        run_cute(launch, y, *tensors, options=options)
        assert_near(y, want)
        outputs.append(y)
    assert torch.equal(outputs[0], outputs[1]), "whenever blocks run, and what they send arrives"


def test_k07_cluster_far_below_zero_and_not_a_number():
    """Four elements share a reciprocal: what is large or a NaN in one of them must not reach the other three."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from core.tests.ptx.cute import run_cute

    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    weight, bias = torch.ones(6, dtype=torch.float16), torch.tensor([0, -200, 60000, -60000, 0, 0], dtype=torch.float16)
    x[0, 0, ::4] -= 40  # normalised it is still far below, beside its neighbours
    x[0, 4, 3] = float("nan")
    weight = weight * torch.tensor([30, 1, 1, 1, 1, 1], dtype=torch.float16)
    y = torch.full_like(x, float("nan"))
    run_cute(cluster_launch(x, weight, bias, 3, 2, 1), y, x, weight, bias)
    want = load_reference(task_of("group_norm_silu")).triton_group_norm_silu(x, weight, bias, 3, 1e-5)[0]
    assert_near(y[:, :4], want[:, :4])
    assert (y[0, (1, 3)] == 0).all()
    assert y[0, 4:].isnan().all()


RINGS = {
    # dtypes of x, weight and bias, warps, tiles, stages, ahead, blocks, shape of x, groups, offset
    "the first parts are of many blocks": ("hhh", 4, 3, 4, 2, 8, (1, 8, 4, 1024), 1, 3),
    "the last part has less": ("hhh", 2, 2, 3, 1, 4, (2, 4, 1144), 2, 300),
    "as many ahead as there may be": ("bhf", 2, 4, 5, 4, 2, (2, 6, 2304), 3, 3),
    "a warp a block": ("bbb", 1, 2, 3, 2, 5, (1, 6, 2048), 3, 3),
    "float32": ("fff", 2, 2, 5, 2, 3, (1, 4, 1000), 2, 64),
    "more words than are asked for at once": ("hfh", 1, 1, 6, 4, 70, (1, 4, 16640), 1, 0),
}


def ring_launches(x, weight, bias, groups, warps, tiles, stages, ahead, blocks, patience):
    """k07's launches that read x once, as its plans make them, and the words between them."""
    from diffusion.k07_group_norm_silu.solution import plans
    from diffusion.k07_group_norm_silu.solution.tuning import Config

    call = plans.Call(*(tensor.to("meta") for tensor in (x, weight, bias)), groups, 1e-5)
    config = Config("ring", warps, tiles, resident=warps, stages=stages, ahead=ahead, store=".cs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "multiprocessors", lambda _: blocks)
        patch.setattr(plans, "PATIENCE", patience)
        chain = plans._ring(call, config, pdl=True)
    (words,) = chain.scratch
    return *chain.launches, torch.zeros(words.shape, dtype=words.dtype)


def ring_output(launches, x, weight, bias, options):
    """What `ring_launches` write on the machine, the second behind the first."""
    from core.tests.ptx.cute import run_cute

    first, second, words = launches
    y = torch.full_like(x, float("nan"))
    traffic = kernels.run_launch(first, [words], None, options)
    run_cute(second, y, x, weight, bias, words, options=options, before=traffic)
    return y


@pytest.mark.parametrize("case", RINGS)
def test_k07_ring(case):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    names, *cuts, shape, groups, offset = RINGS[case]
    tensors, want = drawn(names, shape, groups, offset)
    outputs = []
    # Blocks that run alone wait for others that have not begun, lose patience and take their parts as well.
    for options, patience in (
        (Options(), 20),
        (Options(late=False, apart=True), 2),
        (Options(turns=0), 1),
        (Options(turns=1), 20),
        (Options(error=1), 20),
        (Options(error=-1), 20),
    ):
        y = ring_output(ring_launches(*tensors, groups, *cuts, patience), *tensors, options)
        assert_near(y, want)
        outputs.append(y)
    assert all(torch.equal(outputs[0], y) for y in outputs[1:4]), "whoever takes the statistics"


@pytest.mark.parametrize("opcode", ["bar.sync", "cp.async.wait_group", "griddepcontrol.wait"])
def test_a_missing_wait_is_found_in_k07s_ring(opcode, monkeypatch):
    """Every one of them, by what the machine checks or by a wrong result; some matter only where patience ends."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from core.tests.ptx import cute

    names, *cuts, shape, groups, offset = RINGS["float32"]
    tensors, want = drawn(names, shape, groups, offset)

    def run():
        for patience, options in ((20, DEFAULT), (1, Options(apart=True)), (1, Options(turns=0))):
            launches = ring_launches(*tensors, groups, *cuts, patience)
            assert_near(ring_output(launches, *tensors, options), want)
        return launches[1]

    launch = run()
    program = cute._program(type(launch), launch.constants)
    number = sum(instruction.opcode == opcode for instruction in program.instructions)
    assert number
    for i in range(number):
        monkeypatch.setattr(cute, "_program", lambda *_, i=i: without(program, opcode, i))
        with pytest.raises((PtxError, AssertionError)):
            run()


LABS = [
    # dtype, columns, batch, tokens, blocks
    (torch.bfloat16, 3840, 2, 7, 3),
    (torch.float16, 256, 1, 9, 2),
    (torch.bfloat16, 8192, 1, 3, 1),
    (torch.float16, 1280, 1, 2, 2),  # fewer rows than a block has stages
]


@pytest.mark.parametrize("double", [False, True], ids=["single", "double"])
@pytest.mark.parametrize(("dtype", "columns", "batch", "tokens", "blocks"), LABS)
def test_k04_blocks_that_stay(dtype, columns, batch, tokens, blocks, double):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from core.tests.ptx.cute import run_lab

    oracle = load_reference(task_of("norm_tanh_mul_add")).fused_norm_tanh_mul_add
    generator = torch.Generator().manual_seed(1)
    x, shift = (torch.randn(batch, tokens, columns, generator=generator).to(dtype) for _ in range(2))
    weight, weight2 = (torch.randn(columns, generator=generator).to(dtype) for _ in range(2))
    scale, scale2 = (torch.randn(1, 1, columns, generator=generator).to(dtype) for _ in range(2))
    outputs = []
    for options in (Options(), Options(late=False, apart=True)):
        y, y2 = (torch.full_like(x, float("nan")) for _ in range(2))
        second = (y2, weight2, scale2) if double else None
        run_lab(y, x, weight, scale, shift, 1e-5, blocks, second, options)
        outputs.append((y, y2) if double else (y,))
        assert_near(y, oracle(x, weight, None, scale, shift, "rms", 1e-5)[0])
        if double:  # of the y that is returned
            normed = y.double() * torch.rsqrt(y.double().square().mean(-1, keepdim=True) + 1e-5) * weight2
            assert_near(y2, normed * (1 + scale2.double()))
    assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True)), "whenever blocks run, and copies arrive"
