"""Measure what the machine allows, as one more arm of the same run, without any code of the solutions.

- The host's floor: a C loop (`host_floor.c`) that allocates the op's outputs and launches an empty kernel. No call that
  returns new tensors and launches anything can cost the host less.
- The device's floor: a stream that reads and writes as many bytes as the op must, in place for in-place ops, the
  fastest of `streams` and `bulk_streams` at that very size. It is timed as a CUDA graph like the arms, so the fixed
  cost of a kernel is in it, and it reads the row's own inputs as they do. A plain copy is no ceiling for an op that
  reads more than it writes, and `Tensor.copy_` is none at all.
"""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kda_judge.arms.clocks import Arguments, Graph
from kda_judge.arms.protocol import Place, RowSpec, Traffic

WORD = 4
"""Bytes of the int32 elements that the stream moves."""
EVEN = 64
"""A stream reads a multiple of this many bytes, and writes one: each is up to 63 bytes less than the op's."""
SHAPES = ((512, 4), (1024, 4), (1024, 8), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16))
"""Elements of a tile, and warps: 1 to 8 vectors of 16 bytes per thread. A norm's program holds a row of up to 32 KB,
and reads all of it before it writes."""
SMALL_SHAPES = ((128, 1), (256, 1), (256, 2), (512, 2))
"""The same for streams with fewer than `FEW` of the smallest tiles above per multiprocessor. Work in smaller parts is
spread over more multiprocessors, and is done sooner."""
FEW = 4
HINTS = ("", "evict_first")
"""Cache hints of loads and stores. Evict-first helps beyond L2; data of other kernels may keep such lines out of it."""
PERSISTENT = (0, 4, 8)
"""Programs per multiprocessor that take tiles in turn, which helps where the L2 holds everything; 0: one per tile."""
WIDEST = 2**30
"""Most words whose places the stream counts in 32 bits."""
LINE = 32
"""Words of a line of 128 bytes, which the bulk copies move whole."""
BULK = ((64, 4, 3), (128, 3, 3), (128, 4, 2), (256, 3, 1), (256, 4, 1))
"""Lines of a tile, stages, and programs per multiprocessor of the bulk copies."""
BULK_LINES = 2048
"""Least lines for a bulk copy, 256 KB: below it, bytes that do not fill a line matter, and so does the latency."""
SHARED_BYTES = 224 << 10
"""Shared memory of a multiprocessor since Hopper, less what programs need for other things."""
MOST_TILES = 4
"""Most tiles that a program copies in a turn, so that all turns read and write in the op's ratio."""
TRIAL_CALLS, FEWEST_CALLS, MOST_CALLS = 10, 2, 100
"""Calls in the graph of a trial; for streams that take long the fewest, and for short ones the most."""
TRIAL_US, MOST_REPLAYS, TRIALS = 200, 20, 3
"""Microseconds of a trial, its most replays, and the number of trials, of which the shortest counts."""
FINALISTS, FINAL_US, ROUNDS = 8, 3000, 3
"""How many of the fastest streams are timed again in turn, for how many microseconds, and in how many rounds. The best
median wins."""
MOST_OUTPUTS = 16
"""As in host_floor.c."""
EMPTY = """.version 6.3
.target sm_75
.address_size 64
.visible .entry empty({parameters}) {{ ret; }}
"""
"""An empty kernel that is passed an address per output; the driver compiles it for any GPU since Turing."""

Op = Callable[..., Any]


class Output(ctypes.Structure):
    """`Output` of host_floor.c."""

    _fields_ = (
        ("dims", ctypes.c_int64),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int32),
    )


