"""`kda model trace`: sums checked by hand, attribution, idle time, and every input that is no trace."""

import gzip
import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.tools.tests.trace_factory import BF16, CAT, COPY, GELU, GEMM, HOST, Trace, production, two_steps
from kda_judge.contract.errors import UsageError
from kda_tools.traces import trace_read
from kda_tools.traces.hotspots import hotspots, rows
from kda_tools.traces.kernel_classes import KernelClass, classify, short_name
from kda_tools.traces.trace_events import collect, tensors
from kda_tools.traces.trace_profile import Attribution, Profile, profile
from kda_tools.traces.trace_read import TraceFile

NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def profiled(
    trace: Trace, folder: Path, steps: int | None = None, name: str = "t.json", variant: str = "torch"
) -> Profile:
    return profile(collect(TraceFile(trace.write(folder / name, variant))), steps)


def launched(trace: Trace, name: str, at: float, dur: float, **more: Any) -> None:
    """A kernel whose launch returns 5 us before it starts, inside of an operator."""
    trace.op("aten::op", at - 8, 4, ([8], BF16))
    trace.kernel(name, at, dur, trace.launch(at - 7, 2), **more)


# ---- what is computed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["torch", "compact", "array"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_sums_of_a_trace_that_was_made_by_hand(tmp_path: Path, variant: str, name: str) -> None:
    found = profiled(two_steps(), tmp_path, name=name, variant=variant)
    assert (found.steps, found.recorded_steps, found.streams) == (2, 2, 2)
    assert found.span_us == 2000
    assert found.gpu_us == 2 * (300 + 100 + 80 + 40 + 50 + 20 + 10)
    assert found.busy_us == 2 * (510 - 30 + 686 - 606)  # the copy runs beside the cat
    assert found.idle_us == 880
    # the first launch returns at 24; at 604 of each step; at 1024; nothing is launched behind 1686
    assert found.host_us == 24 + 2 * (604 - 510) + (1024 - 686) + (2000 - 1686)
    assert found.unknown_us == 0
    assert found.gpu == ("" if variant == "array" else "NVIDIA H200")


