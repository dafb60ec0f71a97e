"""The ops around their kernels; `core/tools/tests/test_conformance.py` has what is the same for every task."""

import pytest
import torch
from torch import nn

from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_runtime.checks import given
from kda_runtime.launch import MISS, Launch
from kda_runtime.plans import plain_entry

from ..baseline import eager
from ..bench import reference, tune
from ..solution import (
    apply_group_norm_silu,
    group_norm_silu,
    launches,
    plans,
    triton_group_norm_silu,
    why_not,
)
from ..solution.plans import MAX_SECOND, MAX_SLOTS, TUNED, Config, cut, head, rows_of_programs
from .cases import assert_op, make, normal

OP, MODULE_OP = "triton_group_norm_silu", "apply_group_norm_silu"
SCALARS = {"num_groups": 4, "eps": 1e-5}


# --- the plain path and the eager arm


@pytest.mark.parametrize("shape", [(3, 8), (3, 8, 5), (2, 8, 3, 5), (1, 8, 2, 3, 2), (1, 8, 1, 2, 1, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_plain_path(shape, dtype):
    assert_op(*make(shape, dtype))
    assert_op(*make(shape, dtype), num_groups=1, eps=0.5)


def test_plain_path_of_other_layouts():
    x, weight, bias = make()
    assert_op(x.to(memory_format=torch.channels_last), weight, bias)
    assert_op(x.transpose(2, 3), weight, bias)


@pytest.mark.parametrize("shape", [(0, 8, 3), (2, 8, 0), (2, 8, 3, 0)])
def test_nothing_in_nothing_out(shape):
    assert triton_group_norm_silu(*make(shape), 4).shape == shape


def test_eager_arm():
    assert_op(*make(), op=eager.triton_group_norm_silu)
    x, norm = normal(2, 8, 3, dtype=torch.float32), nn.GroupNorm(4, 8)
    y = eager.apply_group_norm_silu(x, norm, nn.SiLU())
    torch.testing.assert_close(y, eager.triton_group_norm_silu(x, norm.weight, norm.bias, 4))


# --- what the kernels do not cover


def call(**tensors):
    return plans.Call(**(dict(zip(("x", "weight", "bias"), make(), strict=True)) | SCALARS | tensors))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"x": normal(2, 8, dtype=torch.float64)}, "x has dtype torch.float64"),
        ({"weight": normal(8, 2)[:, 0]}, "weight has gaps"),
        ({"bias": nn.Parameter(normal(8))}, "bias requires gradients"),
        ({"x": torch._neg_view(normal(2, 8))}, "x is a negated"),
        ({"x": torch.empty(1, 8, 2**30, device="meta")}, "a group has 2147483648 elements"),
    ],
)
def test_what_the_kernels_do_not_cover(tensors, reason):
    made = call(**tensors)
    assert reason in group_norm_silu._uncovered(made)
    if made.x.device == made.weight.device:
        assert launches(OP, given(made), SCALARS) == []


# --- what has no meaning


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("x", normal(8), r"x: expected two dimensions or more .*, got \[8\]"),
        ("weight", normal(4), r"weight: expected shape \[8\], got \[4\]"),
        ("weight", normal(1, 8), r"weight: expected shape \[8\], got \[1, 8\]"),
        ("num_groups", 3, r"num_groups: expected a divisor of x's 8 channels, got 3"),
        ("num_groups", 0, r"num_groups: expected a positive integer, got 0"),
        ("num_groups", 4.0, r"num_groups: expected a positive integer, got 4.0"),
    ],
)
def test_meaningless_arguments_are_named(argument, value, message):
    arguments = call()._asdict() | {argument: value}
    with pytest.raises(ValueError, match=f"{OP}: {message}"):
        triton_group_norm_silu(**arguments)
    with pytest.raises(ValueError, match=f"{OP}: {message}"):
        why_not(OP, **arguments)


# --- the form for modules


class Doubled(nn.GroupNorm):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked():
    norm = nn.GroupNorm(4, 8)
    norm.register_forward_hook(lambda _module, _args, y: 2 * y)
    return norm


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@torch.no_grad()
def test_modules_on_the_cpu():
    assert why_not(MODULE_OP, make()[0], nn.GroupNorm(4, 8), nn.SiLU()).startswith("x is on cpu")


