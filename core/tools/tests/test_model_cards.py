"""The catalogue of fast paths, limits out of ledgers, and the cards that follow from both and a trace."""

import json
import re
import shutil
from pathlib import Path

import jsonschema
import pytest
import tomli

from core.judge.tests.records_factory import gpu_reading, make_checkout, make_record
from core.tools.tests.conftest import Kda
from core.tools.tests.every_task import every_task
from core.tools.tests.trace_factory import BF16, CAT, GELU, GEMM, Trace, two_steps
from kda_judge.contract.errors import ExitCode, UsageError
from kda_judge.contract.tasks import Task, find_task
from kda_judge.contract.workloads import load_workloads
from kda_judge.evidence import ledger
from kda_judge.evidence.run_record import Basis, Limit, RunRecord
from kda_runtime.launch import Launch
from kda_tools.knowledge.catalogue_find import known_entries
from kda_tools.lab.inspect.aot import launches_of_row, meta_tensors
from kda_tools.project import new_task
from kda_tools.project.validate import problems
from kda_tools.traces import cards, catalogue, trace_view
from kda_tools.traces.catalogue import Constraint, Entry, Finding, Replaced, Status, Upstream, judge
from kda_tools.traces.ceiling import ceiling
from kda_tools.traces.copy_limit import CopyLimit, copy_limit, envelope
from kda_tools.traces.hotspots import Hotspot, hotspots
from kda_tools.traces.kernel_classes import KernelClass
from kda_tools.traces.own_kernels import own_kernels
from kda_tools.traces.trace_events import collect
from kda_tools.traces.trace_profile import Profile, Tensor, profile
from kda_tools.traces.trace_read import TraceFile

ROOT = Path(__file__).resolve().parents[3]
UPSTREAM = (Upstream(release="sglang 0.5.23", path="a.py", op="fused"),)
LIMIT = CopyLimit("NVIDIA H200", ((1_000_000, 0.25), (100_000_000, 25.0)), ("run",))


def profiled(trace: Trace, folder: Path) -> Profile:
    return profile(collect(TraceFile(trace.write(folder / "t.json"))))


def judged(found: Profile, *entries: Entry) -> list[tuple[Hotspot, Finding]]:
    return [(spot, judge(spot, entries, found)) for spot in hotspots(found)]


def one(trace: Trace, folder: Path, *entries: Entry) -> Finding:
    """What is said of the largest hotspot."""
    return judged(profiled(trace, folder), *entries)[0][1]


# ---- catalogue ------------------------------------------------------------------------------------------------------


@every_task
def test_every_task_is_known_to_a_trace(task: Task) -> None:
    """docs/add_a_kernel.md says what an entry has. A task without an upstream release has nothing to name there."""
    assert task.folder in {entry.task for entry in catalogue.load(ROOT)} or not task.config.upstream


@every_task
def test_every_kernel_that_a_task_launches_is_known_as_its_own(task: Task, tmp_path: Path) -> None:
    solution = task.load("solution")
    rows = [row for row in task.workloads if row.production]
    names = {
        launch.name if isinstance(launch, Launch) else f"kernel_cutlass_{launch.name}_____BFloat16_8"
        for row in rows
        for launch in launches_of_row(solution, row, meta_tensors(row))
    }
    assert names
    entries = catalogue.load(ROOT)
    for name in names if task.folder in {entry.task for entry in entries} else ():
        trace = Trace()
        trace.python("model.py(1): forward", 0, 100)
        trace.kernel(name, 50, 20, trace.launch(10))
        found = one(trace, tmp_path, *entries)
        assert (found.status, found.why) == (Status.TASK, task.folder), name


