"""The CuTe DSL kernels as compiled for sm_90a, executed on the CPU by the PTX machine."""

from pathlib import Path

import pytest
import torch

from kda_judge.contract.tasks import Task
from kda_tools.lab.ptx import kernels
from kda_tools.lab.ptx.kernels import on_the_machine
from kda_tools.lab.ptx.parse import PtxError, without
from kda_tools.lab.ptx.run import DEFAULT, Options

from .. import solution
from ..bench import reference
from ..solution.plans import TUNED, Config


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
    (want,) = reference.triton_group_norm_silu(x, weight, bias, groups, 1e-5)
    return (x, weight, bias), want


def cluster_launch(x, weight, bias, groups, blocks, warps):
    """k07's cluster launch, as its plans make it."""
    from kda_runtime.launch import Chain

    from ..solution.cluster import ClusterLaunch

    total, channels = x.shape[0] * groups, x.shape[1]
    elements, vector = x.numel() // total, 16 // x.itemsize
    return ClusterLaunch(
        dtypes=(x.dtype, weight.dtype, bias.dtype),
        sizes=(elements // vector, elements * groups // channels // vector, total, groups, channels // groups),
        eps=1e-5,
        config=Config("cluster", warps, -(-elements * x.itemsize // (blocks * warps * 512)), blocks=blocks),
        otherwise=Chain((), ()),
    )


@pytest.mark.parametrize("case", CLUSTERS)
def test_k07_cluster(case):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from kda_tools.lab.ptx.cute import run_cute

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
    from kda_tools.lab.ptx.cute import run_cute

    x = torch.randn(1, 6, 64, generator=torch.Generator().manual_seed(1)).to(torch.float16)
    weight, bias = torch.ones(6, dtype=torch.float16), torch.tensor([0, -200, 60000, -60000, 0, 0], dtype=torch.float16)
    x[0, 0, ::4] -= 40  # normalised it is still far below, beside its neighbours
    x[0, 4, 3] = float("nan")
    weight = weight * torch.tensor([30, 1, 1, 1, 1, 1], dtype=torch.float16)
    y = torch.full_like(x, float("nan"))
    run_cute(cluster_launch(x, weight, bias, 3, 2, 1), y, x, weight, bias)
    want = reference.triton_group_norm_silu(x, weight, bias, 3, 1e-5)[0]
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
    from ..solution import plans

    call = plans.Call(*(tensor.to("meta") for tensor in (x, weight, bias)), groups, 1e-5)
    config = Config("ring", warps, tiles, resident=warps, stages=stages, ahead=ahead, store=".cs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "multiprocessors", lambda _: blocks)
        patch.setattr(plans, "PATIENCE", patience)
        chain = plans._ring(call, config)
    (words,) = chain.scratch
    return *chain.launches, torch.zeros(words.shape, dtype=words.dtype)


def ring_output(launches, x, weight, bias, options):
    """What `ring_launches` write on the machine, the second behind the first."""
    from kda_tools.lab.ptx.cute import run_cute

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
    from kda_tools.lab.ptx import cute

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


FLOWS = {
    "no more ahead than it must be": {"warps": 1, "tiles": 1, "ahead_mb": 0},
    "front to back": {"warps": 2, "tiles": 2, "ahead_mb": 1e-3, "reverse": False, "hints": True, "store": ".cs"},
}


@pytest.mark.parametrize("name", FLOWS)
def test_flow_in_whatever_order_blocks_run(name):
    (x, weight, bias), want = drawn("bbb", (1, 64, 3, 8, 8), 32, 3)
    with TUNED.forced(TUNED.config("flow", **FLOWS[name])):
        for options in (DEFAULT, Options(apart=True), *(Options(turns=seed) for seed in range(3))):
            with on_the_machine(Task(Path(__file__).parents[1]), options) as launched:
                assert_near(solution.triton_group_norm_silu(x, weight, bias, 32, 1e-5), want)
            assert [launch.name for launch in launched] == ["statistics_kernel", "flow_kernel"]