def test_every_kernel_is_attributed_or_counted_as_unattributed(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    sums = {how: found.attributed_us(how) for how in Attribution if found.attributed_us(how)}
    assert sums == {Attribution.OPERATOR: 1040, Attribution.FRAME: 100, Attribution.GRAPH: 60}
    assert found.unattributed_us == 60
    assert sum(sums.values()) == found.gpu_us


def test_hotspots_gather_layers_and_add_up(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    spots = {(spot.name, spot.module): spot for spot in hotspots(found)}
    assert sum(spot.us for spot in spots.values()) == found.gpu_us
    gelu = spots["aten::gelu", "GELU"]
    assert (gelu.kind, gelu.us, gelu.calls) == (KernelClass.ACTIVATION, 200, 2)
    (row,) = rows(gelu)
    assert row.inputs is not None
    assert (row.inputs[0].shape, row.inputs[0].dtype, row.inputs[0].strides) == (
        (1, 4096, 3072),
        BF16,
        (25165824, 6144, 1),
    )
    assert spots["aten::addmm", "Block"].calls == 2  # Block_0 and Block_1 are of one class
    frame = spots["sglang/runtime/layers/norm.py(10): forward", "Block"]
    assert frame.kernels == ("_rmsnorm_scale_shift_kernel",)
    assert rows(frame)[0].inputs is None


def test_a_kernel_is_credited_to_the_function_behind_a_launcher(tmp_path: Path) -> None:
    trace = Trace()
    trace.python("sglang/kernels/ops/rope_triton.py(3): rope", 0, 90)
    trace.python("sglang/kernels/ops/diffusion/common/fast_launch.py(141): replay", 10, 60)
    trace.kernel("_rope_kernel", 100, 10, trace.launch(20, 4, "cuLaunchKernelEx"))
    (spot,) = hotspots(profiled(trace, tmp_path))
    assert spot.name == "sglang/kernels/ops/rope_triton.py(3): rope"


def test_a_call_of_several_kernels_is_one_call_and_a_call_alone_for_each_launch_without_operator(
    tmp_path: Path,
) -> None:
    trace = Trace()
    trace.python("model.py(1): forward", 0, 100)
    trace.op("aten::sum", 10, 20, ([4096], "float"))
    for i in range(2):  # two passes of one call
        trace.kernel("reduce_kernel", 40 + 10 * i, 10, trace.launch(12 + 4 * i))
    for i in range(3):
        trace.kernel("triton_kernel", 60 + 10 * i, 10, trace.launch(40 + 4 * i))
    found = {spot.name: spot for spot in hotspots(profiled(trace, tmp_path))}
    assert found["aten::sum"].calls == 1
    assert found["aten::sum"].us == 20
    assert found["model.py(1): forward"].calls == 3


def test_the_innermost_operator_of_the_launching_thread_counts(tmp_path: Path) -> None:
    trace = Trace()
    trace.op("aten::linear", 10, 30, ([2, 4], BF16))
    trace.op("aten::addmm", 12, 20, ([4], BF16))
    trace.op("aten::mul", 10, 30, ([9], BF16), tid=HOST + 1)  # at the same time on another thread
    trace.kernel("k", 50, 10, trace.launch(15))
    trace.kernel("k", 60, 10, trace.launch(34))  # behind addmm, inside of linear
    trace.kernel("k", 70, 10, trace.launch(16, tid=HOST + 1))
    found = {spot.name: spot.us for spot in hotspots(profiled(trace, tmp_path))}
    assert found == {"aten::linear": 10, "aten::addmm": 10, "aten::mul": 10}


def test_an_operator_that_has_ended_gets_nothing_of_a_frame_that_outlives_it(tmp_path: Path) -> None:
    """A frame whose return the tracer has missed seems to last until a caller of it returns."""
    trace = Trace()
    trace.python("nn.Module: Block_0", 0, 100)
    trace.op("sglang::norm", 10, 10, ([4, 8], BF16))
    trace.python("ops/norm.py(7): norm", 11, 80)
    trace.kernel("norm_kernel", 200, 1, trace.launch(12))
    trace.python("nn.Module: Attention_0", 30, 40)
    trace.kernel("rope_kernel", 210, 1, trace.launch(40))
    trace.op("aten::add", 50, 5, ([4, 8], BF16))
    trace.kernel("add_kernel", 220, 1, trace.launch(51))
    found = {kernel: spot for spot in hotspots(profiled(trace, tmp_path)) for kernel in spot.kernels}
    assert found["norm_kernel"].name == "sglang::norm"
    assert found["rope_kernel"].name != "sglang::norm"
    assert found["rope_kernel"].module == "Attention"
    assert found["add_kernel"].name == "aten::add"


def test_why_kernels_are_unattributed(tmp_path: Path) -> None:
    trace = Trace()
    trace.annotation("execute_model_17", 0, 30)
    trace.kernel("annotated", 30, 1, trace.launch(10))
    trace.kernel("bare", 31, 2, trace.launch(40))
    trace.kernel("launched_before_the_trace", 50, 4, 999)
    trace.kernel("without_correlation", 54, 8, None)
    trace.op("aten::run", 60, 20, ([1], BF16))
    graph = trace.launch(62, name="cudaGraphLaunch")
    trace.kernel("in_graph", 90, 16, graph)
    found = profiled(trace, tmp_path)
    shares = {how: found.attributed_us(how) for how in Attribution}
    assert shares == {
        Attribution.OPERATOR: 0,
        Attribution.FRAME: 0,
        Attribution.ANNOTATION: 1,
        Attribution.GRAPH: 16,
        Attribution.BARE: 2,
        Attribution.NO_LAUNCH: 12,
    }
    (annotated,) = [spot for spot in hotspots(found) if spot.name == "annotated"]
    assert annotated.module == "execute_model_#"  # numbers in it count steps


def test_overlapping_kernels_are_busy_once_and_work_twice(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, "a", 100, 100)
    launched(trace, "b", 150, 100, stream=8)
    launched(trace, "c", 160, 20, stream=9)
    found = profiled(trace, tmp_path)
    assert (found.gpu_us, found.busy_us, found.span_us, found.streams) == (220, 150, 150, 3)


def test_idle_time_that_the_host_is_not_to_blame_for(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, "a", 100, 10)
    trace.op("aten::op", 101, 5, ([8], BF16))
    trace.kernel("waits", 150, 10, trace.launch(102, 2))  # returned at 104, while a ran
    trace.kernel("unknown", 180, 10, 12345)
    found = profiled(trace, tmp_path)
    assert (found.idle_us, found.host_us, found.unknown_us) == (40 + 20, 0, 20)
    assert [(gap.us, gap.known) for gap in found.gaps] == [(40, True), (20, False)]


def test_communication_that_runs_alone_is_told_apart(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, GEMM, 100, 50)
    launched(trace, NCCL, 120, 80, stream=9)
    found = profiled(trace, tmp_path)
    assert (found.communication_us, found.exposed_us) == (80, 50)


def test_without_marked_steps_the_window_is_the_gpus_and_steps_are_told(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, "a", 100, 100)
    launched(trace, "a", 300, 100)
    assert profiled(trace, tmp_path).steps == 1
    found = profiled(trace, tmp_path, steps=2)
    assert (found.steps, found.recorded_steps, found.span_us, found.step_us) == (2, 0, 300, 150)


def test_work_before_the_first_step_is_left_out_and_said(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, "warm", 50, 30)
    trace.step(3, 100, 200)
    launched(trace, "a", 150, 100)
    found = profiled(trace, tmp_path)
    assert (found.before_us, found.gpu_us, found.span_us) == (30, 100, 200)
    assert [cost.source.kernel for cost in found.costs] == ["a"]


@pytest.mark.parametrize(
    ("kernel", "operator", "module", "kind", "short"),
    [
        (GEMM, "aten::addmm", "", KernelClass.GEMM, GEMM),
        (GELU, "", "", KernelClass.ACTIVATION, "vectorized_elementwise_kernel[GeluCUDAKernelImpl]"),
        (CAT, "", "", KernelClass.CAT, "CatArrayBatchedCopy"),
        (COPY, "", "", KernelClass.COPY, COPY),
        (NCCL, "", "", KernelClass.COMMUNICATION, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
        (
            "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float>>(int)",
            "aten::add",
            "Block/RMSNorm",
            KernelClass.NORM,
            "vectorized_elementwise_kernel[CUDAFunctor_add]",
        ),
        (
            "void at::native::elementwise_kernel<4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda>>",
            "",
            "",
            KernelClass.COPY,
            "elementwise_kernel[direct_copy_kernel_cuda]",
        ),
        ("void sglang::fused_qknorm_rope<128l>(int)", "", "", KernelClass.ROPE, "sglang::fused_qknorm_rope"),
        ("_per_token_group_quant_8bit", "", "", KernelClass.QUANT, "_per_token_group_quant_8bit"),
        ("cudnn_sdpa_sm90_flash_fprop", "", "", KernelClass.ATTENTION, "cudnn_sdpa_sm90_flash_fprop"),
        ("fuse_scale_shift_kernel_blc_opt", "", "", KernelClass.MODULATION, "fuse_scale_shift_kernel_blc_opt"),
        ("TopKTopPSamplingFromProbKernel", "", "", KernelClass.SAMPLING, "TopKTopPSamplingFromProbKernel"),
        ("mystery", "aten::silu", "", KernelClass.ACTIVATION, "mystery"),
        ("mystery", "aten::mul", "Model/Attention", KernelClass.OTHER, "mystery"),
    ],
)  # fmt: skip
def test_classes_and_short_names(kernel: str, operator: str, module: str, kind: KernelClass, short: str) -> None:
    assert classify(kernel, operator, module) is kind
    assert short_name(kernel) == short


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void flashinfer::sampling::TopPSamplingFromProbKernel<1024>", KernelClass.SAMPLING),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8>", KernelClass.NORM),
        ("kernel_cutlass_kernel_flashinfernormkernelsrmsnormRMSNormKernel_object_at", KernelClass.NORM),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<1>", KernelClass.ATTENTION),
        ("void flash::flash_fwd_kernel<1>", KernelClass.ATTENTION),
        ("void vllm::reshape_and_cache_flash_kernel<1>", KernelClass.COPY),
        ("void sglang::topkGatingSoftmax<1>", KernelClass.OTHER),
    ],
)
def test_a_library_named_flash_is_no_attention(kernel: str, kind: KernelClass) -> None:
    assert classify(kernel) is kind


