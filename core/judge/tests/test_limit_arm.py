"""The host's floor, against a stub of libcuda, and the device's: what a stream reads and writes."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kda_judge.arms import limit_arm
from kda_judge.arms.arm_worker import OpenRow, Worker
from kda_judge.arms.protocol import ArmSpec, Place, Traffic
from kda_judge.contract.task_import import import_path

STUB = """
#include <stdint.h>
#include <stdio.h>
int cuModuleLoadData(void **module, const void *image) { printf("image: %s\\n", (const char *)image); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)0x79; return FAIL; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned s,
                   void *stream, void **params, void **extra)
{
    printf("launch: %p %u %u %u %u %u %u %u %p", f, gx, gy, gz, bx, by, bz, s, stream);
    for (int i = 0; i < COUNT; i++)
        printf(" %d", *(int64_t *)params[i] != 0);
    printf("\\n");
    fflush(stdout);
    return 0;
}
"""
SCRIPT = """
import torch
from kda_judge.arms.limit_arm import host_floor
from kda_judge.arms.protocol import Place
like = (Place(offset=0, shape=(3, 5), stride=(5, 1), dtype="bfloat16"),
        Place(offset=0, shape=(), stride=(), dtype="int64"))
host_floor(like[:{count}], torch.device("cpu"))({calls})
"""


def run(folder: Path, count: int, calls: int, fail: int = 0) -> "subprocess.CompletedProcess[str]":
    (folder / "stub.c").write_text(STUB)
    build = ["cc", "-shared", "-fPIC", "-w", f"-DCOUNT={count}", f"-DFAIL={fail}", "stub.c", "-o", "libcuda.so.1"]
    subprocess.run(build, cwd=folder, check=True)
    env = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": import_path()}
    script = SCRIPT.format(count=count, calls=calls)
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_host_floor_allocates_the_outputs_and_launches_in_every_call(tmp_path, count):
    ran = run(tmp_path, count, calls=3)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count(".param .u64") == count
    launches = [line for line in ran.stdout.splitlines() if line.startswith("launch")]
    assert launches == ["launch: 0x79 1 1 1 32 1 1 0 (nil)" + " 1" * count] * 3


def test_what_the_driver_refuses_is_an_error(tmp_path):
    ran = run(tmp_path, 1, calls=1, fail=500)
    assert "RuntimeError: the host's floor: CUDA error 500" in ran.stderr


def test_without_a_driver_or_with_too_many_outputs_there_is_no_floor(tmp_path):
    place = Place(offset=0, shape=(2,), stride=(1,), dtype="float32")
    with pytest.raises(RuntimeError, match="expected at most 16 outputs, got 17"):
        limit_arm.host_floor((place,) * 17, torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="the driver or torch lacks a function"):
            limit_arm.host_floor((place,), torch.device("cpu"))


@pytest.mark.parametrize(
    ("reads", "writes", "expected"),
    [
        (100, 100, [(1, 0, 0)]),
        (200, 100, [(1, 1, 0)]),
        (150, 100, [(1, 1, 0), (2, 1, 0)]),
        (108, 100, [(1, 1, 0), (4, 1, 0)]),
        (100, 200, [(1, 0, 1)]),
        (10**6, 4, [(1, 8, 0)]),
        (25001, 10000, [(1, 2, 0), (2, 3, 0)]),
    ],
)
def test_reads_and_writes_are_shared_out_in_their_ratio(reads, writes, expected):
    assert limit_arm.shares(reads, writes) == expected


EVERY_WORD = """
import torch
from kda_judge.arms import limit_arm