def host_floor(outputs: tuple[Place, ...], device: torch.device) -> Callable[[int], None]:
    """A loop in C of as many calls as asked for: each allocates tensors like `outputs` and launches an empty kernel.

    Raises:
        RuntimeError: the loop could not be built, loaded or run.
    """
    if len(outputs) > MOST_OUTPUTS:
        raise RuntimeError(f"the host's floor: expected at most {MOST_OUTPUTS} outputs, got {len(outputs)}")
    floor, allocator = _library(), _allocator()
    parameters = ", ".join(f".param .u64 p{i}" for i in range(len(outputs)))
    _demand(floor.prepare(ctypes.c_void_p(allocator._handle), EMPTY.format(parameters=parameters).encode(), b"empty"))
    arrays = [[(ctypes.c_int64 * len(of))(*of) for of in (place.shape, place.stride)] for place in outputs]
    described = (Output * MOST_OUTPUTS)(
        *(
            Output(len(place.shape), *pair, getattr(allocator, f"aoti_torch_dtype_{place.dtype}")())
            for place, pair in zip(outputs, arrays, strict=True)
        )
    )
    kind = getattr(allocator, f"aoti_torch_device_type_{device.type}")()

    def run(count: int, held: object = arrays) -> None:  # noqa: ARG001  # `described` holds only their addresses
        stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        number, index = ctypes.c_int64(len(outputs)), device.index or 0
        _demand(floor.run(ctypes.c_int64(count), described, number, kind, index, ctypes.c_void_p(stream)))

    return run


@cache
def _library() -> ctypes.CDLL:
    """The compiled loop, by the C compiler that Triton needs as well."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "host_floor.so"
        command = ["cc", "-O2", "-shared", "-fPIC", str(Path(__file__).with_name("host_floor.c")), "-ldl"]
        try:
            subprocess.run([*command, "-o", str(library)], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            message = getattr(error, "stderr", "") or error
            raise RuntimeError(f"the host's floor: its C loop could not be built: {message}") from None
        return ctypes.CDLL(str(library))


@cache
def _allocator() -> ctypes.CDLL:
    """PyTorch's allocator, through the C interface of AOTInductor."""
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def _demand(code: int) -> None:
    words = {-1: "the driver or torch lacks a function", -2: "an allocation failed"}
    if code:
        raise RuntimeError(f"the host's floor: {words.get(code, f'CUDA error {code}')}")


@triton.jit  # type: ignore[untyped-decorator]
def _turn(  # type: ignore[no-untyped-def]
    dst,
    src,
    zero,
    both,
    reads,
    writes,
    p,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    HINT: tl.constexpr,
):
    """Turn p: copy COPIED tiles, read READ further tiles, and write WRITTEN further tiles."""
    lane = tl.arange(0, BLOCK)
    # `zero` is only known at run time, or the compiler would drop an in-place store of what was just loaded. The stored
    # values still equal the loaded ones, so that a stream in place changes nothing.
    more = tl.zeros((BLOCK,), tl.int32) ^ zero
    for i in tl.static_range(READ):
        at = both + (p * READ + i) * BLOCK + lane
        more ^= tl.load(src + at, mask=at < reads, other=0, eviction_policy=HINT)
    loaded = ()
    for i in tl.static_range(COPIED):
        at = (p * COPIED + i) * BLOCK + lane
        loaded += (tl.load(src + at, mask=at < both, other=0, eviction_policy=HINT),)  # type: ignore[assignment]
    more &= zero
    for i in tl.static_range(COPIED):
        at = (p * COPIED + i) * BLOCK + lane
        tl.store(dst + at, loaded[i] ^ more, mask=at < both, eviction_policy=HINT)
    for i in tl.static_range(WRITTEN):
        at = both + (p * WRITTEN + i) * BLOCK + lane
        tl.store(dst + at, loaded[i % COPIED] ^ more, mask=at < writes, eviction_policy=HINT)


@triton.jit  # type: ignore[untyped-decorator]
def _either(  # type: ignore[no-untyped-def]
    dst, src, zero, both, reads, writes, p, BLOCK: tl.constexpr, READ: tl.constexpr, HINT: tl.constexpr
):
    """Turn p: copy one tile, or once all are copied, only read (if READ) or only write a further tile."""
    lane = tl.arange(0, BLOCK)
    copies = tl.cdiv(both, BLOCK)
    if p < copies:
        at = p * BLOCK + lane
        loaded = tl.load(src + at, mask=at < both, other=0, eviction_policy=HINT)
        tl.store(dst + at, loaded ^ zero, mask=at < both, eviction_policy=HINT)
    else:
        at = both + (p - copies) * BLOCK + lane
        if READ:
            kept = tl.load(src + at, mask=at < reads, other=0, eviction_policy=HINT) & zero
            tl.store(dst + lane, kept, mask=(kept != 0) & (lane < writes))  # never, which the compiler cannot know
        else:
            tl.store(dst + at, ~lane ^ zero, mask=at < writes, eviction_policy=HINT)


