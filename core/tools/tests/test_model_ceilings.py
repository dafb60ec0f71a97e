"""Recorded hotspots of a step, and the page of ceilings that follows from them."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from core.tools.tests.test_model_cards import LIMIT, ROOT, judged
from core.tools.tests.trace_factory import BF16, Trace, two_steps
from kda_judge.evidence import provenance, record_log
from kda_tools.models import ceilings_page, step_flow, step_hotspots
from kda_tools.models.known_models import load_models
from kda_tools.models.step_flow import StepFlow
from kda_tools.publish.write_pages import write_pages
from kda_tools.traces.catalogue import Entry, Replaced, Status, Upstream
from kda_tools.traces.ceiling import Spot, SpotRow, ceiling
from kda_tools.traces.kernel_classes import KernelClass
from kda_tools.traces.trace_events import collect
from kda_tools.traces.trace_profile import profile
from kda_tools.traces.trace_read import TraceFile


def recorded(folder: Path, trace: Trace | None = None, **changed: object) -> step_hotspots.StepHotspots:
    facts = {
        "run_id": provenance.run_id(),
        "utc": provenance.utc(),
        "model": "flux",
        "release": "0.5.23",
        "layers": 2,
        "layers_of_model": 57,
        "commit": "0" * 40,
        "dirty": False,
        "noisy": (),
    }
    path = (trace or two_steps()).write(folder / "t.json")
    return step_hotspots.read_trace(path, SimpleNamespace(**facts | changed), ROOT)


def test_the_ceiling_of_recorded_hotspots_is_that_of_the_trace(tmp_path: Path) -> None:
    record = recorded(tmp_path)
    found = profile(collect(TraceFile(tmp_path / "t.json")), None)
    expected = ceiling(found, judged(found), LIMIT)
    made = step_hotspots.ceiling(record, {LIMIT.gpu: LIMIT})
    assert made is not None
    assert made.gpu_us == pytest.approx(expected.gpu_us)
    assert made.gpu_us - made.at_limit_us == pytest.approx(expected.gain_us)
    assert made.gpu_us - made.without_us == pytest.approx(sum(spot.us for spot in expected.spots))
    assert sum(record.by_class.values()) == pytest.approx(record.gpu_us)
    assert step_hotspots.ceiling(record, {}) is None


def published(folder: Path, check: bool) -> list[str]:
    return write_pages(ceilings_page.contents(folder)[0], check)


def test_the_page_shows_the_newest_undisturbed_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings_page, "copy_limit", lambda gpu, _tasks: LIMIT if gpu == LIMIT.gpu else None)
    assert published(tmp_path, check=False) == []
    for changed in ({"layers": 1}, {}, {"noisy": ("busy",), "layers": 3}, {"dirty": True, "layers": 4}):
        record_log.append(step_hotspots.log(tmp_path), recorded(tmp_path, **changed))
    assert published(tmp_path, check=False)
    text = (tmp_path / "docs" / "ceilings.md").read_text()
    (summary,) = [line for line in text.splitlines() if line.startswith("| [flux](flux.md) |")]
    made = step_hotspots.ceiling(recorded(tmp_path), {LIMIT.gpu: LIMIT})
    assert made is not None
    assert summary.startswith("| [flux](flux.md) | 0.5.23 | 2 of 57 | NVIDIA H200 | 0.60 | ")
    assert f" {made.gpu_us / made.at_limit_us:.3f}x | - | {made.gpu_us / made.without_us:.3f}x |" in summary
    assert published(tmp_path, check=True) == []
    flow = StepFlow(
        run_id=provenance.run_id(),
        utc=provenance.utc(),
        command="kda model flow flux",
        model="flux",
        release="0.5.23",
        sizes=load_models().model("flux").sizes,
        layers=2,
        layers_of_model=57,
        commit="0" * 40,
        dirty=False,
        kernels=(4_000_000, 8_000_000),
    )
    record_log.append(step_flow.log(tmp_path), flow)
    record_log.append(step_flow.log(tmp_path), flow.model_copy(update={"layers": 57, "kernels": (1,)}))
    assert published(tmp_path, check=False)
    left = made.without_us + 1 + 2  # microseconds, by LIMIT
    assert left < made.at_limit_us
    assert f"x | {made.gpu_us / left:.3f}x | " in (tmp_path / "docs" / "ceilings.md").read_text()
    text = ceilings_page.page_md([recorded(tmp_path)], {}, [])
    assert "\nLimits of the NVIDIA H200: none is known.\n" in text
    later = recorded(tmp_path, layers=4, dirty=True).model_copy(update={"run_id": "20260101T000000Z-abcdef"})
    for fit, layers in (({}, 2), ({later.run_id: STEP}, 4)):  # the step of its run is of files that are here
        text = ceilings_page.page_md([recorded(tmp_path), later], {}, [], fit)
        assert f"| [flux](flux.md) | 0.5.23 | {layers} of 57 |" in text
    text = ceilings_page.page_md(
        [later], {LIMIT.gpu: LIMIT}, [flow.model_copy(update={"layers": 4})], {later.run_id: STEP}
    )
    possible = made.gpu_us - left
    assert f" | {14 / possible:.0%} |\n" in text


def test_large_hotspots_without_a_limit_are_named(tmp_path: Path) -> None:
    """The inputs of a Python function are in no trace, and it may be the largest hotspot that is left."""
    record = recorded(tmp_path)
    large, small = (
        Spot(
            name="/where/ever/pack.py(7): pack",
            module="Block",
            kind=KernelClass.ROPE,
            status=Status.NEW,
            rows=(SpotRow(bytes=None, us_per_call=us, calls=2.0),),
        )
        for us in (9.0, 0.5)
    )
    found = record.model_copy(update={"spots": (*record.spots, large, small)})
    text = ceilings_page.sections([found], {LIMIT.gpu: LIMIT})["flux"]
    assert "## Hotspots, sglang 0.5.23, NVIDIA H200" in text
    assert f"`pack.py(7): pack` of Block (18.0 us, {18 / record.gpu_us:.2%})" in text
    assert "(1.0 us" not in text, "too small"
    assert "/where" not in text


def test_the_page_says_what_the_catalogue_knows_now() -> None:
    """A task that was added since a profile covers its hotspots, unless the trace's kernels showed another one."""
    upstream = (Upstream(release="sglang 0.5.23", path="a.py", op="mul"),)
    plain = {"pattern": "x", "kind": KernelClass.OTHER}
    either = Replaced(operator="^aten::(mul|add)$")
    task = Entry(id="a", task="k01_mul", replaces=(Replaced(operator="^aten::mul$", module="^Block$"),), **plain)
    missed = Entry(id="b", task="k02_add", upstream=upstream, replaces=(either,), **plain)
    runs = Entry(id="c", upstream=upstream, fast=("^sglang::mul$",), **plain)
    for name, module, recorded_status, expected in (
        ("aten::mul", "Block", Status.NOT_HIT, "task here: k01_mul"),
        ("aten::mul", "Norm", Status.NEW, "upstream, not hit: b"),
        ("aten::add", "Block", Status.TASK, "task here"),
        ("sglang::mul", "Block", Status.NEW, "new: runs upstream's c"),
        ("aten::cat", "Block", Status.NEW, "new"),
    ):
        spot = Spot(name=name, module=module, kind=KernelClass.OTHER, status=recorded_status, rows=())
        assert ceilings_page.catalogue_status(spot, (task, missed, runs)) == expected