def test_kernels_of_a_solution_and_not_their_helpers(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "@triton.jit\ndef half(x):\n    return x / 2\n\n@triton.jit(debug=True)\ndef run(x):\n    half(x)\n\n"
        "@cute.kernel\ndef ring(x):\n    pass\n\ndef host(x):\n    run[(1,)](x); ring(x).launch()\n"
    )
    (tmp_path / "b.cu").write_text("template <int N>\n__global__ void __launch_bounds__(N)\nnorm(float* x) {}\n")
    shown = {"run": "run", "ring": "kernel_cutlass_ring___Float32", "norm": "void (anonymous)::norm<4>(float*)"}
    found = own_kernels(tmp_path)
    assert set(found) == set(shown)
    assert all(re.search(pattern, shown[name]) for name, pattern in found.items())
    assert not any(re.search(pattern, "run_other") or re.search(pattern, "my_norm") for pattern in found.values())
    (tmp_path / "a.py").write_text("def")
    with pytest.raises(UsageError, match=r"a\.py: expected Python"):
        own_kernels(tmp_path)


def test_the_catalogue_of_this_checkout_is_whole() -> None:
    entries = catalogue.load(ROOT)
    assert {entry.task for entry in entries} - {None} <= {path.parent.name for path in ROOT.glob("*/*/config.toml")}
    assert {"compile-comm-reorder", "distributed-overlap"} <= {entry.id for entry in entries}
    for entry in entries:
        assert entry.upstream or entry.task
    # A pattern that nothing finds in a trace launches no kernel of its own, or kernels that show another one.
    shown = [pattern for entry in entries for pattern in entry.fast]
    for known in known_entries(ROOT):
        if not known.entry.fast and not known.entry.replaces:
            kernels = {kernel for _, op in known.ops for kernel in op.kernels}
            assert all(any(re.search(one, kernel) for one in shown) for kernel in kernels), known.entry.id


def test_the_schema_for_editors_takes_the_catalogue() -> None:
    schema = json.loads((ROOT / "docs" / "schema" / "catalogue.schema.json").read_text())
    for path in sorted((ROOT / "docs" / "catalogue").glob("*.toml")):
        jsonschema.validate(tomli.loads(path.read_text()), schema)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[[entry]]\nid = 'a'\nkind = 'norm'\npatern = 'x'", "unknown key 'entry.0.patern'; did you mean pattern"),
        ("[[entry]]\nid = 'a'\npattern = 'x'\nkind = 'norms'", "key 'entry.0.kind'"),
        ("[[entry]]\nid = 'a'\npattern = 'x'\nkind = 'norm'\nfast = ['(']", "expected a regular expression"),
        (
            "[[entry]]\nid = 'a'\npattern = 'x'\nkind = 'norm'\ntask = 'k99_no'",
            "expected a task's folder, got 'k99_no'",
        ),
        ("[[entry]]\nid = 'a'\npattern = 'x'\nkind = 'norm'\n" * 2, "expected an id of its own"),
    ],
)
def test_a_broken_catalogue_is_refused_by_file_and_key(tmp_path: Path, text: str, words: str) -> None:
    folder = tmp_path / "docs" / "catalogue"
    folder.mkdir(parents=True)
    with pytest.raises(UsageError, match=r"expected the catalogue's TOML files, got none"):
        catalogue.load(tmp_path)
    (folder / "a.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        catalogue.load(tmp_path)
    assert str(folder / "a.toml") in str(error.value)
    assert words in str(error.value)


def test_the_status_of_a_hotspot(tmp_path: Path) -> None:
    trace = Trace()
    trace.python("nn.Module: GELU_3", 0, 90)
    trace.call("aten::gelu", GELU, 10, 50, 20, ([4096, 3072], BF16))
    plain = {"id": "a", "pattern": "gelu", "kind": KernelClass.ACTIVATION}
    fast = ("GeluCUDAKernelImpl",)
    here = Replaced(operator="^aten::gelu$", module="GELU")
    elsewhere = Replaced(operator="^aten::gelu$", module="Attention")
    assert one(trace, tmp_path).status is Status.NEW
    assert one(trace, tmp_path, Entry(**plain, replaces=(elsewhere,), upstream=UPSTREAM)).status is Status.NEW
    hit = one(trace, tmp_path, Entry(**plain, fast=fast, upstream=UPSTREAM))
    assert (hit.status, hit.why) == (Status.NEW, "runs upstream's a; no task here")
    assert one(trace, tmp_path, Entry(**plain, fast=fast, task="k01_gelu")).status is Status.TASK
    missed = Entry(**plain, replaces=(here,), upstream=UPSTREAM)
    assert one(trace, tmp_path, missed).status is Status.NOT_HIT
    # its own kernel decides before what another entry could replace
    other = Entry(**{**plain, "id": "b"}, fast=fast, task="k01_gelu")
    assert one(trace, tmp_path, missed, other).status is Status.TASK


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"multiple_of": 256}, "every listed constraint holds"),
        ({"multiple_of": 5}, "fails: it; got 3072 in [4096, 3072]"),
        ({"at_most": 3072}, "every listed constraint holds"),
        ({"at_most": 3071}, "fails: it; got 3072 in [4096, 3072]"),
        ({"at_least": 4097, "dim": 0}, "fails: it; got 4096 in [4096, 3072]"),
        ({"one_of": (64, 128)}, "fails: it; got 3072 in [4096, 3072]"),
        ({"dtypes": ("float",)}, f"fails: it; got {BF16}"),
        ({"contiguous": True}, "fails: it; got [4096, 3072] with strides [6144, 1]"),
        ({"input": 1, "multiple_of": 5}, "every listed constraint holds"),
        ({"dim": 2, "multiple_of": 5}, "every listed constraint holds"),
        ({}, "a trace cannot show: it"),
    ],
)
def test_the_constraint_that_failed_is_named(tmp_path: Path, constraint: dict[str, object], words: str) -> None:
    trace = Trace()
    trace.call("aten::gelu", GELU, 10, 50, 20, ([4096, 3072], BF16, [6144, 1]))
    entry = Entry(
        id="a",
        pattern="gelu",
        kind=KernelClass.ACTIVATION,
        replaces=(Replaced(operator="gelu"),),
        upstream=UPSTREAM,
        constraints=(Constraint(needs="it", **constraint),),  # type: ignore[arg-type]
    )
    assert one(trace, tmp_path, entry).why == f"fused (sglang 0.5.23): {words}"