@pytest.mark.parametrize(
    ("norm", "activation", "reason"),
    [
        (nn.BatchNorm1d(8).eval(), nn.SiLU(), "norm is no torch.nn.GroupNorm"),
        (nn.GroupNorm(4, 8, affine=False), nn.SiLU(), "norm is no torch.nn.GroupNorm with weight and bias"),
        (Doubled(4, 8), nn.SiLU(), "norm is no torch.nn.GroupNorm"),
        (hooked(), nn.SiLU(), "a module has hooks"),
        (nn.GroupNorm(4, 8), nn.GELU(), "activation is no torch.nn.SiLU"),
        (nn.GroupNorm(4, 8), nn.SiLU(inplace=True), "activation is no torch.nn.SiLU that works out of place"),
    ],
)
def test_modules_that_are_not_fused_run_as_they_are(norm, activation, reason, monkeypatch):
    x = normal(2, 8, 3, dtype=torch.float32)
    monkeypatch.setitem(vars(group_norm_silu.OP), "call", None)
    with torch.no_grad():
        assert reason in why_not(MODULE_OP, x, norm, activation)
        assert torch.equal(apply_group_norm_silu(x, norm, activation), activation(norm(x)))


def test_modules_are_not_fused_while_gradients_are_recorded():
    norm = nn.GroupNorm(4, 8)
    assert "gradients" in why_not(MODULE_OP, normal(2, 8), norm, nn.SiLU())
    apply_group_norm_silu(normal(2, 8, 3, dtype=torch.float32), norm, nn.SiLU()).sum().backward()
    assert norm.weight.grad is not None


@pytest.mark.xfail(
    torch.__version__.startswith("2.11."),
    reason="of CPU tensors: Dynamo of torch 2.11 has no type of a Triton kernel, which `is_interpreted` asks for",
)
@torch.no_grad()
def test_full_graph_compilation_of_modules():
    x, norm = normal(2, 8, 3, dtype=torch.float32), nn.GroupNorm(4, 8)
    compiled = torch.compile(apply_group_norm_silu, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, norm, nn.SiLU()), nn.SiLU()(norm(x)))


# --- how calls become launches


def meta(*shape, dtype=torch.float16):
    vector = torch.empty(shape[1], device="meta", dtype=dtype)
    return {"x": torch.empty(shape, device="meta", dtype=dtype), "weight": vector, "bias": vector}


@pytest.mark.parametrize("elements", [1, 7, 96, 1000, 4096, 4097, 81_920, 8_912_896, 2**29])
@pytest.mark.parametrize("item", [2, 4])
@pytest.mark.parametrize(("warps", "tiles"), [(4, 0), (4, 4), (16, 8), (1, 1)])
def test_cuts_cover_the_group_once(elements, item, warps, tiles):
    made, used, parts = cut(elements, elements, item, warps, tiles)
    assert (parts - 1) * made.tiles * made.block < elements <= parts * made.tiles * made.block
    assert parts == 1 or tiles
    # What is said to be full is, in every part.
    last = elements - (parts - 1) * made.tiles * made.block
    assert made.full * made.block <= last
    assert made.full == made.tiles or parts > 1 or (made.full + 1) * made.block > last
    # One 16-byte vector of a tile to a thread, at most 4096 parts where 16 warps with 8 vectors suffice.
    assert made.block * item <= used * 32 * 16
    assert not tiles or parts <= 4096 or used == 16


@pytest.mark.parametrize(("channel", "item", "shared"), [(240, 2, 8), (6, 2, 2), (35, 2, 1), (12, 4, 4), (1, 4, 1)])
def test_vectors_never_cross_a_channel(channel, item, shared):
    assert cut(4 * channel, channel, item, 4, 4).cut.shared == shared


@pytest.mark.parametrize("count", [1, 32, MAX_SECOND, MAX_SECOND + 1, 100_000, 2**30])
def test_grids_have_a_program_for_every_group(count):
    rows, layers = rows_of_programs(count)
    assert max(rows, layers) <= MAX_SECOND
    assert count <= rows * layers < count + layers