def test_lists_of_tensors_are_taken_apart_and_numbers_left_out() -> None:
    dims, types = b"[[[2,3],[4,3]],[],[5],[]]", b'["TensorList","Scalar","float",""]'
    assert tensors((dims, types, b"[[[3,1],[3,1]],[],[1],[]]")) == [
        ((2, 3), "", (3, 1)),
        ((4, 3), "", (3, 1)),
        ((5,), "float", (1,)),
    ]
    assert tensors((b"[[2,3]]", b'["float"]', b"")) == [((2, 3), "float", None)]


SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(gpu=SPANS, late=st.lists(st.integers(-30, 30), min_size=8, max_size=8))
def test_busy_and_host_bound_time_agree_with_counting_microseconds(
    tmp_path: Path, gpu: list[tuple[int, int]], late: list[int]
) -> None:
    trace, returned = Trace(), []
    gpu = sorted(gpu)
    for (start, length), lead in zip(gpu, late, strict=False):
        returned.append(start - max(lead, 0))
        trace.kernel("k", 100 + start, length, trace.launch(98 + returned[-1], 2))
    found = profiled(trace, tmp_path)
    first, last = gpu[0][0], max(start + length for start, length in gpu)
    busy = {at for start, length in gpu for at in range(start, start + length)}
    idle = set(range(first, last)) - busy
    ends = {at: next(i for i, (start, _) in enumerate(gpu) if start > at) for at in idle}
    assert (found.span_us, found.busy_us) == (last - first, len(busy))
    assert found.host_us == sum(returned[i] > at for at, i in ends.items())
    assert found.gpu_us == sum(length for _, length in gpu)