@triton.jit  # type: ignore[untyped-decorator]
def _stream(  # type: ignore[no-untyped-def]
    dst,
    src,
    zero,
    both,
    reads,
    writes,
    turns,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    HINT: tl.constexpr,
    PERSISTENT: tl.constexpr,
    APART: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Read the first `reads` words of src and write the first `writes` of dst; the first `both` of these are a copy.

    With APART a program does one of the three, and COPIED is 1.
    """
    if PDL:
        # The next grid's programs start as these end. If they start to wait earlier (launch_dependents), short streams
        # on an H100 take a third longer in some processes and not in others.
        tl.extra.cuda.gdc_wait()
    p = tl.program_id(0)
    if WIDE:
        p = p.to(tl.int64)
    if APART:
        _either(dst, src, zero, both, reads, writes, p, BLOCK, READ > 0, HINT)
    elif PERSISTENT:
        for turn in range(p, turns, tl.num_programs(0)):
            _turn(dst, src, zero, both, reads, writes, turn, BLOCK, COPIED, READ, WRITTEN, HINT)
    else:
        _turn(dst, src, zero, both, reads, writes, p, BLOCK, COPIED, READ, WRITTEN, HINT)


@triton.jit  # type: ignore[untyped-decorator]
def _bulk(  # type: ignore[no-untyped-def]
    dst,
    src,
    zero,
    both,
    turns,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    COPIED: tl.constexpr,
    READ: tl.constexpr,
    WRITTEN: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """As `_stream`, by the copy engine (cp.async.bulk): src and dst are descriptors of lines; tiles are loaded ahead.

    Lines after the end read as 0 and are not written. `both` is a whole number of tiles.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    for turn in tl.range(tl.program_id(0), turns, tl.num_programs(0), num_stages=STAGES):
        more = tl.zeros((BLOCK, LINE), tl.int32) ^ zero
        for i in tl.static_range(READ):
            more ^= src.load([both + (turn * READ + i) * BLOCK, 0])
        more &= zero
        loaded = more
        for i in tl.static_range(COPIED):
            loaded = src.load([(turn * COPIED + i) * BLOCK, 0]) ^ more
            dst.store([(turn * COPIED + i) * BLOCK, 0], loaded)
        for i in tl.static_range(WRITTEN):
            dst.store([both + (turn * WRITTEN + i) * BLOCK, 0], loaded)


def floors(row: RowSpec, arena: torch.Tensor) -> tuple[Op, list[Op]]:
    """The host's floor, a function of the number of calls, and the streams, of which the fastest is the device's floor.

    `arena` is the row's memory, as bytes. The streams read from its first input set on.
    """
    start = min(place.offset for place in row.sets[0].values() if place is not None)
    inputs = arena[start : start + (arena.numel() - start) // WORD * WORD].view(torch.int32)
    return host_floor(row.outputs, arena.device), all_streams(row.traffic, inputs)


def fastest_stream(traffic: Traffic) -> Op:
    """The fastest plain stream of `all_streams`."""
    return min(all_streams(traffic, plain=True), key=partial(trial, other=more_than_l2()))


def all_streams(traffic: Traffic, inputs: torch.Tensor | None = None, plain: bool = False) -> list[Op]:
    """Streams: kernel calls that read and write the bytes of `traffic` in the current device's memory, and no more.

    They are always in the same order, and ignore their arguments. With `plain` there are only the few that copy single
    tiles without hints, since to try all takes seconds. They read `inputs`, without changing them, if these are large
    enough, else memory of their own.
    """
    # Triton makes 16-byte loads only where it knows that numbers of words divide by 16.
    reads, writes = (max(size // EVEN * EVEN, EVEN) // WORD for size in (traffic.read, traffic.written))
    words = max(reads, writes if traffic.in_place else 0)
    if inputs is not None and inputs.numel() >= words and not (traffic.in_place and writes > reads):
        source = inputs[:words]
    else:
        source = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
    target = source if traffic.in_place else source.new_empty(writes)
    # Programmatic dependent launch sets a grid up while the one before drains; kernels under test may use it too.
    hopper = torch.cuda.get_device_capability()[0] >= 9
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    sizes = (min(reads, writes), reads, writes)
    tried = [
        _call(_stream, programs, (target, source, 0, *sizes, turns), constants, hopper)
        for programs, turns, constants in streams(reads, writes, multiprocessors)
        if not plain or is_plain(constants)
    ]
    bulk = bulk_streams(reads, writes, multiprocessors) if hopper and not plain else ()
    for programs, both, turns, constants in bulk:
        tensors = (lines(tensor, size, constants["BLOCK"]) for tensor, size in ((target, writes), (source, reads)))
        tried.append(_call(_bulk, programs, (*tensors, 0, both, turns), constants, hopper))
    return tried


def _call(kernel: Any, programs: int, arguments: tuple[object, ...], constants: Mapping[str, Any], pdl: bool) -> Op:
    """A call that ignores its arguments."""
    return lambda *_, **__: kernel[programs,](*arguments, PDL=pdl, launch_pdl=pdl, **constants)


def more_than_l2() -> torch.Tensor:
    """Memory of twice the L2's size."""
    return torch.empty(2 * torch.cuda.get_device_properties().L2_cache_size, dtype=torch.uint8, device="cuda")


def trial(stream: Op, other: torch.Tensor, calls: int = TRIAL_CALLS) -> float:
    """Microseconds of `calls` calls in a CUDA graph, after `other` has filled the L2, as another arm does."""
    graph = Graph(stream, [()] * calls, {})
    graph.replay(1)
    times = min(max(round(TRIAL_US / graph.replay(1)[1]), 1), MOST_REPLAYS)

    def timed() -> float:
        other.zero_()
        graph.replay(1)
        return graph.replay(times)[1] / times

    return min(timed() for _ in range(TRIALS))


def finalists(streams: Sequence[Op]) -> list[int]:
    """Indices of the fastest streams when other kernels' data fill the L2.

    Such data slow an evict-first stream down, even one that moves many times what the L2 holds, because its lines never
    push them out. Trials are short, because there are many streams.
    """
    other = more_than_l2()
    usual = trial(streams[0], other) / TRIAL_CALLS
    # There are a hundred trials: ten calls of a large row would take too long, ten of a small row less than a replay's
    # own cost.
    calls = max(FEWEST_CALLS, min(round(TRIAL_US / usual), MOST_CALLS))
    times = [trial(stream, other, calls) / calls for stream in streams]
    return sorted(range(len(streams)), key=times.__getitem__)[:FINALISTS]


def fastest_graph(streams: Sequence[Op], calls: Sequence[Arguments]) -> Graph:
    """The CUDA graph of these calls of the stream that is the fastest in such a graph, as long as a sample replays it.

    A stream that won a short trial may have been lucky. And on H100s some short streams always took longer in samples
    than in trials, while others did not.
    """
    other = more_than_l2()
    graphs = [Graph(stream, calls, {}) for stream in streams]
    found: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, times in zip(graphs, found, strict=True):
            other.zero_()
            once = graph.replay(1)[1]
            replays = round(FINAL_US / once)  # none of a long graph, whose first replay is as good as any other
            times.append(graph.replay(replays)[1] / replays if replays else once)
    return min(zip(graphs, found, strict=True), key=lambda pair: median(pair[1]))[0]


def lines(tensor: torch.Tensor, words: int, block: int) -> TensorDescriptor:
    """The tensor's first words as whole lines, `block` of which are copied at a time."""
    whole = words // LINE
    return TensorDescriptor(tensor, [whole, LINE], [LINE, 1], [block, LINE])


def streams(reads: int, writes: int, multiprocessors: int) -> Iterator[tuple[int, int, dict[str, int | str]]]:
    """Grids, turns and constants to try with `_stream` for these numbers of words."""
    both = min(reads, writes)
    parts = (both, reads - both, writes - both)
    wide = max(reads, writes) > WIDEST
    usual: dict[str, int | str] = {"APART": False, "HINT": "", "PERSISTENT": False, "WIDE": wide}
    for share, (block, warps), hint, each in itertools.product(shares(reads, writes), SHAPES, HINTS, PERSISTENT):
        turns = _turns(parts, share, block)
        programs = each * multiprocessors or turns
        if programs < turns or not each:
            constants = usual | _constants(share, block, warps) | {"HINT": hint, "PERSISTENT": each > 0}
            yield programs, turns, constants
    if both >= FEW * multiprocessors * SHAPES[0][0]:
        return
    for share, (block, warps) in itertools.product(shares(reads, writes), SMALL_SHAPES):
        turns = _turns(parts, share, block)
        yield turns, turns, usual | _constants(share, block, warps)
    for block, warps in (*SMALL_SHAPES, *SHAPES) if reads != writes else ():
        turns = sum(-(-words // block) for words in parts)
        share = (1, int(reads > writes), int(writes > reads))
        yield turns, turns, usual | _constants(share, block, warps) | {"APART": True}


def _turns(parts: tuple[int, int, int], share: tuple[int, int, int], block: int) -> int:
    """Turns until the words that are copied, only read and only written are done, with a `share` of tiles in each."""
    return max(-(-words // (tiles * block)) for words, tiles in zip(parts, share, strict=True) if tiles)


def _constants(share: tuple[int, int, int], block: int, warps: int) -> dict[str, int | str]:
    names: dict[str, int | str] = dict(zip(("COPIED", "READ", "WRITTEN"), share, strict=True))
    return names | {"BLOCK": block, "num_warps": warps}


def is_plain(constants: Mapping[str, int | str]) -> bool:
    """Whether these constants of `streams` are plain: one tile a turn, one program for each turn, no hints."""
    names = ("COPIED", "HINT", "PERSISTENT", "APART")
    return tuple(constants[name] for name in names) == (1, "", False, False)


def bulk_streams(reads: int, writes: int, multiprocessors: int) -> Iterator[tuple[int, int, int, dict[str, int]]]:
    """Grids, copied lines, turns and constants to try with `_bulk` for these numbers of words."""
    read, written = reads // LINE, writes // LINE
    if min(read, written) < BULK_LINES:
        return
    for share, (block, stages, each) in itertools.product(shares(reads, writes), BULK):
        copied, besides, more = share
        tiles = stages * (copied + besides) + copied + more  # tiles that are being loaded or stored
        if tiles * block * LINE * WORD * each > SHARED_BYTES:
            continue
        both = -(-min(read, written) // block) * block
        parts = zip((both, read - both, written - both), share, strict=True)
        turns = max(-(-size // (count * block)) for size, count in parts if count)
        names = dict(zip(("COPIED", "READ", "WRITTEN"), share, strict=True))
        constants = {**names, "LINE": LINE, "BLOCK": block, "STAGES": stages, "num_warps": max(block // 32, 4)}
        yield min(each * multiprocessors, turns), both, turns, constants


def shares(reads: int, writes: int) -> list[tuple[int, int, int]]:
    """Choices of the tiles that a turn copies, only reads, and only writes: with one copied, and with the best fit."""
    both, more = min(reads, writes), abs(reads - writes)
    found = []
    for copied in range(1, MOST_TILES + 1):
        # A small table beside large tensors is no reason for one more tile in every turn.
        besides = min(max(ceil(more * copied / both - 0.01), more > 0), 2 * MOST_TILES)
        found.append((copied, besides, 0) if reads > writes else (copied, 0, besides))
    # Tiles of a turn that have nothing to do because the ratio does not fit, per copied tile.
    idle = [abs(share[1] + share[2] - more * share[0] / both) / share[0] for share in found]
    return list(dict.fromkeys([found[0], found[idle.index(min(idle))]]))
