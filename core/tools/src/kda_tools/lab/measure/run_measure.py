"""Measures an idle GPU: copies by size, launches, dependent launch, clusters, widths of accesses."""

from __future__ import annotations

import datetime as dt
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from kda_judge import __version__
from kda_judge.arms.clocks import Graph
from kda_judge.arms.limit_arm import WORD, all_streams, bulk_streams, host_floor, more_than_l2, trial
from kda_judge.arms.protocol import Place, Traffic
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import checkout_root
from kda_judge.evidence import gpu_state
from kda_judge.evidence.provenance import git_state
from kda_tools.lab.measure.hardware_record import Cluster, Copy, HardwareRecord

MEGABYTES = (0.25, 1, 4, 8, 16, 25, 32, 50, 64, 100, 150, 250, 500, 900)
"""Sizes of the copies, read and written bytes together: below, around and above every L2."""
CALLS, REPLAYS, TRIALS = 50, 20, 5
"""Calls in a graph, its replays in a trial, and trials; the shortest trial counts."""
CLUSTERS = (1, 2, 4, 8)
"""Blocks of a cluster; 8 is the most that every GPU with clusters takes."""
BARRIERS = 64
HOST_CALLS = 20_000
WIDTHS = (4, 8, 16)
NEXT_GRID = ("at once", "behind the loads", "at its end")
"""When a kernel lets the next grid's programs start: by `launch_dependents`, or as its own programs end."""
CHAIN_BYTES = 10**6
WIDTH_BYTES = 256 * 10**6
OUTPUT = Place(offset=0, shape=(512, 1024), stride=(1024, 1), dtype="bfloat16")
"""The output that is allocated for `host_output_us`: a megabyte."""


@triton.jit  # type: ignore[untyped-decorator]
def _empty(PDL: tl.constexpr) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def _meet(dst, BARRIERS: tl.constexpr, THREADS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Run BARRIERS barriers of a cluster. Every thread has one element, so that it comes to each barrier once."""
    at = tl.arange(0, THREADS)
    met = at
    for _ in tl.static_range(BARRIERS):
        met = tl.inline_asm_elementwise(
            "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 $0, $1;",
            "=r,r",
            [met],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.store(dst + at, met)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_words(dst, src, n, BLOCK: tl.constexpr, NEXT: tl.constexpr = ""):  # type: ignore[no-untyped-def]
    """One program copies BLOCK words of 4 bytes; a thread moves BLOCK / threads words at once.

    With NEXT, one of `NEXT_GRID`, it is launched by programmatic dependent launch.
    """
    if NEXT != "":
        tl.extra.cuda.gdc_wait()
        if NEXT == "at once":
            tl.extra.cuda.gdc_launch_dependents()
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(src + at, mask=at < n, other=0)
    if NEXT == "behind the loads":
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(dst + at, value, mask=at < n)


def measure(command: str, tell: Callable[[str], None]) -> HardwareRecord:
    """Measure the current GPU.

    Raises:
        MissingRequirement: there is no GPU, or other processes use it.
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
        copies.append(_copy(int(megabytes * 10**6 / 2) // 16 * 16, properties.multi_processor_count))
        tell(f"copy of {megabytes:g} MB: {copies[-1].us:.2f} us, {copies[-1].terabytes_a_second:.2f} TB/s")
    times: dict[str, Any] = {
        "empty_us": _device_us(lambda *_, **__: _empty[1,](PDL=False, num_warps=4)),
        "empty_pdl_us": (
            _device_us(lambda *_, **__: _empty[1,](PDL=True, num_warps=4, launch_pdl=True)) if pdl else None
        ),
        "next_grid_us": {when: _chain_us(when) for when in NEXT_GRID if pdl},
        "clusters": tuple(_cluster(blocks, properties.multi_processor_count) for blocks in CLUSTERS if pdl),
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


def _chain_us(when: str) -> float:
    """Microseconds of a copy in a chain of such copies with programmatic dependent launch."""
    n, block, warps = CHAIN_BYTES // 2 // WORD, 1024, 8
    source = torch.zeros(n, dtype=torch.int32, device="cuda")
    target, grid = torch.empty_like(source), (triton.cdiv(n, block),)
    return _device_us(
        lambda *_, **__: _copy_words[grid](target, source, n, BLOCK=block, NEXT=when, num_warps=warps, launch_pdl=True)
    )


def _device_us(op: Callable[..., Any]) -> float:
    graph = Graph(op, [()] * CALLS, {})
    graph.replay(1)
    return min(graph.replay(REPLAYS)[1] / REPLAYS / CALLS for _ in range(TRIALS))


def _copy(half: int, multiprocessors: int) -> Copy:
    """The fastest stream that reads `half` bytes and writes as many, and the fastest by the copy engine."""
    streams = all_streams(Traffic(read=half, written=half))
    words = half // WORD
    bulk = len(list(bulk_streams(words, words, multiprocessors))) if torch.cuda.get_device_capability()[0] >= 9 else 0
    groups = (streams[: len(streams) - bulk], streams[len(streams) - bulk :])  # the copy engine's are the last
    tried = partial(trial, other=more_than_l2())
    vectors, engine = (_device_us(min(some, key=tried)) if some else None for some in groups)
    return Copy(bytes=2 * half, us=min(filter(None, (vectors, engine))), bulk_us=engine)


def _cluster(blocks: int, multiprocessors: int) -> Cluster:
    grid, warps, threads = (multiprocessors // blocks,), 4, 128 * blocks
    target = torch.empty(threads, dtype=torch.int32, device="cuda")
    one, many = (
        _device_us(
            lambda *_, count=count, **__: _meet[grid](
                target, BARRIERS=count, THREADS=threads, num_warps=warps, num_ctas=blocks
            )
        )
        for count in (1, 1 + BARRIERS)
    )
    return Cluster(blocks=blocks, kernel_us=one, barrier_us=(many - one) / BARRIERS)


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
    """Microseconds of a copy in which a thread moves `width` bytes at once."""
    n, warps = WIDTH_BYTES // 2 // 4, 4
    source = torch.zeros(n, dtype=torch.int32, device="cuda")
    target, block = torch.empty_like(source), 32 * warps * width // 4
    grid = (triton.cdiv(n, block),)
    return _device_us(lambda *_, **__: _copy_words[grid](target, source, n, BLOCK=block, num_warps=warps))
