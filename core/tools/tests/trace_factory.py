"""Chrome traces as torch.profiler writes them, with events placed by hand, for the tests of `kda model trace`.

The layout follows Kineto's: a launch (`cuda_runtime` or `cuda_driver`) and its kernel share a `correlation`, an arrow
(`ac2g`) goes from one to the other, GPU events have the GPU as pid and the stream as tid, and a CUDA graph's kernels
all share the correlation of their one `cudaGraphLaunch`.
"""

import gzip
import json
from pathlib import Path
from typing import Any

HOST = 4242
H200 = {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150_121_545_728, "numSms": 132}


class Trace:
    """Events in the order they were added; times are microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "ts": 0.0, "pid": HOST, "tid": 0, "args": {"name": "python"}},
            {"name": "thread_sort_index", "ph": "M", "ts": 0.0, "pid": HOST, "tid": HOST, "args": {"sort_index": HOST}},
        ]
        self.correlation = 0

    def host(self, cat: str, name: str, ts: float, dur: float, tid: int = HOST, **args: Any) -> None:
        args = {"External id": len(self.events), **args}
        event = {"ph": "X", "cat": cat, "name": name, "pid": HOST, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def op(self, name: str, ts: float, dur: float, *inputs: tuple[Any, ...], tid: int = HOST) -> None:
        """An operator with (shape, dtype) or (shape, dtype, strides) of its inputs; ([], "Scalar") for a number."""
        strides = [one[2] if len(one) > 2 else _contiguous(one[0]) for one in inputs]
        recorded = {"Input type": [one[1] for one in inputs], "Input Strides": strides}
        self.host("cpu_op", name, ts, dur, tid, **recorded, **{"Input Dims": [one[0] for one in inputs]})

    def python(self, name: str, ts: float, dur: float, tid: int = HOST) -> None:
        self.host("python_function", name, ts, dur, tid, **{"Python id": len(self.events), "Python parent id": None})

    def annotation(self, name: str, ts: float, dur: float, tid: int = HOST) -> None:
        self.host("user_annotation", name, ts, dur, tid)
        self.gpu("gpu_user_annotation", name, ts + 1, dur, 7, None)

    def step(self, number: int, ts: float, dur: float) -> None:
        self.annotation(f"ProfilerStep#{number}", ts, dur)

    def launch(self, ts: float, dur: float = 2.0, name: str = "cudaLaunchKernel", tid: int = HOST) -> int:
        """The launch call; returns its correlation."""
        self.correlation += 1
        cat = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        self.host(cat, name, ts, dur, tid, cbid=211, correlation=self.correlation)
        flow = {"ph": "s", "id": self.correlation, "pid": HOST, "tid": tid, "ts": ts, "cat": "ac2g", "name": "ac2g"}
        self.events.append(flow)
        return self.correlation

    def kernel(
        self, name: str, ts: float, dur: float, correlation: int | None, stream: int = 7, device: int = 0, **args: Any
    ) -> None:
        shape = {"grid": [132, 1, 1], "block": [256, 1, 1], "registers per thread": 32, "shared memory": 0, **args}
        self.gpu("kernel", name, ts, dur, stream, correlation, device, **shape)

    def gpu(
        self,
        cat: str,
        name: str,
        ts: float,
        dur: float,
        stream: int,
        correlation: int | None,
        device: int = 0,
        **args: Any,
    ) -> None:
        where = {"pid": device, "tid": stream}
        args = {"device": device, "context": 1, "stream": stream, **args}
        if correlation is not None:
            args["correlation"] = correlation
        self.events.append({"ph": "X", "cat": cat, "name": name, **where, "ts": ts, "dur": dur, "args": args})
        if correlation is not None:
            flow = {"ph": "f", "id": correlation, **where, "ts": ts, "cat": "ac2g", "name": "ac2g", "bp": "e"}
            self.events.append(flow)

    def call(self, op: str, kernel: str, host: float, gpu: float, dur: float, *inputs: tuple[Any, ...]) -> None:
        """An operator at `host` that launches one kernel, which runs at `gpu`; the operator ends at host + 6."""
        self.op(op, host, 6.0, *inputs)
        self.kernel(kernel, gpu, dur, self.launch(host + 2))

    def text(self, variant: str = "torch", gpu: dict[str, Any] | None = H200) -> str:
        """The file: as Kineto prints it, in SGLang's compact form after its merge, or as a bare array of events."""
        header = {"schemaVersion": 1, "deviceProperties": [gpu] if gpu else [], "record_shapes": 1, "with_stack": 1}
        if variant == "array":
            return json.dumps(self.events)
        if variant == "compact":  # the events first, as whoever loads and dumps a trace may have them
            return json.dumps({"traceEvents": self.events, **header, "displayTimeUnit": "ms"}, separators=(",", ":"))
        assert variant == "torch"
        head = json.dumps(header, indent=2).removesuffix("\n}")
        events = ",\n  ".join(_kineto(event) for event in self.events)
        return (
            f'{head},\n  "displayTimeUnit": "ms",\n  "traceEvents": [\n  {events}\n  ],\n  "traceName": "t.json"\n}}\n'
        )

    def write(self, path: Path, variant: str = "torch", gpu: dict[str, Any] | None = H200) -> Path:
        text = self.text(variant, gpu).encode()
        path.write_bytes(gzip.compress(text, 1) if path.suffix == ".gz" else text)
        return path