@st.composite
def nested(draw: st.DrawFn, start: int = 0, end: int = 64, depth: int = 0) -> list[tuple[int, int]]:
    """Ranges [a, b) that lie inside of each other or apart."""
    ranges = [(start, end)] if depth else []
    if depth < 4 and end - start > 2:
        cut = draw(st.integers(start + 1, end - 1))
        for one in ((start, cut), (cut, end)):
            if draw(st.booleans()):
                ranges += draw(nested(*one, depth + 1))
    return ranges


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=nested() | st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)).map(lambda one: (one[0], sum(one)))),
    order=st.randoms(use_true_random=False),
)
def test_the_innermost_operator_agrees_with_looking_at_all(
    tmp_path: Path, ranges: list[tuple[int, int]], order: Any
) -> None:
    trace = Trace()
    named = {f"op{i}": one for i, one in enumerate(dict.fromkeys(ranges))}
    for name, (start, end) in sorted(named.items(), key=lambda item: order.random()):  # files are in no order
        trace.op(name, start, end - start, ([1], BF16))
    for at in range(0, 64, 3):
        trace.kernel(f"k{at}", 100 + at, 1, trace.launch(at, 0.5))
    got = {kernel: spot.name for spot in hotspots(profiled(trace, tmp_path)) for kernel in spot.kernels}
    for at in range(0, 64, 3):
        around = [(-start, end, name) for name, (start, end) in named.items() if start <= at < end]
        assert got[f"k{at}"] == (min(around)[2] if around else f"k{at}")


# ---- reading --------------------------------------------------------------------------------------------------------


def awkward() -> Trace:
    """Events whose strings and lists look like the end of an event."""
    trace = two_steps()
    trace.host("user_annotation", 'a "},\n  {" in a name, ]} and \\', 5, 3)
    trace.host("cpu_op", "lists", 6, 1, **{"Concrete Inputs": [{"a": [{}, {"b": 1}]}, {"c": "]}"}], "Input Dims": [[]]})
    return trace