limit_arm.FEW = 100
for reads, writes in ((5000, 5000), (6400, 5000), (5000, 9004), (9000, 8)):
    source, tried = torch.arange(1, reads + 1, dtype=torch.int32), 0
    found = list(limit_arm.streams(reads, writes, 1))
    apart = [one for one in found if one[2]["APART"]]
    assert bool(apart) == (reads != writes)
    for programs, turns, constants in found[::7] + apart[::5]:
        target = torch.zeros(writes + 1, dtype=torch.int32)
        missing = source.clone()
        sizes = (min(reads, writes), reads, writes, turns)
        limit_arm._stream[programs,](target, missing, 0, *sizes, PDL=False, **constants)
        assert (target[:-1] != 0).all() and target[-1] == 0, (reads, writes, constants)
        if reads == writes:
            assert torch.equal(target[:-1], source)
        # A word that no one reads can be changed without effect; here each of the last ones, which are read by few.
        before, other = torch.zeros_like(target), torch.zeros_like(target)
        limit_arm._stream[programs,](before, missing, -1, *sizes, PDL=False, **constants)
        missing[-1] ^= 1 << 30
        limit_arm._stream[programs,](other, missing, -1, *sizes, PDL=False, **constants)
        assert writes < 16 or not torch.equal(before, other), (reads, writes, constants)
        if reads >= writes:  # in place nothing changes
            same = missing.clone()
            limit_arm._stream[programs,](same, same, 0, *sizes, PDL=False, **constants)
            assert torch.equal(same, missing), (reads, writes, constants)
        tried += 1
    assert tried >= 2

limit_arm.BULK_LINES = 1
for reads, writes in ((40000, 40000), (64000, 40032), (40000, 72000)):
    tried = 0
    for programs, both, turns, constants in limit_arm.bulk_streams(reads, writes, 1):
        source, target = torch.arange(1, reads + 1, dtype=torch.int32), torch.full((writes + 8,), -1, dtype=torch.int32)
        described = [limit_arm.lines(*of, constants["BLOCK"]) for of in ((target, writes), (source, reads))]
        limit_arm._bulk[programs,](*described, 0, both, turns, PDL=False, **constants)
        same = min(reads, writes)
        assert (target[:writes] != -1).all() and (target[writes:] == -1).all(), (reads, writes, constants)
        assert reads > writes or torch.equal(target[:same], source[:same])
        limit_arm._bulk[programs,](*described, -1, both, turns, PDL=False, **constants)
        other = target.clone()
        source[-1] ^= 1 << 30
        limit_arm._bulk[programs,](*described[:1], limit_arm.lines(source, reads, constants["BLOCK"]), -1, both, turns,
                                   PDL=False, **constants)
        assert not torch.equal(target, other), (reads, writes, constants)
        if reads >= writes:
            same = source.clone()
            described = [limit_arm.lines(same, of, constants["BLOCK"]) for of in (writes, reads)]
            limit_arm._bulk[programs,](*described, 0, both, turns, PDL=False, **constants)
            assert torch.equal(same, source), (reads, writes, constants)
        tried += 1
    assert tried >= 2, (reads, writes)