@pytest.mark.parametrize(
    ("operator", "module", "task"),
    [
        ("aten::mul", "HeliosSelfAttention", "k02_rotary_embedding"),
        ("aten::mul", "FluxTransformerBlock", "k06_fuse_scale_shift"),
        ("aten::add", "WanTransformerBlock", "k09_temb_modulation"),
        ("aten::add", "AdaLayerNormZeroSingle", "k10_layernorm_modulate"),
        ("aten::cat", "MMDoubleStreamBlock", "k11_qkv_pack"),
        ("aten::add", "HunyuanVideoResnetBlockCausal3D", "k13_group_norm_silu_pad"),
        ("sglang::flashinfer_apply_rope_with_cos_sin_cache_inplace", "ZImageAttention", "k14_rounded_qknorm_rope"),
        ("sglang::triton_fused_rmsnorm_scale_shift_bitexact", "", "k15_rounded_rmsnorm_modulate"),
        ("aten::_fused_rms_norm", "LTX2TransformerBlock", "k15_rounded_rmsnorm_modulate"),
    ],
)
def test_no_entry_hides_what_a_task_does_in_a_model(operator: str, module: str, task: str) -> None:
    """Of entries that fit, the first one counts."""
    status, entry = catalogue.match("", operator, module, catalogue.load(ROOT))
    assert entry is not None
    assert (status, entry.task) == (Status.TASK, task)


