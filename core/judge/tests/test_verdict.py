"""Times that cannot be true are INVALID, each with the check that found it; possible ones are not."""

import dataclasses

import pytest

from kda_judge.arms.arm_process import Fault
from kda_judge.arms.protocol import Traffic
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.evidence.run_record import LIMIT_ARM, Metric, Settings, Verdict
from kda_judge.judge.row_notes import ArmNotes, RowNotes
from kda_judge.judge.verdict import result

MB = 1 << 20
SETTINGS = Settings(
    subject="solution",
    against=("baseline", "upstream_latest"),
    generations=2,
    samples=2,
    target_sample_us=1000,
    seeds=(1, 2, 3),
    families=("normal",),
    cold=False,
    isolate="none",
)


def arm(wall, device, **changes):
    """An honest arm: two generations of two samples."""
    samples = {Metric.WALL: wall, Metric.EVENTS: max(wall, device), Metric.DEVICE: device, Metric.LATENCY: 2 * wall}
    notes = ArmNotes(
        checks=9,
        samples={metric: [[value, value], [value, value]] for metric, value in samples.items()},
        calls=100,
        clock_ratios={Metric.WALL: [1.02] * 4, Metric.DEVICE: [1.04] * 4},
        kernels={"verified": 1.0, "timed": 1.0},
    )
    return dataclasses.replace(notes, **changes)