assert not list(limit_arm.bulk_streams(10**6, 16, 1))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU runs the stream itself")
def test_a_stream_reads_and_writes_every_word():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": import_path()}
    ran = subprocess.run(
        [sys.executable, "-c", EVERY_WORD], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize(
    ("reads", "writes", "in_place", "words", "own"),
    [
        (4096, 4096, True, 1024, False),
        (4096, 1024, True, 1024, False),
        (4096, 8192, False, 1024, False),
        (4096, 8192, True, 4096, True),  # what is written besides is no copy, and would change the inputs
        (4096, 4096, True, 1023, True),
        (4112, 4112, True, 1024, False),  # 16 bytes more are left out: masks of 1028 words would end 16-byte loads
    ],
)
def test_a_stream_reads_the_rows_own_inputs_where_they_are_enough(monkeypatch, reads, writes, in_place, words, own):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(torch, "randint", lambda *args, **_: torch.zeros(args[2], dtype=torch.int32))
    given = []
    monkeypatch.setattr(limit_arm, "_call", lambda _kernel, _programs, arguments, *_: given.append(arguments[:2]))
    inputs = torch.zeros(words, dtype=torch.int32)
    limit_arm.all_streams(Traffic(read=reads, written=writes, in_place=in_place), inputs)
    assert given
    for target, source in given:
        assert (source.data_ptr() != inputs.data_ptr()) == own
        assert (target is source) == in_place
        assert source.numel() % 16 == target.numel() % 16 == 0


def test_few_streams_are_plain():
    """A sweep times one for every row; all of them take seconds."""
    for sizes in ((2**24, 2**24), (2**25, 2**24), (2**12, 2**13)):
        found = [constants for _, _, constants in limit_arm.streams(*sizes, 132)]
        plain = [(one["BLOCK"], one["num_warps"]) for one in found if limit_arm.is_plain(one)]
        small = min(sizes) < 2**20
        assert plain == list(limit_arm.SHAPES) + list(limit_arm.SMALL_SHAPES) * small
        assert len(found) >= 2 * len(plain)


def test_a_small_sum_is_also_streamed_by_as_many_programs_as_a_kernel_may_have():
    """Eight rows of 2048 bfloat16 numbers are summed: with tiles of 512 words two programs read all, in 1.5 times the
    time of a kernel with eight programs."""
    reads, writes = 8 * 1024, 1024
    programs = {count for count, _, _ in limit_arm.streams(reads, writes, 132)}
    assert {2, 8, 64} <= programs
    assert max(count for count, _, one in limit_arm.streams(2**24, 2**21, 132) if one["BLOCK"] >= 512) > 2**10
    assert not [one for _, _, one in limit_arm.streams(2**24, 2**21, 132) if one["BLOCK"] < 512 or one["APART"]]


def test_trials_of_a_slow_stream_make_few_calls(monkeypatch):
    """A stream of 500 us, ten times in each of eight replays, would cost a hundred trials four seconds."""
    monkeypatch.setattr(limit_arm, "Graph", TimedGraph)
    monkeypatch.setattr(limit_arm, "more_than_l2", Cache)
    made = []

    def slow(count):
        made.append(count)
        return 500 * count

    assert limit_arm.finalists([slow] * 100) == list(range(limit_arm.FINALISTS))
    assert made.count(limit_arm.FEWEST_CALLS) > 3 * made.count(limit_arm.TRIAL_CALLS)


def test_bulk_copies_keep_tiles_on_their_way():
    for reads, writes in ((2**24, 2**24), (2**25, 2**24), (2**24, 2**25)):
        for _, _, _, constants in limit_arm.bulk_streams(reads, writes, 132):
            names = {name: "constexpr" for name in ("LINE", *constants, "PDL") if name != "num_warps"}
            described = f"tensordesc<i32[{constants['BLOCK']}, {limit_arm.LINE}]>"
            signature = {"dst": described, "src": described, "zero": "i32", "both": "i32", "turns": "i32", **names}
            values = {name: value for name, value in (constants | {"PDL": True}).items() if name != "num_warps"}
            source = ASTSource(limit_arm._bulk, signature, constexprs=values)
            options = {"num_warps": constants["num_warps"], "launch_pdl": True}
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            loads = (constants["STAGES"] - 1) * (constants["COPIED"] + constants["READ"])
            assert made.asm["ptx"].count("mbarrier.init") >= loads, "as many loads are on their way"
            assert made.metadata.shared <= limit_arm.SHARED_BYTES
            assert not re.findall(r"(ld|st)\.global", made.asm["ptx"])


class TimedGraph:
    """Instead of a CUDA graph: a stream is a function of the number of calls that says how long they take."""

    def __init__(self, stream, calls, _scalars):
        self.calls, self._stream = len(calls), stream

    def replay(self, times):
        took = sum(self._stream(self.calls) for _ in range(times))
        return took, took


class Cache:
    """An L2: `zero_` fills it, as another arm does."""

    full = False

    def zero_(self):
        self.full = True


def the_limit(streams):
    """The stream that the limits' worker times, after trials, in a graph of 300 calls."""
    finalists = [streams[number] for number in limit_arm.finalists(streams)]
    return limit_arm.fastest_graph(finalists, [()] * 300)._stream


def test_a_stream_that_is_fast_in_short_trials_alone_is_not_the_limit(monkeypatch):
    monkeypatch.setattr(limit_arm, "Graph", TimedGraph)
    monkeypatch.setattr(limit_arm, "more_than_l2", Cache)
    slow = [lambda count, us=us: us * count for us in range(20, 60)]
    lucky = lambda count: (9 if count <= limit_arm.TRIAL_CALLS else 11) * count  # noqa: E731
    best = lambda count: 10 * count  # noqa: E731
    streams = [*slow[:20], lucky, *slow[20:], best]
    assert the_limit(streams) is best
    assert streams[min(range(len(streams)), key=lambda number: limit_arm.trial(streams[number], Cache()))] is lucky


def test_a_stream_that_is_fast_while_no_other_data_fill_the_l2_is_not_the_limit(monkeypatch):
    cache = Cache()
    monkeypatch.setattr(limit_arm, "Graph", TimedGraph)
    monkeypatch.setattr(limit_arm, "more_than_l2", lambda: cache)

    def plain(count):
        cache.full = False
        return 10_000 * count

    def evict_first(count):
        return (11_000 if cache.full else 9_000) * count

    assert limit_arm.finalists([evict_first, plain]) == [1, 0]
    assert the_limit([evict_first, plain]) is the_limit([plain, evict_first]) is plain


@pytest.mark.parametrize(("each_us", "replays"), [(1, 1 + limit_arm.FINAL_US // 20), (100_000, 1)])
def test_the_limit_is_chosen_in_graphs_like_those_that_are_timed(monkeypatch, each_us, replays):
    monkeypatch.setattr(limit_arm, "Graph", TimedGraph)
    monkeypatch.setattr(limit_arm, "more_than_l2", Cache)
    replayed = []

    def steady(count):
        replayed.append(count)
        return each_us * count

    def small(count):
        return (0.8 if count < 20 else 1.3) * each_us * count

    assert limit_arm.fastest_graph([small, steady], [()] * 20)._stream is steady
    assert replayed == [20] * limit_arm.ROUNDS * replays, "a graph that takes long is replayed once a round"


def test_the_limits_worker_captures_the_fastest_of_the_chosen_streams(monkeypatch):
    monkeypatch.setattr(limit_arm, "Graph", TimedGraph)
    monkeypatch.setattr(limit_arm, "more_than_l2", Cache)
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: None)  # in a worker's process it lasts
    worker = Worker(ArmSpec(name="limit", folder="", module="", device="cpu", limit=True))
    called = []
    streams = [lambda count=0, us=us: called.append(us) or us * count for us in range(40, 20, -1)]

    def opened():
        spec = SimpleNamespace(hot=1, scalars={})
        worker._open = OpenRow(spec, [()], None, None, op=None, streams=list(streams))

    opened()
    chosen = worker.choose(streams=None).streams
    assert chosen == tuple(range(19, 19 - limit_arm.FINALISTS, -1))
    for streams_of_generation in (None, list(chosen[1:])):
        opened()
        called.clear()
        worker.warm(streams_of_generation)
        first = chosen if streams_of_generation is None else chosen[1:]
        assert len(called) == (len(streams) if streams_of_generation is None else len(first)), "others stay uncompiled"
        worker.choose(streams_of_generation)
        assert worker.capture("hot", 20).ok
        assert worker._open.graphs["hot"]._stream is streams[first[0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_the_chosen_stream_is_no_slower_than_all_others():
    traffic = Traffic(read=200 << 20, written=100 << 20, in_place=False)
    streams, other = limit_arm.all_streams(traffic), limit_arm.more_than_l2()
    chosen = limit_arm.fastest_graph([streams[number] for number in limit_arm.finalists(streams)], [()] * 100)

    def sampled(graph):
        other.zero_()
        return min(graph.replay(1)[1] for _ in range(3))

    assert sampled(chosen) <= 1.01 * min(sampled(limit_arm.Graph(stream, [()] * 100, {})) for stream in streams)


@pytest.mark.gpu
def test_the_host_floor_on_a_gpu_is_below_one_launch_of_pytorch():
    places = (Place(offset=0, shape=(64, 64), stride=(64, 1), dtype="float16"),)
    floor = limit_arm.host_floor(places, torch.device("cuda:0"))
    x = torch.zeros(64, 64, dtype=torch.float16, device="cuda")

    def seconds(call, count):
        import time

        call(10)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(count)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    assert 0 < seconds(floor, 2000) < seconds(lambda count: [torch.add(x, 1) for _ in range(count)], 2000)