def test_communication_that_nothing_covers_is_named(tmp_path: Path) -> None:
    trace = Trace()
    trace.call("c10d::allreduce_", "ncclDevKernel_AllReduce", 10, 50, 100, ([4096], BF16))
    trace.call("aten::mm", GEMM, 20, 140, 50, ([64, 64], BF16))
    finding = one(trace, tmp_path, *catalogue.load(ROOT))
    assert finding.entry is not None
    assert (finding.status, finding.entry.id) == (Status.NOT_HIT, "distributed-overlap")
    assert finding.why.endswith("fails: at least half of communication beside other kernels; got 10%")


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_a_limit_keeps_the_points_that_no_other_beats_and_interpolates() -> None:
    points = [(100, 10.0), (200, 9.0), (400, 16.0), (400, 18.0), (300, 20.0)]
    assert envelope(points) == ((200, 9.0), (400, 16.0))
    limit = CopyLimit("g", envelope(points), ())
    assert limit.us(1) == 9.0
    assert limit.us(200) == 9.0
    assert limit.us(400) == pytest.approx(16.0)
    assert limit.us(800) == 32.0
    middle = limit.us(283)  # nearly 200 * sqrt(2), where the limit is sqrt(9 * 16)
    assert middle == pytest.approx(12.0, rel=1e-3)


def test_limits_come_from_the_newest_clean_run_on_that_gpu(tmp_path: Path) -> None:
    task = make_checkout(tmp_path)

    def run(day: int, us: float, gpu: str = "NVIDIA H200", **more: object) -> RunRecord:
        record = make_record(task, seed=day, utc=f"2026-11-{day:02d}T00:00:00Z")
        machine = record.machine.model_copy(update={"before": gpu_reading(gpu)})
        limit = Limit(bytes_moved=1000, device_us=us, host_us=1.0)
        rows = tuple(row.model_copy(update={"limit": limit}) for row in record.rows)
        return record.model_copy(update={"machine": machine, "rows": rows, **more})

    settings = make_record(task).settings
    cold = settings.model_copy(update={"cold": True, "decides": Basis.WALL})
    quick = settings.model_copy(update={"quick": True})
    unfit = [run(3, 1.0, gpu="NVIDIA B200"), run(4, 0.5, noisy=("busy",)), run(5, 0.4, partial=True)]
    task.ledger.parent.mkdir(parents=True, exist_ok=True)
    task.ledger.write_bytes(
        b"".join(
            map(
                ledger.encode,
                [run(1, 3.0), run(2, 2.0), *unfit, run(6, 0.3, settings=cold), run(7, 0.2, settings=quick)],
            )
        )
    )
    found = copy_limit("NVIDIA H200", [task])
    assert found is not None
    assert (found.points, found.runs) == (((1000, 2.0),), ("20261102T000000Z-000002",))
    assert copy_limit("A100", [task]) is None


# ---- cards ----------------------------------------------------------------------------------------------------------