def row(footprint=200 * MB, **arms):
    """A row whose limit is 50 us on the device and 5 us on the host."""
    notes = RowNotes(
        row=Workload(id="row", op="op", production=True, inputs={"x": TensorSpec(shape=(2,), dtype="float32")}),
        traffic=Traffic(read=footprint // 2, written=footprint // 2),
        footprint=footprint,
        arms={
            "baseline": arm(90.0, 88.0),
            "upstream_latest": arm(70.0, 68.0),
            "solution": arm(56.0, 55.0),
            LIMIT_ARM: arm(5.0, 50.0),
        },
    )
    notes.arms.update(arms)
    notes.arms = {name: one for name, one in notes.arms.items() if one is not None}
    notes.complete = True
    return result(notes, SETTINGS, "cuda", l2_bytes=60 * MB)


def with_events(notes, value):
    notes.samples[Metric.EVENTS] = [[value, value]]
    return notes


def with_samples(notes, metric, value):
    notes.samples[metric] = [[value, value]]
    return notes


def without_device(notes):
    notes.samples[Metric.DEVICE] = [[], []]
    notes.no_graph = "operation not permitted when stream is capturing"
    return notes


def test_an_honest_row_is_left_to_its_samples():
    found = row(solution=arm(56.0, 55.0, clock_ratios={Metric.DEVICE: [1.01, 1.02, 3.0]}))  # one replay was held up
    assert (found.verdict, found.reason) == (Verdict.NOT_FASTER, "")
    assert found.limit is not None
    assert (found.limit.device_us, found.limit.host_us) == (50.0, 5.0)


@pytest.mark.parametrize(
    ("solution", "words"),
    [
        (arm(56.0, 40.0), "device 40.00 us is less than moving the bytes takes (50.00 us)"),
        (arm(40.0, 55.0), "wall 40.00 us is less than the GPU alone takes (55.00 us)"),
        (without_device(arm(8.0, 8.0)), "wall 8.00 us is less than moving the bytes takes (50.00 us)"),
        (with_samples(arm(56.0, 55.0), Metric.LATENCY, 9.0), "latency 9.00 us is less than the GPU alone takes (55.00"),
        (with_samples(arm(56.0, 55.0), Metric.COLD, 9.0), "cold 9.00 us is less than the GPU takes with its caches"),
        (with_events(arm(56.0, 55.0), 9.0), "events 9.00 us is less than the GPU alone takes (55.00 us)"),
        (with_events(without_device(arm(56.0, 55.0)), 9.0), "events 9.00 us is less than the calls take by the host"),
        (arm(56.0, 55.0, clock_ratios={Metric.WALL: [1.22] * 9}), "wall: the judge's clock saw 1.22 times the time"),
        (arm(56.0, 55.0, clock_ratios={Metric.DEVICE: [1.5] * 9}), "device: the judge's clock saw 1.50 times the time"),
        (arm(56.0, 55.0, clock_ratios={Metric.WALL: [0.7] * 9}), "wall: the judge's clock saw 0.70 times the time"),
        (arm(56.0, 55.0, kernels={"verified": 1.0, "timed": 0.0}), "1 kernels in the verified call, 0 per call"),
        (arm(56.0, 55.0, kernels={"verified": 2.0, "timed": 1.0}), "2 kernels in the verified call, 1 per call"),
        (arm(56.0, 55.0, kernels={}), "the profiler counted nothing"),
    ],
)
def test_impossible_times_are_invalid(solution, words):
    found = row(solution=solution)
    assert found.verdict is Verdict.INVALID
    assert found.reason.startswith("solution: ")
    assert words in found.reason


@pytest.mark.parametrize(("share", "verdict"), [(1.0, Verdict.NOT_FASTER), (0.88, Verdict.INVALID)])
def test_what_the_protocol_costs_is_no_lie(share, verdict):
    """Samples of 10 ms on a slow host: the protocol's 1.4 ms are more than a tenth of them."""
    limit = arm(5.0, 50.0, protocol_us={Metric.WALL: [1400.0] * 9})
    claimed = 10_000.0 * share
    found = row(
        solution=arm(
            56.0,
            55.0,
            clock_ratios={Metric.WALL: [11_500.0 / claimed] * 9},
            claimed_us={Metric.WALL: [claimed] * 9},
        ),
        **{LIMIT_ARM: limit},
    )
    assert found.verdict is verdict


def test_within_the_l2_the_copy_is_no_law_but_an_empty_launch_is():
    assert row(footprint=MB, solution=arm(45.0, 40.0)).verdict is Verdict.NOT_FASTER
    found = row(footprint=MB, solution=arm(3.0, 1.0))
    assert found.verdict is Verdict.INVALID
    assert "wall 3.00 us is less than an empty launch costs (5.00 us)" in found.reason


@pytest.mark.parametrize(
    ("footprint", "device", "verdict"),
    [
        (75.5, 17.88 / 18.98, Verdict.NOT_FASTER),  # fuse_scale_shift, qwen-4096x3072-row, swept on an H200
        (75.5, 0.84, Verdict.INVALID),
        (207.0, 48.11 / 47.96, Verdict.NOT_FASTER),  # fuse_scale_shift, qwen-edit-8424x3072-token: three reads a write
        (668.9, 152.63 / 151.48, Verdict.NOT_FASTER),  # norm_scale_shift, wan-ti2v-nss-18144x3072 in float32
        (332.1, 78.56 / 79.02, Verdict.NOT_FASTER),  # norm_infer, hunyuanvideo-rms-648720x128
        (207.0, 0.94, Verdict.INVALID),
    ],
)
def test_honest_kernels_pass_the_stream_by_a_little(footprint, device, verdict):
    assert row(footprint=int(footprint * 1e6), solution=arm(50.0 * device, 50.0 * device)).verdict is verdict


def test_a_second_opponent_that_cheats_is_named():
    assert row(upstream_latest=arm(70.0, 20.0)).reason.startswith("upstream_latest: device 20.00 us")


def test_a_second_opponent_that_failed_costs_only_its_own_ratio():
    found = row(upstream_latest=ArmNotes(fault=Fault(Verdict.ERROR, "nvcc: not found")))
    assert found.verdict is Verdict.NOT_FASTER
    assert found.arms["upstream_latest"].correctness.failure == "nvcc: not found"


def test_a_row_without_its_limit_is_invalid():
    found = row(**{LIMIT_ARM: ArmNotes(fault=Fault(Verdict.ERROR, "out of memory"))})
    assert found.verdict is Verdict.INVALID
    assert "limit was not measured: out of memory" in found.reason
    found = row(**{LIMIT_ARM: None})
    assert (found.verdict, found.limit) == (Verdict.INVALID, None)
    assert "limit was not measured: nobody asked for it" in found.reason


def test_why_there_is_no_device_metric_is_recorded():
    found = row(solution=without_device(arm(56.0, 55.0)))
    assert found.arms["solution"].no_graph == "operation not permitted when stream is capturing"
    assert Metric.DEVICE not in found.arms["solution"].samples


@pytest.mark.parametrize(
    ("said", "published"),
    [
        (
            "raised OSError: '/var/.cache/kda/x.cu' (jit.py, line 3, in build)",
            "raised OSError: 'x.cu' (jit.py, line 3, in build)",
        ),
        ("nvcc -I/opt/cuda/include -o /tmp/b-1/k.o k.cu:7: error", "nvcc -Iinclude -o k.o k.cu:7: error"),
        ('    |   File "/home/me/site-packages/torch/x.py", line 4', '    |   File "x.py", line 4'),
        ("see https://example.org/a/b, n/a, 3/4/5 and ../a/b", "see https://example.org/a/b, n/a, 3/4/5 and ../a/b"),
    ],
)
def test_what_is_published_names_no_folder_of_the_machine(said, published):
    broken = arm(56.0, 55.0, fault=Fault(Verdict.ERROR, said), no_graph=said)
    found = row(solution=broken)
    assert (found.verdict, found.reason) == (Verdict.ERROR, published)
    kept = found.arms["solution"]
    assert (kept.correctness.failure, kept.no_graph) == (published, published)
