"""What the machine allows, measured as one more arm of the same run.

`floors` gives the limit worker two callables with any op's signature:

- for `wall`: allocate the op's outputs, then the cheapest launch of an empty kernel. No public
  function that returns new tensors and launches anything can cost the host less.
- for `device`: a streaming copy of as many bytes as the op must move, in place for in-place ops,
  the fastest of a grid of configurations at that very size. It is timed as a CUDA graph like the
  arms, so the fixed cost of a kernel is in it. `Tensor.copy_` is no ceiling: real kernels pass it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from kda_core.launch import MISS, Chain, Launch, bind
from kda_core.protocol import RowSpec
from kda_core.timing import Graph

WORD = 4
"""Bytes of the int32 elements that the copy moves."""
BLOCKS = (1024, 2048, 4096, 8192)
"""Elements per program: 1 to 16 vectors of 16 bytes per thread at 4 or 8 warps."""
WARPS = (4, 8)
STREAMING = (False, True)
"""Whether loads and stores carry the evict-first hint; it helps beyond L2 and hurts within."""
TRIAL_CALLS = 10
TRIAL_REPLAYS = 3

Op = Callable[..., Any]


@triton.jit
def _empty(a=None, b=None, c=None, d=None):  # type: ignore[no-untyped-def]
    """One pointer per output: an op of more than four would need more here."""


@triton.jit  # type: ignore[untyped-decorator]
def _stream(dst, src, zero, n, BLOCK: tl.constexpr, STREAMING: tl.constexpr, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
    inside = offsets < n
    hint: tl.constexpr = "evict_first" if STREAMING else ""
    words = tl.load(src + offsets, mask=inside, eviction_policy=hint)
    # `zero` is only known at run time: storing what was just loaded would be compiled away in place.
    tl.store(dst + offsets, words ^ zero, mask=inside, eviction_policy=hint)


def floors(row: RowSpec, device: str) -> tuple[Op, Op]:
    """The host floor and the device floor of `row`, as callables that ignore their arguments."""
    templates = [
        torch.empty_strided(place.shape, place.stride, dtype=getattr(torch, place.dtype), device="meta")
        for place in row.outputs
    ]
    host = cheapest_launch(templates, torch.device(device))
    if host() is MISS:
        raise RuntimeError(
            "the host floor's entry refused its own call (MISS): a floor that launches nothing is too low"
        )
    return host, fastest_copy(row.bytes_moved, in_place=bool(row.inplace))


def cheapest_launch(templates: list[torch.Tensor], device: torch.device) -> Op:
    """A public function that allocates tensors like these and launches, through what solutions have for that.

    One C function does both, for less than a Python function that calls two (4 to 8% of a small row on an H200).
    """
    if not templates:
        launch = bind(_empty, (1,), num_warps=1)

        def host_in_place(*_: object, **__: object) -> None:
            launch()

        return host_in_place
    described = Launch.make(_empty, (1,), *templates, num_warps=1)
    entry = Chain((described,), (tuple(range(len(templates))),), tuple(templates)).entry((), device=device.index)

    def host(*_: object, **__: object) -> Any:
        return entry()

    return host


def fastest_copy(bytes_moved: int, in_place: bool) -> Op:
    """The fastest streaming copy that reads and writes `bytes_moved` bytes in all (half each)."""
    words = max(bytes_moved // 2 // 16 * 16, 16) // WORD
    source = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    target = source if in_place else torch.empty_like(source)
    # Programmatic dependent launch sets a grid up while the one before drains; kernels under test may use it too.
    pdl = torch.cuda.get_device_capability()[0] >= 9
    best: tuple[float, Op] | None = None
    for block, warps, streaming in itertools.product(BLOCKS, WARPS, STREAMING):
        grid = (triton.cdiv(words, block),)
        constants = {"BLOCK": block, "STREAMING": streaming, "PDL": pdl}
        run = bind(_stream, grid, target, source, 0, words, **constants, num_warps=warps, launch_pdl=pdl)

        def copy(*_: object, run: Op = run, **__: object) -> None:
            run(target.data_ptr(), source.data_ptr())

        graph = Graph(copy, [()] * TRIAL_CALLS, {})
        graph.replay(1)
        time = min(graph.replay(1)[1] for _ in range(TRIAL_REPLAYS))
        if best is None or time < best[0]:
            best = (time, copy)
    assert best is not None
    return best[1]