def test_cards_rank_new_hotspots_by_what_they_bring(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    made = cards.cards(found, judged(found), LIMIT)
    # addmm is bound by arithmetic, the graph's kernels are unattributed
    names = [card.operator.rpartition("/")[2] for card in made]
    assert names == ["aten::gelu", "aten::cat", "aten::copy_", "norm.py(10): forward"]
    gelu, cat, copy, frame = made
    moved = 2 * 4096 * 3072 * 2  # the stride over the batch of 1 moves nothing
    assert gelu.row[0].bytes == moved
    assert gelu.row[0].limit_us == pytest.approx(25.0 * moved / 100_000_000)
    assert gelu.saved_us_per_step == pytest.approx(100 - 25.0 * moved / 100_000_000)
    assert gelu.step_speedup_at_most == pytest.approx(1000 / (1000 - gelu.saved_us_per_step))
    assert (gelu.calls_per_step, gelu.us_per_step, gelu.share) == (1, 100, pytest.approx(100 / 600))
    assert cat.row[0].bytes == 2 * 2 * 4096 * 3072 * 2  # the kernel's name says two bytes an element
    assert copy.row[0].bytes == 2 * 1_000_000  # the driver's own number, read and written
    assert (frame.row[0].inputs, frame.row[0].bytes, frame.saved_us_per_step) == (None, None, None)


@pytest.mark.parametrize(
    ("name", "kernel", "inputs", "expected"),
    [
        ("aten::mul", "k", (((4, 8), BF16), ((8,), "float")), 64 + 32 + 64),
        ("aten::mul_", "k", (((8,), BF16), ((8,), BF16)), 16 + 16 + 16),
        ("aten::copy_", "k", (((8,), BF16), ((8,), "float")), 16 + 32),
        ("aten::mul", "k", (((8,), "complex of something"),), None),
        ("aten::cat", CAT, (((8,), ""), ((4,), "")), 2 * (16 + 8)),
        ("aten::cat", "CatArray", (((8,), ""),), None),
        ("aten::mul", "k", (), None),
        ("aten::upsample_nearest3d", "k", (((4, 8), BF16),), None),  # the output is larger
    ],
)
def test_bytes_follow_the_rule_that_the_card_states(
    tmp_path: Path, name: str, kernel: str, inputs: tuple[tuple[tuple[int, ...], str], ...], expected: int | None
) -> None:
    trace = Trace()
    trace.call(name, kernel, 10, 50, 20)
    (spot,) = hotspots(profiled(trace, tmp_path))
    assert cards.bytes_moved(spot, tuple(Tensor(*one) for one in inputs)) == expected


def test_an_expanded_dimension_counts_once(tmp_path: Path) -> None:
    trace = Trace()
    trace.call("aten::neg", "k", 10, 50, 20)
    (spot,) = hotspots(profiled(trace, tmp_path))
    assert cards.bytes_moved(spot, (Tensor((100, 8), BF16, (0, 1)),)) == 2 * 16


def test_no_card_below_one_percent_or_of_what_is_covered(tmp_path: Path) -> None:
    trace = Trace()
    trace.call("aten::gelu", GELU, 10, 50, 9.9, ([8], BF16))
    trace.call("aten::mul", "mul", 20, 70, 990.1, ([8], BF16))
    found = profiled(trace, tmp_path)
    assert [card.operator for card in cards.cards(found, judged(found), LIMIT)] == ["aten::mul"]
    covered = Entry(id="a", pattern="x", kind=KernelClass.OTHER, fast=("^mul$",), task="k01_mul")
    assert cards.cards(found, judged(found, covered), LIMIT) == []


def test_cards_without_a_measured_gpu_say_so(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    made = cards.cards(found, judged(found), None)
    assert [card.share for card in made] == sorted((card.share for card in made), reverse=True)
    for card in made:
        assert card.saved_us_per_step is None
        assert card.limit_source == "none: no clean run of a task is recorded on NVIDIA H200"


def test_a_trace_that_is_too_little_attributed_gets_no_cards(tmp_path: Path) -> None:
    trace = two_steps()
    trace.kernel("stray", 1990, 1, 999)
    found = profiled(trace, tmp_path)
    with pytest.raises(UsageError, match=r"t\.json: expected at most 5% of GPU time unattributed, got 5\.1%"):
        cards.cards(found, judged(found), LIMIT)


def test_the_ceiling_counts_what_is_known_and_names_what_is_not(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    top = ceiling(found, judged(found), LIMIT)
    spots = {spot.name.rpartition("/")[2]: spot for spot in top.spots}
    # a GEMM has no limit in bytes; a kernel of a CUDA graph, and one without shapes, have bytes that nobody knows
    assert set(spots) == {
        *("aten::gelu", "aten::cat", "aten::copy_", "norm.py(10): forward"),
        *("fused_qknorm_rope_warp", "mystery_kernel"),
    }
    limits = {
        "aten::gelu": 25.0 * (2 * 4096 * 3072 * 2) / 100_000_000,
        "aten::cat": 25.0 * (4 * 4096 * 3072 * 2) / 100_000_000,
        "aten::copy_": 0.5,
    }
    for name, us in limits.items():
        assert spots[name].limit_us == pytest.approx(us)
        assert spots[name].gain_us == pytest.approx(spots[name].us - us)
        assert spots[name].unknown_us == 0
    assert (top.gpu_us, top.step_us, top.unknown_us) == (600, 1000, pytest.approx(50 + 20 + 10))
    assert top.gain_us == pytest.approx(100 + 80 + 40 - sum(limits.values()))
    assert [spot.gain_us for spot in top.spots] == sorted((spot.gain_us for spot in top.spots), reverse=True)
    lines = list(trace_view.ceiling_lines(top, 2))
    left = 600 - top.gain_us
    assert f"ceiling: GPU time 600.0 -> {left:.1f} us at least, {600 / left:.4f} at most" in lines
    assert f"ceiling: step 1000.0 -> {left + 400:.1f} us at least, {1000 / (left + 400):.4f} at most" in lines
    assert "bytes unknown, counted as they are: 80.0 us a step, 13.3% of GPU time" in lines
    assert lines[3].split()[:2] == ["4", "more"]
    (norm,) = [line for line in trace_view.ceiling_lines(top, 9) if "norm.py" in line]
    assert norm.endswith("50.0           50.0  unknown  unknown  unknown")
    assert json.loads(json.dumps(top.data()))["gain_us"] == top.gain_us


def test_a_kernel_below_its_limit_gains_nothing(tmp_path: Path) -> None:
    trace = Trace()
    trace.call("aten::mul", "mul", 10, 50, 20, ([100_000_000], BF16))
    trace.call("aten::add", "add", 20, 80, 20, ([8], BF16))
    found = profiled(trace, tmp_path)
    assert [(spot.name, spot.gain_us) for spot in ceiling(found, judged(found), LIMIT).spots] == [
        ("aten::add", 19.75),
        ("aten::mul", 0.0),
    ]


def test_a_ceiling_needs_limits_of_the_gpu(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    with pytest.raises(UsageError, match=r"--ceiling: t\.json: expected a trace of a GPU .* got NVIDIA H200"):
        ceiling(found, judged(found), None)


def test_cards_are_files_that_are_read_again_and_never_overwritten(tmp_path: Path) -> None:
    found = profiled(two_steps(), tmp_path)
    made = cards.cards(found, judged(found), LIMIT)
    paths = cards.write(made, tmp_path / "cards")
    assert [path.name for path in paths][:2] == ["01_aten_gelu_GELU.toml", "02_aten_cat_Block.toml"]
    assert [cards.read(path) for path in paths] == made
    with pytest.raises(UsageError, match=r"expected a new or empty folder"):
        cards.write(made, tmp_path / "cards")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"expected a place for a folder"):
        cards.write(made, tmp_path / "file")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kda: Kda) -> None:
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    path = two_steps().write(tmp_path / "t.json.gz")
    told = tmp_path / "out.json"
    _, out, _ = kda("model", "trace", str(path), "--json", str(told), "--cards", str(tmp_path / "c"))
    assert "idle 44.0% of the step: host-bound 43.2%" in out
    assert "unattributed 5.0% (CUDA graph 5.0%" in out
    assert "3 cards in" in out
    data = json.loads(told.read_text())
    assert (data["gpu_us"], data["idle_share"], data["unattributed_share"]) == (1200, 0.44, 0.05)
    assert sum(source["us"] for source in data["sources"]) == data["gpu_us"]
    assert data["cards"][0]["operator"] == "aten::cat"
    _, again, _ = kda("model", "trace", str(path))
    assert out.startswith(again)


def test_the_command_refuses_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kda: Kda) -> None:
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    expected = f"kda: {tmp_path / 'none.json'}: expected a trace to read, got: No such file or directory\n"
    assert kda("model", "trace", str(tmp_path / "none.json")) == (ExitCode.USAGE, "", expected)
    path = two_steps().write(tmp_path / "t.json")
    code, _, err = kda("model", "trace", str(path), "--json", str(tmp_path / "no" / "t.json"))
    assert code == ExitCode.USAGE
    assert "--json" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "card.toml").write_text("")
    _, out, err = kda("model", "trace", str(path), "--cards", str(tmp_path / "full"))
    assert "expected a new or empty folder" in err
    assert out == ""  # before the trace is read
    _, _, err = kda("model", "trace", str(path), "--steps", "0")
    assert "--steps" in err