@pytest.mark.parametrize("variant", ["torch", "compact", "array"])
@pytest.mark.parametrize("piece", [64, 1000, 4096, 1 << 22])
def test_pieces_of_any_size_give_the_same_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, piece: int
) -> None:
    monkeypatch.setattr(trace_read, "PIECE", piece)
    trace = awkward()
    read = [event for batch in TraceFile(trace.write(tmp_path / "t.json", variant)).batches() for event in batch]
    assert [(event.name, event.ts, event.dur, event.ph) for event in read] == [
        (event["name"], event["ts"], event.get("dur", 0.0), event["ph"]) for event in trace.events
    ]


def test_a_large_trace_is_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_read, "PIECE", 1 << 16)
    size = production(tmp_path / "t.json", 12_000_000)
    tracemalloc.start()
    count = sum(len(batch) for batch in TraceFile(tmp_path / "t.json").batches())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 40_000
    assert peak < size / 4


def test_a_large_trace_is_profiled_in_time(tmp_path: Path) -> None:
    """12 MB in at most 12 s, which is what 200 MB in a minute needs with a margin of three for a busy machine."""
    production(tmp_path / "t.json", 12_000_000)
    start = time.process_time()
    found = profile(collect(TraceFile(tmp_path / "t.json")))
    assert time.process_time() - start < 12
    assert found.unattributed_us == 0
    assert found.gpu_us == pytest.approx(25.5 * sum(cost.launches for cost in found.costs))


def test_what_this_torch_writes_is_read(tmp_path: Path) -> None:
    """A real trace of this machine's CPU: every event is taken, and it is refused for having no GPU events alone."""
    import torch
    from torch.profiler import ProfilerActivity

    layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, with_modules=True
    ) as profiler:
        layer(torch.ones(4, 8))
    path = tmp_path / "t.json.gz"
    profiler.export_chrome_trace(str(path))
    events = [event for batch in TraceFile(path).batches() for event in batch]
    written = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert len(events) == len(written)
    assert {"nn.Module: Sequential_0", "nn.Module: Linear_0"} <= {event.name for event in events}
    (addmm,) = [event for event in events if event.name == "aten::addmm"]
    assert addmm.args is not None
    shape = tensors((bytes(addmm.args.dims), bytes(addmm.args.types), bytes(addmm.args.strides)))
    assert shape[:2] == [((8,), "float", (1,)), ((4, 8), "float", (8, 1))]
    with pytest.raises(UsageError, match=rf"expected GPU events .* got none in {len(written)} events"):
        collect(TraceFile(path))


# ---- what is no trace -----------------------------------------------------------------------------------------------


def refused(path: Path, *words: str) -> None:
    with pytest.raises(UsageError) as error:
        collect(TraceFile(path))
    for word in (str(path), *words):
        assert word in str(error.value)


