"""Sum the GPU time of one step by kind, from torch.profiler: a kernel counts for the range that launched it."""

from __future__ import annotations

import bisect
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kda_tools.models.step_record import Share
from kda_tools.traces.kernel_classes import KernelClass, classify

PREFIX = "kda::"
"""Prefix of the profiler ranges that `Seams.use(annotate=True)` puts around the tasks' ops."""
KINDS = {
    KernelClass.ATTENTION: "attention",
    KernelClass.GEMM: "gemm",
    KernelClass.COPY: "copy",
    KernelClass.CAT: "copy",
}
"""Class -> kind that a page shows; all other classes are `other`."""


def profiled(step: Callable[[], Any], prefix: str = PREFIX) -> Share:
    """One step of a warm model, profiled on this GPU; ranges with the `prefix` are kinds of their own."""
    step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as recorded:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        return share(json.loads(path.read_text())["traceEvents"], prefix)


def traced(step: Callable[[], Any], path: Path) -> None:
    """Write one step of a warm model to `path` as a Chrome trace for `kda model trace`, with shapes and stacks.

    Recording shapes and stacks slows the host down, so the trace must not be used for timing.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    second = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with torch.profiler.profile(
        activities=activities, record_shapes=True, with_stack=True, schedule=second
    ) as recorded:
        for _ in range(2):
            step()
            torch.cuda.synchronize()
            recorded.step()
    recorded.export_chrome_trace(str(path))


def middle(several: Sequence[Share]) -> Share:
    """The median of each kind: one step alone says how fast the GPU's clock was just then."""
    kinds = {kind for one in several for kind in one.by_kind}
    by_kind = {kind: median(one.by_kind.get(kind, 0.0) for one in several) for kind in sorted(kinds)}
    return Share(
        total_us=sum(by_kind.values()), by_kind=by_kind, launches=round(median(one.launches for one in several))
    )


def share(events: Iterable[Mapping[str, Any]], prefix: str = PREFIX) -> Share:
    """Sums of the kernels of a chrome trace.

    A kernel belongs to the innermost range or op that was open on the host when it was launched. The launch is found by
    the correlation number that it shares with the kernel.
    """
    spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[Any, tuple[Any, float]] = {}
    kernels = []
    for event in events:
        if event.get("ph") != "X":
            continue
        category, details = event.get("cat", ""), event.get("args", {})
        if category == "cpu_op" or (category == "user_annotation" and event["name"].startswith(prefix)):
            spans[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in details:
            launches.setdefault(details["correlation"], (event["tid"], event["ts"]))
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append((event["name"], details.get("correlation"), float(event["dur"])))
    for row in spans.values():
        row.sort()
    by_kind: dict[str, float] = defaultdict(float)
    for name, correlation, duration in kernels:
        where = launches.get(correlation)
        by_kind[kind(name, _open(spans[where[0]], where[1]) if where else [], prefix)] += duration
    return Share(total_us=sum(by_kind.values()), by_kind=dict(by_kind), launches=len(kernels))


def _open(spans: list[tuple[float, float, str]], moment: float) -> list[str]:
    """Names of the ranges that are open at `moment`, innermost first; ranges of a thread are nested."""
    first = bisect.bisect_right(spans, (moment, float("inf"), ""))
    return [name for start, end, name in reversed(spans[max(0, first - 400) : first]) if start <= moment <= end]


def kind(kernel: str, inside: list[str], prefix: str = PREFIX) -> str:
    """The range with the prefix that launched a kernel, else its kind by its name and the PyTorch op around it."""
    for name in inside:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return KINDS.get(classify(kernel, inside[0] if inside else ""), "other")