def share(**by_kind: float) -> SimpleNamespace:
    return SimpleNamespace(by_kind=by_kind)


STEP = SimpleNamespace(
    arm="solution",
    calls=("one",),
    profile=SimpleNamespace(
        upstream=share(attention=50.0, gemm=20.0, copy=10.0, k08_gelu_cat=20.0),
        subject=share(attention=60.0, gemm=19.0, copy=10.0, k08_gelu_cat=6.0),
    ),
)


def test_the_part_of_the_ceiling_that_is_reached_is_what_kernels_bound_by_bytes_save() -> None:
    found = step_hotspots.StepCeiling(gpu_us=100.0, at_limit_us=90.0, fused_us=80.0, without_us=70.0)
    assert ceilings_page.reached(found, STEP) == pytest.approx(0.7)
    for changed in ({"arm": "upstream"}, {"calls": ()}, {"profile": None}):
        assert ceilings_page.reached(found, SimpleNamespace(**vars(STEP) | changed)) is None
    for fused in (None, 100.0):
        assert ceilings_page.reached(replace(found, fused_us=fused), STEP) is None


def test_copies_from_the_host_are_not_bound_by_the_gpus_memory(tmp_path: Path) -> None:
    plain, trace = recorded(tmp_path), two_steps()
    for at in (0.0, 1000.0):
        trace.op("aten::copy_", at + 80, 6, ([500_000], BF16), ([500_000], BF16), ([], "Scalar"))
        copy = trace.launch(at + 81, name="cudaMemcpyAsync")
        trace.gpu("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", at + 700, 90, 20, copy, bytes=1_000_000)
    found = recorded(tmp_path, trace)
    assert found.gpu_us == pytest.approx(plain.gpu_us + 90)
    assert found.spots == plain.spots


def test_a_fused_step_is_no_slower_than_one_at_the_limit(tmp_path: Path) -> None:
    """Upstream may do in a product's kernel what `kda model flow` counts as a kernel of its own."""
    record = recorded(tmp_path)
    flow = SimpleNamespace(model="flux", release="0.5.23", layers=2, kernels=(10**12,))
    made = step_hotspots.ceiling(record, {LIMIT.gpu: LIMIT}, [flow])
    assert made is not None
    assert made.fused_us == made.at_limit_us < made.gpu_us


def test_profiles_that_an_older_version_read_are_stale(tmp_path: Path) -> None:
    now = recorded(tmp_path)
    old = step_hotspots.StepHotspots.model_validate_json(now.model_dump_json(exclude={"attribution"}))
    assert "| [flux](flux.md) | 0.5.23 |" in ceilings_page.page_md([now], {}, [])
    assert "| [flux](flux.md) (stale) | 0.5.23 |" in ceilings_page.page_md([old], {}, [])
    assert "\n**Stale.** Profile of " in ceilings_page.sections([old], {})["flux"]