@pytest.mark.parametrize(
    ("parts", "total", "part_bytes", "ahead_mb", "begun"),
    [
        (10, 32, 32_768, 0, 10),  # the first group, without which nothing can be written
        (10, 32, 32_768, 1, 41),
        (10, 32, 32_768, 1000, 320),  # there are no more
        (1, 1, 2, 4, 1),
        (1, 2**20, 32_768, 0, 1025),  # a program of the first launch has a limited number of the others to initialise
    ],
)
def test_statistics_are_a_group_and_more_ahead(parts, total, part_bytes, ahead_mb, begun):
    assert head(parts, total, part_bytes, ahead_mb) == begun
    assert begun * MAX_SLOTS >= parts * total + 1


def test_flow_begins_with_the_statistics_of_the_first_parts():
    with TUNED.forced(Config("flow", warps=4, ahead_mb=2, resident=32)):
        first, rest = launches(OP, meta(1, 70, 8, 100, 100), {"num_groups": 7})
    parts = 800_000 // 4096 + 1
    begun = parts + 245  # of 8 KB
    assert (first.name, rest.name) == ("statistics_kernel", "flow_kernel")
    assert first.grid == (parts, 3, 1)
    assert first.args[-1] == rest.args[-1] == begun
    assert first.constexprs["SLOTS"] == 4  # 7 * 196 parts and a ticket
    assert begun * 4 >= 7 * parts + 1
    assert rest.grid == (132 * 8, 1, 1)  # multiprocessors and programs of each
    assert rest.constexprs["THREADS"] == 128
    assert rest.options["maxnreg"] * 32 * 32 <= 65536


def test_more_parts_than_flow_counts_are_stretched():
    with TUNED.forced(Config("flow")):
        made = launches(OP, meta(2**20, 2**11, 1), {"num_groups": 2**11})
    assert [launch.name for launch in made] == ["statistics_kernel", "output_kernel"]


def test_groups_beyond_one_program_are_shared():
    with TUNED.forced(Config("whole", warps=16)):
        assert [launch.name for launch in launches(OP, meta(1, 2, 49_152), {"num_groups": 2})] == ["whole_kernel"]
        assert len(launches(OP, meta(1, 2, 49_153), {"num_groups": 2})) == 2


@pytest.mark.parametrize(("groups", "fast"), [(8, False), (4, True)])
def test_one_element_is_compared_with_its_mean_exactly(groups, fast):
    (launch,) = launches(OP, meta(1, 8, 1), {"num_groups": groups})
    assert launch.constexprs["HOW"].fast is fast


def test_cluster_takes_whole_vectors_alone():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    with TUNED.forced(Config("cluster", warps=8, blocks=16)):
        (launch,) = launches(OP, meta(1, 32, 16_384), {"num_groups": 2})
        assert (launch.name, launch.config.tiles) == ("cluster_kernel", 8)
        assert launch.sizes == (16 * 2048, 2048, 2, 2, 16)  # vectors of 8 elements
        assert len(launches(OP, meta(1, 32, 16_388), {"num_groups": 2})) == 2  # 4 elements share a vector's channel
        assert len(launches(OP, meta(1, 64, 32_776), {"num_groups": 2})) == 2  # more than the registers hold
        # More channels than shared memory has; a program holds such a group, as it does those of odd pictures.
        for shape in ((1, 2 * 2056, 8), (1, 64, 7, 7)):
            assert [launch.name for launch in launches(OP, meta(*shape), {"num_groups": 2})] == ["whole_kernel"]


def test_ring_takes_what_its_blocks_can_hold():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    names = {}
    with TUNED.forced(Config("ring", warps=4, tiles=8, resident=16)):  # parts of 8192 elements on 132 * 4 blocks
        for channel in (8192, 8192 - 8, 8192 * 528, 8192 * 529, 8192 + 4):
            first, second = launches(OP, meta(1, 4, channel), {"num_groups": 2})
            names[channel] = first.name
        assert second.name == "output_kernel"
    assert [channel for channel, name in names.items() if name == "fresh_kernel"] == [8192, 8192 * 528]
    # A block has two parts of the largest group ahead: it says its last one before it writes its first.