def test_bad_files_are_named_with_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    refused(path, "No such file")
    refused(tmp_path, "Is a directory")
    for text, words in (
        ("", "got an empty file"),
        ("hello", "a list traceEvents, got none in it"),
        ('{"events": []}', "a list traceEvents, got none in it"),
        ('{"traceEvents": []}', "expected GPU events"),
        ("[]", "expected GPU events"),
        (
            '[{"ph": "X", "cat": "kernel", "ts": "soon"}]',
            "an event is not as the trace format has it: Expected `float`",
        ),
    ):
        path.write_text(text)
        refused(path, words)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("correlation", "9223372036854775808"),
        ("bytes", "1e30"),
        ("bytes", str(2**62)),
        ("dur", "1e308"),
        ("Input Strides", "3"),
        ("Input Strides", "[[[1]]]"),
        ("Input type", "null"),
        ("Input Dims", "[[[[[[2]]]]]]"),
        ("Input Dims", "[[1e30,-4]]"),
        ("Input Dims", "[[-4]]"),
        ("Input Dims", "[[[2],3]]"),
        ("deep", 100_000 * "[" + 100_000 * "]"),
    ],
    ids=lambda value: value[:20],
)
def test_values_that_no_trace_has_are_refused_by_the_whole_path(tmp_path: Path, key: str, value: str) -> None:
    path = tmp_path / "t.json"
    kernel = {"ph": "X", "cat": "kernel", "name": "k", "ts": 20, "dur": 5, "args": {"correlation": 1, "bytes": -1}}
    launch = {**kernel, "cat": "cuda_runtime", "ts": 2, "dur": 1}
    dims = {"Input Dims": [[2]], "Input type": ["float"], "Input Strides": [[1]]}
    op = {**kernel, "cat": "cpu_op", "ts": 1, "dur": 9, "args": dims}
    path.write_text(json.dumps([op, launch, kernel]))
    assert profile(collect(TraceFile(path))).costs[0].moved == 0
    for one in (op, launch, kernel):
        for place in (one, one["args"]):
            place.update({key: "@"} if key in place or key == "deep" else {})
    path.write_text(json.dumps([op, launch, kernel]).replace('"@"', value))
    with pytest.raises(UsageError, match=rf"^{path}: an (event is|operator's inputs are) not as the trace format has"):
        profile(collect(TraceFile(path)))


def test_a_trace_without_gpu_events(tmp_path: Path) -> None:
    trace = Trace()
    trace.op("aten::mm", 0, 10, ([2, 2], BF16))
    refused(trace.write(tmp_path / "t.json"), "expected GPU events (kernel, gpu_memcpy, gpu_memset)", "got none in 3")


@pytest.mark.parametrize("variant", ["torch", "compact", "array"])
def test_a_file_that_was_cut_off(tmp_path: Path, variant: str) -> None:
    text = two_steps().text(variant)
    path = tmp_path / "t.json"
    for at in (len(text) // 2, text.rindex("]") - 1):
        path.write_text(text[:at])
        refused(path, "it was cut off")


def test_gzip_that_was_cut_off_or_damaged(tmp_path: Path) -> None:
    packed = two_steps().write(tmp_path / "t.json.gz").read_bytes()
    path = tmp_path / "bad.json.gz"
    path.write_bytes(packed[: len(packed) // 2])
    refused(path, "the gzip stream ends before its end")
    middle = len(packed) // 2
    path.write_bytes(packed[:middle] + bytes(64) + packed[middle + 64 :])
    with pytest.raises(UsageError, match=r"damaged|ends before its end|JSON"):
        collect(TraceFile(path))


def test_several_gpus(tmp_path: Path) -> None:
    trace = two_steps()
    launched(trace, "a", 3000, 10, device=1)
    refused(
        trace.write(tmp_path / "t.json"), "expected the events of one GPU, got those of 0 (process 0), 1 (process 1)"
    )


def test_the_merged_traces_of_several_ranks(tmp_path: Path) -> None:
    """Each rank sees its GPU as number 0; a merge gives them processes of their own."""
    trace = two_steps()
    launched(trace, "a", 3000, 10)
    for event in trace.events[-2:]:
        event["pid"] = "[TP01] 0"
    refused(trace.write(tmp_path / "t.json"), "got those of 0 (process [TP01] 0), 0 (process 0)")


def test_gpu_events_that_take_no_time(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, "a", 100, 0)
    with pytest.raises(UsageError, match=rf"{tmp_path}.*: expected GPU events that take time"):
        profiled(trace, tmp_path)


def test_times_since_the_epoch_lose_no_digits(tmp_path: Path) -> None:
    trace = Trace()
    for i in range(1000):
        launched(trace, "a", 1.79e15 + 10 * i, 1.373)
    assert profiled(trace, tmp_path).gpu_us == pytest.approx(1373.0, rel=1e-12)


def test_steps_without_any_gpu_work_in_them(tmp_path: Path) -> None:
    trace = Trace()
    launched(trace, "a", 100, 10)
    trace.step(1, 500, 50)
    found = profiled(trace, tmp_path)
    assert (found.gpu_us, found.before_us, found.idle_us, found.share(1)) == (0, 10, 50, 0)
    assert hotspots(found) == []