def test_the_example_in_the_documentation_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kda: Kda
) -> None:
    two_steps().write(tmp_path / "step.json.gz")
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    monkeypatch.chdir(tmp_path)
    _, out, _ = kda("model", "trace", "step.json.gz")
    page = (ROOT / "docs" / "model_trace.md").read_text(encoding="utf-8")
    shown = re.split(r"^\.\.\.\n", page.partition("```text\n")[2].partition("```")[0], flags=re.MULTILINE)
    assert out.startswith(shown[0])
    assert all(piece in out for piece in shown)  # `...` stands for lines that the page leaves out
    _, more, _ = kda("model", "trace", "step.json.gz", "--ceiling", "--json", "step.json")
    assert more.startswith(out)
    assert "\nceiling: GPU time 600.0 -> " in more
    assert json.loads((tmp_path / "step.json").read_text())["ceiling"]["unknown_us"] == 80


def test_a_new_task_takes_its_shapes_from_a_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = Trace()
    for i in range(2):
        shape = ([4096, 3072], BF16, [6144, 1])
        trace.call("aten::gelu", GELU, 10 + 100 * i, 50 + 100 * i, 40, shape, ([4096], "long int"), ([], "Scalar"))
    trace.call("aten::gelu", GELU, 210, 250, 20, ([8], "a new dtype"))
    found = profiled(trace, tmp_path)
    (path,) = cards.write(cards.cards(found, judged(found), LIMIT), tmp_path / "cards")
    checkout = tmp_path / "checkout"
    for name in ("noxfile.py", *(f"core/{one}/pyproject.toml" for one in ("runtime", "judge", "tools"))):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    source = ROOT / "diffusion" / "k03_qknorm_rope"
    shutil.copytree(source, checkout / "diffusion" / source.name, ignore=new_task.IGNORED)
    (checkout / "README.md").write_text("# Test\n\n<!-- kda:results:begin -->\n<!-- kda:results:end -->\n")
    monkeypatch.setenv("KDA_ROOT", str(checkout))
    monkeypatch.chdir(checkout)
    broken = tmp_path / "broken.toml"
    broken.write_text('operator = "a"')
    with pytest.raises(UsageError, match=r"broken\.toml: missing key 'module'"):
        new_task.new_task(find_task("qknorm_rope"), "gelu", broken)
    assert not list(checkout.glob("diffusion/*gelu*"))
    folder = new_task.new_task(find_task("qknorm_rope"), "gelu", path)
    assert cards.read(folder / "docs" / "card.toml") == cards.read(path)
    prompt = (folder / "prompt.md").read_text()
    assert "| 2 | 40.00 | " in prompt
    assert "bfloat16 [4096, 3072] strides [6144, 1]; int64 [4096] |" in prompt
    assert "qwen-edit" not in prompt.partition("## The shapes")[2].partition("\n## ")[0]
    assert [line for line in prompt.splitlines() if line.startswith("## ")] == [
        line for line in (source / "prompt.md").read_text().splitlines() if line.startswith("## ")
    ]
    rows = load_workloads(folder / "bench" / "from_trace.toml")
    assert [(row.op, row.production, row.calls_a_step) for row in rows] == [("gelu", True, 2.0)]
    assert rows[0].inputs["input0"].strides == (6144, 1)
    assert "# row 2, 1 calls a step: a new dtype [8]" in (folder / "bench" / "from_trace.toml").read_text()
    assert problems(find_task("gelu")) == []  # it validates untouched, as any copy