def test_large_shapes_that_the_ring_does_not_take_flow(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    with TUNED.forced(Config("ring", warps=4, tiles=8, resident=16)):
        for channels, kernel in (
            (2048, "output_kernel"),
            (16_384, "flow_kernel"),
        ):  # of 4100 elements, no whole vectors
            made = launches(OP, meta(1, channels, 4100), {"num_groups": 32})
            assert [launch.name for launch in made] == ["statistics_kernel", kernel]
        monkeypatch.setattr(plans, "capability", lambda _: 12)  # less shared memory
        names = [launch.name for launch in launches(OP, meta(1, 512, 8192), {"num_groups": 32})]
        assert names == ["statistics_kernel", "output_kernel"]


KERNELS = {
    "whole": ["whole_kernel"],
    "cluster": ["cluster_kernel"],
    "stretch": ["statistics_kernel", "output_kernel"],
    "flow": ["statistics_kernel", "flow_kernel"],
    "ring": ["fresh_kernel", "ring_kernel"],
}


def test_candidates_are_tried_where_their_own_method_takes_the_call():
    """Else a sweep would name one method and time another."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (sweep,) = tune.SWEEPS
    tried = set()
    for channel in (128, 1024, 1600, 3000, 8192, 20_000, 40_000):  # 32 groups of 16 of them: 4 KB to 1.3 MB
        for config in sweep.candidates:
            with TUNED.forced(config) as asked:
                made = launches(OP, meta(1, 512, channel), {"num_groups": 32})
            if sweep.applies(config, asked[0]):
                tried.add(config)
                assert [launch.name for launch in made] == KERNELS[config.method], (channel, config)
    assert tried == set(sweep.candidates)


@pytest.mark.parametrize("method", ["stretch", "flow"])
def test_launches_are_one_entry(monkeypatch, method):
    seen = []
    monkeypatch.setattr(Launch, "run", lambda _, *given: seen.append(tuple(tensor.data_ptr() for tensor in given)))
    arguments = call()  # two batches of four groups
    with TUNED.forced(Config(method, warps=1)):
        made = plans.plan(arguments)
    entry = plain_entry(made, arguments[:3], arguments[3:])
    first, second = entry(*arguments), entry(*arguments)
    assert first.data_ptr() != second.data_ptr()
    assert (first.shape, first.stride(), first.dtype) == (arguments.x.shape, arguments.x.stride(), arguments.x.dtype)
    x, weight, bias = (tensor.data_ptr() for tensor in arguments[:3])
    for y, (statistics, output) in ((first, seen[:2]), (second, seen[2:])):
        partials, source = statistics
        assert source == x
        assert output == (y.data_ptr(), x, weight, bias, partials)
    for other in (call(x=normal(2, 8, 3, 6)), call(x=arguments.x.bfloat16()), call(eps=1e-6), call(num_groups=2)):
        assert entry(*other) is MISS
    assert len(seen) == 4


def row(shape, groups):
    vector = TensorSpec(shape=shape[1:2], dtype="float16")
    inputs = {"x": TensorSpec(shape=shape, dtype="float16"), "weight": vector, "bias": vector}
    return Workload(id="row", op=OP, inputs=inputs, scalars={"num_groups": groups})


@pytest.mark.parametrize(("groups", "again"), [(32, 0), (1, 128 * 2**20 * 2 - 60_000_000)])
def test_only_a_group_beyond_the_cache_is_read_twice(groups, again):
    assert reference.bytes_moved(row((1, 128, 2**20), groups)) == 2 * 128 * 2**20 * 2 + 2 * 128 * 2 + again


# --- on a GPU


METHODS = (
    Config("whole", warps=4),
    Config("stretch", warps=4),
    Config("flow", warps=4),
    Config("flow", warps=1, tiles=1, ahead_mb=0),
    Config("ring", warps=1, tiles=1, resident=16),
    Config("cluster", warps=4, blocks=8),
)
SHAPE = (2, 8, 8, 96)


@pytest.mark.gpu
@pytest.mark.parametrize("config", METHODS, ids=str)
class TestOnGpu:
    @pytest.fixture(autouse=True)
    def _forced(self, config):
        with TUNED.forced(config):
            yield

    def test_second_call_runs_the_plan_of_the_first(self, monkeypatch):
        assert_op(*make(SHAPE, device="cuda"))
        monkeypatch.setitem(vars(group_norm_silu.OP), "run", None)
        assert_op(*make(SHAPE, device="cuda"))

    def test_misaligned_views(self):
        tensors = make(SHAPE, device="cuda")
        assert_op(*tensors)
        for position in range(3):
            given = list(tensors)
            buffer = torch.empty(given[position].numel() + 1, dtype=torch.float16, device="cuda")
            given[position] = buffer[1:].view(given[position].shape).copy_(given[position])
            assert_op(*given)

    def test_every_call_returns_memory_of_its_own(self):
        tensors = make(SHAPE, device="cuda")
        first, second = (triton_group_norm_silu(*tensors, 4) for _ in range(2))
        assert first.data_ptr() != second.data_ptr()

    def test_cuda_graph_follows_its_inputs(self):
        x, weight, bias = make(SHAPE, device="cuda")
        triton_group_norm_silu(x, weight, bias, 4)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = triton_group_norm_silu(x, weight, bias, 4)
        for scale in (-2.0, 0.5):
            x.mul_(scale)

            def replay(*_):
                graph.replay()
                return y

            assert_op(x, weight, bias, op=replay)

    def test_streams_do_not_meet(self):
        inputs = [make(SHAPE, device="cuda", offset=float(i)) for i in range(8)]
        want = [triton_group_norm_silu(*tensors, 4) for tensors in inputs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in inputs]
        got = [[] for _ in inputs]
        for _ in range(20):
            for stream, tensors, mine in zip(streams, inputs, got, strict=True):
                with torch.cuda.stream(stream):
                    mine.append(triton_group_norm_silu(*tensors, 4))
        torch.cuda.synchronize()
        for expected, mine in zip(want, got, strict=True):
            assert all(torch.equal(expected, y) for y in mine)

    def test_input_written_just_before(self):
        # Launches that begin early must not read what the kernel ahead is still writing.
        _, weight, bias = make(SHAPE, device="cuda")
        for i in range(50):
            x = torch.randn(SHAPE, device="cuda").add_(i).half()
            y = triton_group_norm_silu(x, weight, bias, 4)
            assert_op(x, weight, bias, op=lambda *_, y=y: y)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    x = torch.zeros(65, 2, 2**24, dtype=torch.float16, device="cuda")
    x[-1] = normal(2, 2**24)
    weight, bias = make((1, 2), device="cuda")[1:]
    y = triton_group_norm_silu(x, weight, bias, 2)
    assert torch.equal(y[-1:], triton_group_norm_silu(x[-1:].clone(), weight, bias, 2))


@pytest.mark.gpu
class TestRing:
    """That reads x once, in blocks that wait for each other."""

    CONFIG = Config("ring", warps=4, tiles=2, resident=16, stages=4)
    SHAPE = (2, 64, 3, 64, 64)

    def check(self):
        tensors = make(self.SHAPE, device="cuda")
        with TUNED.forced(self.CONFIG):
            (_, launch) = launches(OP, dict(zip(("x", "weight", "bias"), tensors, strict=True)), {"num_groups": 4})
            outputs = [triton_group_norm_silu(*tensors, 4) for _ in range(20)]
            assert_op(*tensors)
        assert all(torch.equal(outputs[0], y) for y in outputs)
        return launch, outputs[0]

    def test_blocks_without_patience_take_what_is_missing_to_the_same_bits(self, monkeypatch):
        _, want = self.check()
        monkeypatch.setattr(plans, "PATIENCE", 1)
        launch, y = self.check()
        assert launch.patience == 1
        assert torch.equal(y, want)

    def test_blocks_may_be_more_than_have_room(self, monkeypatch):
        monkeypatch.setattr(plans, "PATIENCE", 8)
        monkeypatch.setattr(plans, "multiprocessors", lambda _: 2**20)
        launch, _ = self.check()
        assert launch.blocks == 768  # every part has a block of its own, and not all find room at once