def _kineto(event: dict[str, Any]) -> str:
    """One event over several lines, as Kineto prints it."""
    args = event.get("args")
    head = json.dumps({key: value for key, value in event.items() if key != "args"})[1:-1]
    return f"{{\n    {head}" + (f',\n    "args": {{\n      {json.dumps(args)[1:-1]}\n    }}' if args else "") + "\n  }"


def _contiguous(shape: list[Any]) -> list[Any]:
    if shape and isinstance(shape[0], list):  # a list of tensors
        return [_contiguous(one) for one in shape]
    strides, size = [], 1
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return strides[::-1]


BF16 = "c10::BFloat16"
GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"
GELU = "void at::native::vectorized_elementwise_kernel<8, at::native::GeluCUDAKernelImpl(at::TensorIteratorBase&)>(int)"
CAT = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::OpaqueType<2u>, unsigned int, 3>(int)"
COPY = "Memcpy DtoD (Device -> Device)"


def two_steps() -> Trace:
    """Two steps of 1000 us, alike. GPU time of each, from its start on:

    30..330 addmm, 330..430 gelu of a strided half, 430..510 cat, 440..480 a copy on another stream, 606..656 a Triton
    kernel from a Python frame, whose launch returns at 604, and 656..676 and 676..686 two kernels of a CUDA graph.
    """
    trace = Trace()
    for number in range(2):
        at = 1000.0 * number
        trace.step(number, at, 1000)
        trace.python("sglang/runtime/pipeline.py(88): denoise", at + 5, 700)
        trace.python(f"nn.Module: Block_{number}", at + 10, 605)
        trace.call("aten::addmm", GEMM, at + 20, at + 30, 300, ([64], BF16), ([4096, 64], BF16), ([64, 64], BF16))
        trace.python("nn.Module: GELU_1", at + 48, 10)
        trace.call("aten::gelu", GELU, at + 50, at + 330, 100, ([1, 4096, 3072], BF16, [25165824, 6144, 1]), ([], ""))
        pair = ([[4096, 3072], [4096, 3072]], "TensorList")
        trace.call("aten::cat", CAT, at + 60, at + 430, 80, pair, ([], "Scalar"))
        trace.op("aten::copy_", at + 70, 6, ([500_000], BF16), ([500_000], BF16), ([], "Scalar"))
        copy = trace.launch(at + 71, name="cudaMemcpyAsync")
        trace.gpu("gpu_memcpy", COPY, at + 440, 40, 20, copy, bytes=1_000_000)
        trace.python("sglang/runtime/layers/norm.py(10): forward", at + 590, 20)
        trace.python("triton/runtime/jit.py(700): run", at + 595, 12)
        trace.kernel("_rmsnorm_scale_shift_kernel", at + 606, 50, trace.launch(at + 600, 4, "cuLaunchKernelEx"))
        graph = trace.launch(at + 620, 10, "cudaGraphLaunch")
        trace.kernel("void fused_qknorm_rope_warp<128>(int)", at + 656, 20, graph, **{"graph node id": 1})
        trace.kernel("mystery_kernel", at + 676, 10, graph, **{"graph node id": 2})
    return trace


def production(path: Path, least_bytes: int) -> int:
    """A large trace in Kineto's form: layers of operators under modules and Python frames; returns its size in bytes.

    One layer is made with a placeholder for each time and correlation and repeated as text, which is what makes
    hundreds of megabytes cheap.
    """
    layer = Trace()
    layer.events.clear()
    layer.python("nn.Module: Block_1", 0, 400)
    for i in range(12):
        start = 5 + 30 * i
        layer.python(f"sglang/runtime/layers/part_{i}.py({100 + i}): forward", start, 28)
        layer.python(f"nn.Module: {'Linear' if i % 3 else 'RMSNorm'}_{i}", start + 1, 26)
        layer.python("torch/nn/modules/module.py(1779): _wrapped_call_impl", start + 2, 24)
        layer.op("aten::linear", start + 4, 14, ([1, 4096, 3072], BF16), ([3072, 3072], BF16), ([3072], BF16))
        layer.op("aten::addmm", start + 5, 12, ([3072], BF16), ([4096, 3072], BF16), ([3072, 3072], BF16))
        name = "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(int)"
        layer.kernel(name, 30 + start, 25.5, layer.launch(start + 8, name="cudaLaunchKernelExC"))
    per_layer, span = layer.correlation, 400.0
    events = [_kineto(event) for event in layer.events]
    size = layers = 0
    with path.open("w", encoding="utf-8") as file:
        size += file.write(
            json.dumps({"schemaVersion": 1, "deviceProperties": [H200]})[:-1] + ',\n  "traceEvents": [\n  '
        )
        while size < least_bytes:
            parts = []
            for event, text in zip(layer.events, events, strict=True):
                moved = text.replace(f'"ts": {event["ts"]}', f'"ts": {5_000_000 + event["ts"] + layers * span:.3f}')
                for key in ("correlation", "id"):
                    old = event.get("args", {}).get(key, event.get(key) if key == "id" else None)
                    if old is not None:
                        moved = moved.replace(f'"{key}": {old}', f'"{key}": {old + layers * per_layer}')
                parts.append(moved)
            size += file.write((",\n  " if layers else "") + ",\n  ".join(parts))
            layers += 1
        size += file.write('\n  ],\n  "traceName": "large.json"\n}\n')
    return size


if __name__ == "__main__":  # python trace_factory.py FILE MEGABYTES
    import sys

    print(production(Path(sys.argv[1]), int(sys.argv[2]) * 10**6), "bytes")
