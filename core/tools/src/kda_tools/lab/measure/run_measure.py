"""Measure a GPU: copies by size, launches, programmatic dependent launch, widths of accesses. It needs an idle GPU.

Clusters and TMA are not timed: what they cost is the exchange of a kernel that uses them, which k07's ledger has.
"""

from __future__ import annotations

import datetime as dt
import os
import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kda_judge import __version__
from kda_judge.arms.clocks import Graph
from kda_judge.arms.limit_arm import fastest_stream, host_floor
from kda_judge.arms.protocol import Place, Traffic
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import checkout_root
from kda_judge.evidence import gpu_state
from kda_judge.evidence.provenance import git_state
from kda_tools.lab.measure.hardware_record import Copy, HardwareRecord

MEGABYTES = (0.25, 1, 4, 8, 16, 25, 32, 50, 64, 100, 150, 250, 500, 900)
"""Of the copies, read and written together: below, around and above every L2."""
CALLS, REPLAYS, TRIALS = 50, 20, 5
"""Of a graph; the shortest trial counts."""
HOST_CALLS = 20_000
WIDTHS = (4, 8, 16)
WIDTH_BYTES = 256 * 10**6
OUTPUT = Place(offset=0, shape=(512, 1024), stride=(1024, 1), dtype="bfloat16")
"""What the host's floor with an output allocates: a megabyte."""


@triton.jit  # type: ignore[untyped-decorator]
def _empty(PDL: tl.constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def _copy_words(dst, src, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program: BLOCK words of 4 bytes; BLOCK over the threads is what one thread moves at once."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at, mask=at < n, other=0), mask=at < n)


def measure(command: str, tell: Callable[[str], None]) -> HardwareRecord:
    """Measure the current GPU.

    Raises:
        MissingRequirement: there is none, or others use it.
    """
    if not torch.cuda.is_available():
        raise MissingRequirement("kda doctor --measure: needs an NVIDIA GPU that torch can use; there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    before = gpu_state.read_state(device.index, {os.getpid()})
    if (busy := gpu_state.busy(before)) is not None:
        raise MissingRequirement(f"kda doctor --measure: {busy}; end what holds the GPU")
    properties: Any = torch.cuda.get_device_properties(device)
    pdl = properties.major >= 9
    copies = []
    for megabytes in MEGABYTES:
        half = int(megabytes * 10**6 / 2) // 16 * 16
        stream = fastest_stream(Traffic(read=half, written=half), in_place=False)
        copies.append(Copy(bytes=2 * half, us=_device_us(stream)))
        tell(f"copy of {megabytes:g} MB: {copies[-1].us:.2f} us, {copies[-1].terabytes_a_second:.2f} TB/s")
    times: dict[str, Any] = {
        "empty_us": _device_us(lambda *_, **__: _empty[1,](PDL=False, num_warps=4)),
        "empty_pdl_us": (
            _device_us(lambda *_, **__: _empty[1,](PDL=True, num_warps=4, launch_pdl=True)) if pdl else None
        ),
        "host_launch_us": _host_us((), device),
        "host_output_us": _host_us((OUTPUT,), device),
        "widths_us": {str(width): _width_us(width) for width in WIDTHS},
    }
    after = gpu_state.read_state(device.index, {os.getpid()})  # at the end: an idle GPU lowers its clocks
    state = git_state(checkout_root())
    return HardwareRecord(
        utc=dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        commit=state.commit,
        dirty=state.dirty,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": str(torch.version.cuda),
            "kda": __version__,
        },
        gpu=after,
        noise=tuple(gpu_state.noise(before, after)),
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        registers_per_sm=properties.regs_per_multiprocessor,
        warps_per_sm=properties.max_threads_per_multi_processor // 32,
        shared_bytes_per_sm=properties.shared_memory_per_multiprocessor,
        shared_bytes_per_block=properties.shared_memory_per_block_optin,
        copies=tuple(copies),
        **times,
    )


def _device_us(op: Callable[..., Any]) -> float:
    graph = Graph(op, [()] * CALLS, {})
    graph.replay(1)
    return min(graph.replay(REPLAYS)[1] / REPLAYS / CALLS for _ in range(TRIALS))


def _host_us(outputs: tuple[Place, ...], device: torch.device) -> float:
    run = host_floor(outputs, device)
    best = float("inf")
    for _ in range(TRIALS):
        run(100)
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(HOST_CALLS)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / HOST_CALLS * 1e6)
    return best


def _width_us(width: int) -> float:
    """A copy in which a thread moves so many bytes at once."""
    n, warps = WIDTH_BYTES // 2 // 4, 4
    source = torch.zeros(n, dtype=torch.int32, device="cuda")
    target, block = torch.empty_like(source), 32 * warps * width // 4
    grid = (triton.cdiv(n, block),)
    return _device_us(lambda *_, **__: _copy_words[grid](target, source, n, BLOCK=block, num_warps=warps))
