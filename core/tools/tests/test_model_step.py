"""`kda model`: the known models, calls and rows, drift, records and pages; and one narrow model of the pinned wheel."""

import gzip
import importlib.util
import json
import re
import subprocess
import sys
import types
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from core.judge.tests.records_factory import gpu_reading
from core.tools.tests.every_task import ROOT
from core.tools.tests.reached_files import computed_with
from kda_judge.arms.upstream import cache_folder
from kda_judge.contract.errors import ArmFailed, ExitCode, LedgerError, MissingRequirement, UpstreamError, UsageError
from kda_judge.contract.strict_models import read_toml
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, find_tasks
from kda_judge.evidence import gpu_sampler, gpu_watch, provenance, record_log
from kda_judge.evidence.run_record import Interval
from kda_tools.models import (
    boot,
    census,
    drift,
    interleaved,
    kernels,
    known_models,
    natives,
    page,
    readme_block,
    run_step,
    standins,
    timing,
    views,
)
from kda_tools.models.calls import Call, Log, Rows
from kda_tools.models.deferred_ways import WAYS
from kda_tools.models.fastest_modes import fastest
from kda_tools.models.fitting import fitted, named, unknown
from kda_tools.models.lock_wheels import write_lock
from kda_tools.models.protocol import Answer, Request, Timed
from kda_tools.models.run_step import WORKER, Plan, ask_worker, hashes, join_parts
from kda_tools.models.step_record import Profile, Share, StepRecord, log
from kda_tools.models.stepping import check_memory
from kda_tools.models.worker_process import PHASE, answers_of, causes
from kda_tools.publish import staleness

K05 = Task(ROOT / "diffusion" / "k05_norm_scale_shift")


@pytest.fixture
def known(monkeypatch) -> known_models.KnownModels:
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    return known_models.load_models()


# ---- the known models


def test_list_shows_every_model(known, kda):
    code, shown, _ = kda("model", "list")
    assert code == 0
    assert all(name in shown for name in known.models)
    assert {"qwen-image", "hunyuanvideo", "wan-t2v", "wan-ti2v", "zimage", "ltx2", "flux", "hunyuan-vae"} <= set(
        known.models
    )


def test_tokens_are_what_the_sizes_give(known):
    """The figures that the list shows follow from the sizes that a builder gets."""
    scale = {"wan_ti2v": (32, 4), "ltx2": (32, 8), "hunyuan_vae": (8, 4), "qwen_edit": (16, 1)}
    for name, model in known.models.items():
        if model.build == "mova_audio":
            assert model.tokens == model.sizes.audio
            continue
        video = (16, 4) if model.sizes.frames > 1 else (16, 1)
        space, time = scale.get(model.build, video)
        frames = (model.sizes.frames - 1) // time + 1
        tokens = frames * (model.sizes.height // space) * (model.sizes.width // space)
        assert model.tokens == tokens * (2 if model.build in ("qwen_edit", "joyimage_edit") else 1), name


def test_an_unknown_model_and_release_are_named(known, kda):
    code, _, err = kda("model", "step", "qwen-imag")
    assert code == 2
    assert "unknown model 'qwen-imag'; nearest: qwen-image" in err
    with pytest.raises(UsageError, match=r"--release 0\.5\.1: expected 0\.5\.12\.post1 or 0\.5\.23 for flux"):
        known.pin("flux", "0.5.1")


def test_an_unknown_key_names_file_and_key(tmp_path):
    path = tmp_path / "models.toml"
    text = (ROOT / known_models.FOLDER / "models.toml").read_text()
    path.write_text(text.replace("[models.flux]\n", "[models.flux]\nlayer = 3\n"))
    with pytest.raises(UsageError, match=r"models\.toml: unknown key 'models\.flux\.layer'"):
        known_models.load_models(path)


def test_a_batch_that_no_builder_makes_is_refused(tmp_path):
    path = tmp_path / "models.toml"
    text = (ROOT / known_models.FOLDER / "models.toml").read_text()
    path.write_text(text.replace("text = 47 }", "text = 47, batch = 2 }"))
    with pytest.raises(UsageError, match=r"models\.qwen-image: batch: expected 1, since qwen_image builds no other"):
        known_models.load_models(path)


def test_layers_keep_the_proportion_of_kinds(known):
    flux = known.model("flux")
    assert flux.shortened(0) == {"num_layers": 19, "num_single_layers": 38}
    assert flux.shortened(6) == {"num_layers": 2, "num_single_layers": 4}
    assert flux.shortened(1) == {"num_layers": 1, "num_single_layers": 1}


def test_lock_lists_what_patterns_take(tmp_path, known):
    wheel = tmp_path / "sglang.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sglang/a/b.py", "b")
        archive.writestr("sglang/a/__init__.py", "")
    patterns = known_models.Patterns(take=("sglang/a/*.py",), without=("sglang/a/__init__.py",))
    assert write_lock(patterns, wheel, tmp_path / "lock") == 1
    assert (tmp_path / "lock").read_text().endswith("  sglang/a/b.py\n")
    with pytest.raises(UsageError, match=r"sglang/c/\*: sglang\.whl holds no such file"):
        write_lock(known_models.Patterns(take=("sglang/c/*",)), wheel, tmp_path / "lock")


# ---- what is missing


@pytest.fixture
def tree(tmp_path, monkeypatch) -> Path:
    """A small tree of a release, importable as `sglang` for one test."""
    folder = tmp_path / "sglang" / "models"
    folder.mkdir(parents=True)
    (folder / "good.py").write_text("class Model: pass\n")
    (folder / "bad.py").write_text("import torch\nfrom sglang.layers.rope import Rope\n")
    (folder / "deep.py").write_text("import kdas_neighbour\n")
    (tmp_path / "kdas_neighbour.py").write_text("import kdas_absentee\n")
    monkeypatch.syspath_prepend(tmp_path)
    (folder / "half.py").write_text("from sglang.srt.lora import Lora\nclass Model:\n    def __init__(self): Lora()\n")
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [standins.Finder(tmp_path, "9.9"), *sys.meta_path])
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "sglang":
            del sys.modules[name]


def test_a_class_that_does_not_import_says_what_is_missing_and_who_asks(tree):
    assert boot.load("sglang.models.good.Model").__name__ == "Model"
    with pytest.raises(UpstreamError) as raised:
        boot.load("sglang.models.bad.Model")
    assert "sglang.layers: neither in the lock file" in str(raised.value)
    assert str(raised.value).endswith("asked for by sglang.models.bad, line 2")
    with pytest.raises(UpstreamError, match=r"by sglang\.models\.deep, line 1, through kdas_neighbour$"):
        boot.load("sglang.models.deep.Model")
    with pytest.raises(UpstreamError, match=r"sglang\.models\.good has no name 'Other'"):
        boot.load("sglang.models.good.Other")


def test_a_placeholder_survives_the_import_and_not_the_call(tree):
    model = boot.load("sglang.models.half.Model")
    assert "sglang.srt.lora.Lora" in standins.TOUCHED
    with pytest.raises(MissingRequirement, match=r"calls sglang\.srt\.lora\.Lora, which is only a placeholder"):
        model()


def test_a_stand_in_takes_its_kernel_from_where_the_release_has_it(tree):
    assert standins.jit("Model", "sglang.jit_kernel.norm", "sglang.models.good").__module__ == "sglang.models.good"
    with pytest.raises(MissingRequirement, match=r"none of sglang\.jit_kernel\.norm, sglang\.jit\.norm is in the lock"):
        standins.jit("Model", "sglang.jit_kernel.norm", "sglang.jit.norm")
    with pytest.raises(ModuleNotFoundError, match=r"sglang\.layers"):
        standins.jit("Model", "sglang.models.bad", "sglang.models.good")


def test_a_kernel_of_flashinfer_is_asked_for_where_steps_call_it(tree, monkeypatch):
    """An ImportError would have SGLang choose a slower path, and the step's times would not be its own."""
    (tree / "sglang" / "models" / "site.py").write_text(
        "try:\n    from flashinfer.norm import qk_rmsnorm_cute\nexcept ImportError:\n    pass\nclass Model: pass\n"
    )
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, standins.Absent("0.7.2")])
    asked = r"sglang\.models\.site imports flashinfer\.norm, .*: pip install --no-deps flashinfer-python==0\.7\.2"
    with pytest.raises(MissingRequirement, match=asked):
        boot.load("sglang.models.site.Model")
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path[:-1], standins.Absent()])
    assert boot.load("sglang.models.site.Model").__name__ == "Model"


@pytest.mark.parametrize("whole", [True, False])
def test_an_empty_package_is_forgotten(whole, monkeypatch):
    """SciPy takes any module of that name for a run of Sphinx."""
    package = types.ModuleType("kda_hollow")
    monkeypatch.setitem(sys.modules, "kda_hollow", package)
    if whole:
        monkeypatch.setitem(sys.modules, "kda_hollow.ext", types.ModuleType("kda_hollow.ext"))
    boot._drop_empty("kda_hollow", "kda_hollow.ext")
    assert ("kda_hollow" in sys.modules) is whole


def test_too_little_memory_says_needed_and_free():
    check_memory("flux", 57, 10, 10)
    with pytest.raises(
        MissingRequirement, match=r"flux with 57 layers: its weights alone need 24\.0 GiB, 6\.0 GiB are"
    ):
        check_memory("flux", 57, 24 << 30, 6 << 30)


# ---- calls


def call_like(row, **changed) -> list[torch.Tensor | None]:
    shapes = {name: (spec.shape, getattr(torch, spec.dtype)) for name, spec in row.inputs.items()} | changed
    names = K05.config.ops[row.op].inputs
    return [torch.empty(*shapes[n][:1], dtype=shapes[n][1], device="meta") if n in shapes else None for n in names]


def test_a_call_is_matched_to_its_row_and_another_is_named_new():
    row = next(row for row in K05.workloads if row.op == "fused_norm_scale_shift" and row.production)
    solution, seen = K05.load("solution"), Log()
    call = seen.wrap(K05, row.op, lambda *args, **kwargs: "result", solution.fused_norm_scale_shift, None)
    assert call(*call_like(row), **row.scalars) == "result"
    call(*call_like(row), **row.scalars)
    call(*call_like(row, x=((1, 3, 3072), torch.bfloat16)), **row.scalars)
    call(*call_like(row, x=(row.inputs["x"].shape, torch.float16)), **row.scalars)
    found = {each.row: each for each in seen.calls(Rows([K05]))}
    assert found[row.id].count == 2
    assert found[row.id].production
    assert {each.inputs["x"] for each in seen.calls(Rows([K05])) if each.row is None} == {
        "1x3x3072:bfloat16",
        "x".join(map(str, row.inputs["x"].shape)) + ":float16",
    }


def test_a_call_inside_another_one_counts_as_part_of_it():
    row = next(row for row in K05.workloads if row.op == "fused_norm_scale_shift")
    solution, seen = K05.load("solution"), Log()
    inner = seen.wrap(K05, row.op, lambda *args, **kwargs: None, solution.fused_norm_scale_shift, None)
    outer = seen.wrap(K05, row.op, lambda *args, **kw: inner(*args, **kw), solution.fused_norm_scale_shift, None)
    outer(*call_like(row), **row.scalars)
    assert [each.count for each in seen.calls(Rows([K05]))] == [1]


def ours(x, *, eps=1e-6):
    return "ours", x, eps


def theirs(x, *, eps=1e-6, wide=False):
    return "theirs", x, eps, wide


def test_an_argument_that_the_solution_lacks_stays_with_upstream_and_is_named():
    call = fitted(ours, theirs)
    assert call(1, eps=2.0, wide=False) == ("ours", 1, 2.0)
    assert call(1, wide=True) == ("theirs", 1, 1e-6, True)
    assert (
        unknown(ours, theirs, {"wide": True}) == "it has no argument wide, which is True here; upstream's own op stays"
    )
    assert unknown(ours, theirs, {"wide": False}) is None
    assert fitted(theirs, ours) is theirs
    assert named(lambda *args, **kwargs: None, ours) is ours


# ---- upstream's own fused ops


def known_models_ops(known, release: str) -> list[dict]:
    """The catalogue's ops that the modules of the known models import, one way or another."""
    dotted = {model.class_.rpartition(".")[0] for model in known.models.values()}
    modules = {name.partition(".runtime.models.")[2].replace(".", "/") for name in dotted}
    path = ROOT / "docs" / "catalogue" / "upstream" / f"sglang-{release}.toml"
    return [op for op in read_toml(path)["op"] if modules & set(op.get("models", ()))]


def test_the_default_sites_are_those_of_the_catalogue(known):
    sites = [op for op in known_models_ops(known, "0.5.23") if op["language"] == ["site"]]
    assert set(natives.SITES) == {op["name"] for op in sites if op["quality"] == natives.QUALITY}


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.23"])
def test_every_fused_op_of_the_known_models_is_off_in_the_eager_arm_or_its_reason_is_given(known, release):
    seams = {op for task in find_tasks() if task.family == "diffusion" for op in task.load("solution").__all__}
    replaced = {name.removesuffix("_cuda") for forms in natives.NATIVE.values() for name in forms}

    def off(op: dict) -> bool:
        name, guards = op["name"], op.get("guards", ())
        asked = bool(guards) and all(natives.eager_form(guard) for guard in guards)
        return bool(natives.eager_form(name)) or asked or name in {*seams, *replaced, *natives.SITES, *natives.FUSED}

    assert [op["name"] for op in known_models_ops(known, release) if not off(op)] == []


def test_the_eager_arm_asks_no_kernel_and_leaves_no_trace(monkeypatch, tmp_path):
    """Guards, tries and gates of upstream are off there, and in the next arm as they were."""
    kernel, model = types.ModuleType("sglang.kernels.fake"), types.ModuleType(f"{natives.MODELS}fake")
    exec("def can_use_fake(x): return True\ndef try_fake(x): return x", vars(kernel))
    gates = types.ModuleType(f"{natives.FACADE}.sites.bitexact_gate")
    gates.BitExactFusionGate = type("BitExactFusionGate", (), {"disabled": False})
    vars(model).update(can_use_fake=kernel.can_use_fake, try_fake=kernel.try_fake, can_use_own=lambda: True)
    model.GATE, model.SHUT = gates.BitExactFusionGate(), gates.BitExactFusionGate()
    model.SHUT.disabled = True
    for module in (kernel, model, gates):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = object.__new__(natives.Natives)
    vars(found).update(_cpu=True, _forms=[], _layers=[], _eager={}, _gates=[], _model=None, mounted=())
    found.find()
    before = dict(vars(model))
    found.use(native=True)
    assert (model.can_use_fake(1), model.try_fake(1), kernel.can_use_fake(1), model.can_use_own()) == (
        *(False, None, False),
        True,
    )
    assert (model.GATE.disabled, model.SHUT.disabled) == (True, True)
    found.find()
    found.use(native=True)
    found.use(native=False)
    assert dict(vars(model)) == before
    assert (model.GATE.disabled, model.SHUT.disabled) == (False, True)


# ---- numerics


def test_drift_is_measured_against_the_further_of_upstream_and_a_rounding():
    assert drift.judge(1.4, 1.0, 0.5) == (1.4, True)
    assert drift.judge(1.4, 0.5, 1.0) == (1.4, True)
    assert drift.judge(1.6, 1.0, 1.0) == (1.6, False)
    assert drift.judge(None, 1.0, 1.0) == (None, False)
    assert drift.judge(0.0, 0.0, 0.0) == (None, True)
    assert drift.judge(0.1, 0.0, 0.0) == (None, False)


def test_relative_error_and_psnr():
    reference = torch.tensor([0.0, 4.0])
    assert drift.relative(torch.tensor([0.0, 5.0]), reference) == pytest.approx(0.25)
    assert drift.psnr(torch.tensor([1.0, 5.0]), reference) == pytest.approx(12.0412, abs=1e-3)
    assert drift.psnr(reference, reference) is None
    assert drift.relative(torch.tensor([float("nan"), 0.0]), reference) is None


def test_euler_reaches_the_end_of_a_straight_way():
    start = torch.tensor([[2.0, -1.0]])
    latents = drift.trajectory(lambda latent, time: start, start, 4)
    assert torch.allclose(latents[-1], torch.zeros_like(start))
    assert len(latents) == 4


def test_kernels_count_for_the_innermost_op_that_launched_them():
    def event(name, cat, ts, dur, **args):
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": 1, "args": args}

    trace = [
        event("kda::k05_norm_scale_shift", "user_annotation", 0, 10),
        event("aten::mm", "cpu_op", 20, 5),
        event("launch", "cuda_runtime", 3, 1, correlation=1),
        event("launch", "cuda_runtime", 21, 1, correlation=2),
        event("launch", "cuda_driver", 40, 1, correlation=3),
        event("norm_kernel", "kernel", 100, 7, correlation=1),
        event("some_kernel", "kernel", 110, 50, correlation=2),
        event("flash_fwd", "kernel", 170, 30, correlation=3),
        event("stray", "kernel", 210, 1, correlation=9),
    ]
    found = kernels.share(trace)
    assert found.by_kind == {"k05_norm_scale_shift": 7, "gemm": 50, "attention": 30, "other": 1}
    assert (found.total_us, found.launches) == (88, 4)


def test_a_kept_trace_is_of_the_second_step_with_shapes_and_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.ones(3, 5)
    kernels.traced(lambda: torch.mm(x, x.T), tmp_path / "step.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "step.json.gz").read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep#") for event in events) == 1
    (product,) = [event for event in events if event["name"] == "aten::mm"]
    assert product["args"]["Input Dims"][:2] == [[3, 5], [5, 3]]
    assert any(event.get("cat") == "python_function" for event in events)


# ---- times and processes


class FakeSeams:
    def __init__(self):
        self.arm = ""

    def use(self, arm):
        self.arm = arm


class FakeStepper:
    """A step that takes twice as long with upstream in place, by a clock of its own."""

    def __init__(self, seams):
        self.built, self.call, self.seams = types.SimpleNamespace(module="module"), None, seams
        self.now = 0.0

    def step(self):
        assert self.call == "module"
        self.now += 0.004 if self.seams.arm == "upstream" else 0.002


def test_arms_are_timed_with_their_own_ops_in_place(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    seams = FakeSeams()
    stepper = FakeStepper(seams)
    monkeypatch.setattr(interleaved, "time", types.SimpleNamespace(perf_counter=lambda: stepper.now))
    found = timing.timed("eager", stepper, seams, "solution", 5, seed=0)
    assert set(found.samples) == {"upstream", "subject", "again"}
    assert all(len(values) == 5 for values in found.samples.values())
    mode = join_parts([found] * 3)
    assert mode.upstream[0] == pytest.approx([4000.0] * 5)
    assert mode.speedup.estimate == pytest.approx(2)
    assert mode.noise.estimate == pytest.approx(1)


def test_a_mode_that_does_not_run_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "replayed", refuse)
    seams = FakeSeams()
    found = timing.timed("graph", FakeStepper(seams), seams, "solution", 2, seed=0)
    assert found.refused == "RuntimeError: operation not permitted when stream is capturing"
    assert join_parts([found]).refused == found.refused


def refuse(stepper):
    raise RuntimeError("operation not permitted when stream is capturing")


def request(**changed) -> Request:
    data = {
        "model": "flux",
        "release": "0.5.23",
        "tree": "nowhere",
        "sizes": {"height": 64, "width": 64, "frames": 1, "text": 8},
        "layers": {"num_layers": 1},
        "seed": 0,
        "arm": "solution",
        "exports": {},
        "check": False,
        "denoise": 0,
        "modes": (),
        "samples": 1,
    }
    return Request.model_validate_json(json.dumps(data | changed))


def test_an_error_of_a_worker_keeps_its_class(known):
    with pytest.raises(UsageError, match="unknown model 'fluks'; nearest: flux"):
        ask_worker(request(model="fluks"))


def test_a_torch_that_cannot_use_the_gpu_is_named(known, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MissingRequirement, match=r"there is a GPU, which torch \S+ cannot use"):
        ask_worker(request(modes=("eager",)))


def test_a_worker_that_dies_is_named(known, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ArmFailed, match="flux: its worker ended with 1"):
        ask_worker(request())


def test_workers_import_side_by_side_and_work_one_by_one(known, monkeypatch, tmp_path):
    """Each says how many have started, and how many have been at work, when its turn comes."""
    worker = tmp_path / "worker"
    worker.write_text(
        '#!/usr/bin/env bash\nset -e\ncd "$(dirname "$4")"\ntouch "$(basename "$4").started"\nread -r _\n'
        f"echo '{PHASE}drift' >&2\n"
        "until [ $(ls ./*.started | wc -l) = 3 ]; do sleep 0.01; done\n"
        'echo "{\\"parameters\\": $(ls ./*.answer.json 2>/dev/null | wc -l), \\"standins\\": []}" >"$4"\n'
    )
    worker.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(worker))
    shown = []
    assert [found.parameters for found in answers_of(WORKER, Answer, [request()] * 3, shown.append)] == [0, 1, 2]
    assert shown == [f"process {number} of 3: drift" for number in (1, 2, 3)]


def test_of_errors_that_led_to_others_the_first_is_named():
    said = b"Trace\n  File x\nImportError: no libfoo\n\nThe above\n\nTrace\n  File y\nRuntimeError: cannot\nhint"
    assert causes(said) == "ImportError: no libfoo |   File y | RuntimeError: cannot | hint"
    assert causes(b"one\ntwo") == "one | two"


def test_modes_and_processes_are_checked_before_the_run(known):
    plan = Plan("flux", "0.5.23", "solution", 1, 0, 3, 1, 0, ("grapf",), True, False, "kda")
    with pytest.raises(UsageError, match="--mode grapf: expected eager, graph, compile"):
        run_step.run(plan, known, ROOT / known_models.FOLDER)
    with pytest.raises(UsageError, match="--processes 2: expected 3 or more"):
        run_step.run(replace(plan, modes=(), processes=2), known, ROOT / known_models.FOLDER)


def test_an_interrupted_run_keeps_nothing_and_says_so(known, monkeypatch, tmp_path, kda):
    def interrupted(*_):
        yield Answer()
        raise KeyboardInterrupt

    monkeypatch.setattr(run_step, "answers_of", interrupted)
    monkeypatch.setattr(boot, "obtain", lambda *_, **__: Path("nowhere"))
    monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda: False)
    monkeypatch.setattr("kda_tools.models.step_record.log", lambda _: tmp_path / "steps.jsonl")
    code, _, err = kda("model", "step", "flux", "--record", "--json", str(tmp_path / "run.json"))
    assert code == ExitCode.INTERRUPTED
    assert "interrupted: nothing is kept of a run that did not end\n" in err
    assert list(tmp_path.iterdir()) == []


def test_a_trace_is_kept_by_the_last_process_and_asked_for_with_a_gpu(known, monkeypatch, tmp_path):
    asked = []

    def stopped(_worker, _answer, requests, _show):
        asked.extend(requests)
        raise ArmFailed("stopped")

    monkeypatch.setattr(run_step, "answers_of", stopped)
    monkeypatch.setattr(boot, "obtain", lambda *_, **__: Path("nowhere"))
    monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda: True)
    monkeypatch.setattr("kda_judge.evidence.gpu_state.read_state", lambda *_: gpu_reading())
    file = tmp_path / "step.json.gz"
    plan = Plan("flux", "0.5.23", modes=("eager",), offline=True, allow_busy=True, trace=file)
    with pytest.raises(ArmFailed, match="stopped"):
        run_step.run(plan, known, ROOT / known_models.FOLDER)
    assert [request.trace for request in asked] == [None, None, str(file)]
    monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda: False)
    with pytest.raises(MissingRequirement, match="expected a GPU, whose kernels a trace is of"):
        run_step.run(plan, known, ROOT / known_models.FOLDER)


@pytest.mark.parametrize("name", ["step.txt", "there.json.gz"])
def test_a_trace_needs_a_new_file_of_its_kind(name, tmp_path, kda):
    (tmp_path / "there.json.gz").write_bytes(b"")
    code, _, err = kda("model", "step", "flux", "--trace", str(tmp_path / name))
    assert code == ExitCode.USAGE
    assert f"{name}: expected a new file, named NAME.json or NAME.json.gz" in err


# ---- records and pages


def test_every_process_says_what_took_its_time(known, monkeypatch):
    answer = Answer(seconds={"weights and first step": 11.2, "drift": 0.6})
    monkeypatch.setattr(run_step, "answers_of", lambda *_: iter([answer]))
    monkeypatch.setattr(boot, "obtain", lambda *_, **__: Path("nowhere"))
    monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda: False)
    shown = []
    plan = Plan("flux", "0.5.23", "solution", 1, 0, 3, 1, 0, (), True, False, "kda")
    run_step.run(plan, known, ROOT / known_models.FOLDER, shown.append)
    assert shown == [
        "no GPU: computed on the CPU in bfloat16, 0 steps for the drift",
        "process 1 of 1: weights and first step 11 s, drift 1 s",
    ]


def test_a_run_says_what_was_seen_of_the_gpu(known, monkeypatch):
    monkeypatch.setattr(run_step, "answers_of", lambda *_: iter([Answer()]))
    monkeypatch.setattr(boot, "obtain", lambda *_, **__: Path("nowhere"))
    monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda: True)
    monkeypatch.setattr("kda_judge.evidence.gpu_state.read_state", lambda *_: gpu_reading())
    capped = gpu_reading().model_copy(update={"throttle": ("sw_power_cap",)})
    seen = gpu_sampler.summarise([gpu_sampler.Reading(at, capped) for at in (0.0, 1.5)], 0.01)
    plan, shown = Plan("flux", "0.5.23", modes=(), allow_busy=True), []
    for answer in (seen, "no NVML"):
        monkeypatch.setattr(gpu_watch.Watcher, "finish", lambda _, answer=answer: answer)
        record = run_step.run(plan, known, ROOT / known_models.FOLDER, shown.append)
        lines = [line for line in views.on_gpu(record) if line.startswith("the GPU during the run")]
        if answer is seen:
            assert record.machine_watch == seen
            assert "sw_power_cap for 1.5 s" in lines[0]
        else:
            assert (record.machine_watch, lines, shown[-1]) == (None, [], "the GPU was not watched: no NVML")


def test_without_a_gpu_a_decoder_is_float32_and_denoising_short(known, monkeypatch):
    monkeypatch.setattr(run_step, "answers_of", lambda _w, _a, requests, _s: asked.extend(requests) or iter([Answer()]))
    monkeypatch.setattr(boot, "obtain", lambda *_, **__: Path("nowhere"))
    asked, shown = [], []
    for gpu, steps in ((False, None), (True, None), (False, 1)):
        monkeypatch.setattr("kda_judge.evidence.gpu_state.has_gpu", lambda gpu=gpu: gpu)
        monkeypatch.setattr("kda_judge.evidence.gpu_state.read_state", lambda _: None)
        plan = Plan("hunyuan-vae", "0.5.23", denoise=steps, modes=())
        run_step.run(plan, known, ROOT / known_models.FOLDER, shown.append)
    assert (asked[0].denoise, asked[1].denoise) == (2, 50)
    assert shown[0] == "no GPU: computed on the CPU in float32, 2 steps for the drift"
    assert "no GPU: computed on the CPU in float32, 1 step for the drift" in shown
    assert known.model("flux").dtype_on_cpu == "bfloat16"


NEVER_STALE = {"census", "chain_sites", "dataflow", "deferred_ways", "known_models", "protocol", "step_record"}
"""Of the modules that a worker imports: they find or count calls, or say what data looks like, which records hold."""
OF_TASKS = {f"models/{Path(way.__file__).name}" for way in WAYS.values()}
"""They put the ops of single tasks into models: a run that calls such a task is stale by the hash of the task."""


def test_all_files_that_a_worker_computes_with_make_a_run_stale():
    reached = computed_with("kda_tools.models.worker", ("models", "traces"), NEVER_STALE)
    assert reached == {*run_step.DECIDING, *OF_TASKS}


@pytest.mark.parametrize(
    ("name", "stale"),
    [
        ("deferred_gelu.py", ["k08_gelu_cat"]),
        ("deferred_lines.py", ["k13_group_norm_silu_pad", "k14_rounded_qknorm_rope"]),
        ("deferred_layouts.py", ["k13_group_norm_silu_pad"]),
    ],
)
def test_a_change_to_how_an_op_is_put_into_a_model_makes_runs_stale_that_call_it(name, stale, tmp_path, monkeypatch):
    folders = ("k03_qknorm_rope", "k08_gelu_cat", "k13_group_norm_silu_pad", "k14_rounded_qknorm_rope")
    tasks = [Task(ROOT / "diffusion" / folder) for folder in folders]
    calls = [Call(task=one.folder, op="op", inputs={}, count=1, row=None, production=False) for one in tasks]
    before = run_step.solution_hashes(tasks, calls, lambda _: True)
    assert run_step.solution_hashes(tasks, calls[:1]).keys() == {"k03_qknorm_rope"}
    changed = tmp_path / name
    for path in Path(run_step.__file__).parent.glob("deferred_*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    changed.write_text(changed.read_text() + "# changed\n")
    monkeypatch.setattr(run_step, "__file__", str(tmp_path / "run_step.py"))
    after = run_step.solution_hashes(tasks, calls, lambda _: True)
    assert [folder for folder, digest in after.items() if digest != before[folder]] == stale


def test_a_step_is_stale_by_the_sites_that_its_model_and_release_have():
    tasks = [Task(ROOT / "diffusion" / "k11_qkv_pack")]
    calls = [Call(task="k11_qkv_pack", op="op", inputs={}, count=1, row=None, production=False)]
    models = known_models.load_models().models

    def found(model, release):
        return hashes(tasks, calls, models[model], release)["k11_qkv_pack"]

    assert found("qwen-image", "0.5.23") == found("wan-t2v", "0.5.12.post1"), "neither has a site"
    several = [found(model, "0.5.23") for model in ("qwen-image", "flux", "hunyuanvideo", "joyimage-edit")]
    assert len({*several, found("joyimage-edit", "0.5.12.post1")}) == 5


def test_a_function_may_run_in_any_model():
    tasks = [Task(ROOT / "diffusion" / "k02_rotary_embedding")]
    calls = [Call(task="k02_rotary_embedding", op="op", inputs={}, count=1, row=None, production=False)]
    plain = run_step.solution_hashes(tasks, calls)
    for release in ("0.5.12.post1", "0.5.23"):
        assert hashes(tasks, calls, None, release)["k02_rotary_embedding"] not in plain.values()


def test_the_blocks_of_a_model_may_be_in_another_module():
    models = known_models.load_models().models
    assert len({models[name].modules[-1] for name in ("mova-video", "mova-audio")}) == 1
    assert models["mova-audio"].modules[0] != models["mova-video"].modules[0]


def test_a_run_is_stale_by_its_own_models_entry_alone():
    flux = known_models.load_models().models["flux"]
    other = flux.model_copy(update={"tokens": flux.tokens + 1})
    found = [run_step.deciding_hash(run_step.DECIDING, model) for model in (flux, other, None)]
    assert len(set(found)) == 3
    assert found[0] == hashes([], [], flux, "0.5.23")["models"]


def measured(**changed) -> StepRecord:
    times = [[100.0, 101.0, 99.0], [102.0, 100.0, 101.0], [98.0, 99.0, 100.0]]
    parts = [
        Timed(samples={"upstream": tuple(one), "subject": tuple(t / 2 for t in one), "again": tuple(one)})
        for one in times
    ]
    flat = {"relative": (1e-3, 2e-3), "psnr_db": (60.0, 54.0)}
    call = {"task": "k05_norm_scale_shift", "op": "fused_norm_scale_shift", "inputs": {"x": "1x2x3:bfloat16"}}
    share = Share(total_us=100.0, by_kind={"gemm": 60.0, "k05_norm_scale_shift": 40.0}, launches=3)
    data = {
        "run_id": provenance.run_id(),
        "utc": provenance.utc(),
        "seconds": 1.0,
        "command": "kda model step flux",
        "model": "flux",
        "release": "0.5.23",
        "arm": "solution",
        "sizes": {"height": 64, "width": 64, "frames": 1, "text": 8},
        "tiny": False,
        "layers": 3,
        "layers_of_model": 57,
        "parameters": 10,
        "seed": 0,
        "commit": "0" * 40,
        "dirty": False,
        "hashes": hashes([K05], [], known_models.load_models().models["flux"], "0.5.23"),
        "wheel": "sglang 0.5.23 0",
        "files": "0" * 64,
        "versions": {},
        "machine": provenance.host().model_dump() | {"before": gpu_reading().model_dump()},
        "standins": (),
        "placeholders": (),
        "mounted": (),
        "calls": (call | {"count": 2, "row": None, "production": False},),
        "fallbacks": ({"task": "k03", "op": "rope", "reason": "too wide", "count": 4},),
        "difference": {"solution-upstream": 1e-3},
        "drift": {
            "steps": 2,
            **dict.fromkeys(("solution_upstream", "upstream_eager", "solution_eager", "rounding"), flat),
            "ratio": 1.0,
            "within": True,
        },
        "modes": {
            "eager": join_parts(parts).model_dump(),
            "graph": join_parts([Timed(refused="no capture")]).model_dump(),
        },
        "profile": Profile(upstream=share, subject=share).model_dump(),
        "peak_bytes": {"upstream": 1 << 30},
        "noisy": (),
    }
    return StepRecord.model_validate_json(json.dumps(data | changed))


def test_kinds_without_time_upstream_have_an_order():
    kinds = {f"k{number:02}": float(number % 5) for number in range(20)}
    upstream, subject = (
        Share(total_us=1.0, by_kind={"gemm": 1.0}, launches=1),
        Share(total_us=1.0, by_kind=kinds, launches=1),
    )
    profile = Profile(upstream=upstream, subject=subject)
    shown = [
        line.removeprefix("GPU time of ").partition(":")[0]
        for line in views.on_gpu(measured(profile=profile.model_dump()))
    ]
    assert shown[:2] == ["all kernels", "gemm"]
    assert shown[2:22] == sorted(kinds, key=lambda kind: (-kinds[kind], kind))


def test_page_holds_times_refusals_fallbacks_new_shapes_and_plots(tmp_path, monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    record_log.append(log(tmp_path), measured())
    (tmp_path / "models.toml").write_bytes((ROOT / known_models.FOLDER / "models.toml").read_bytes())
    assert page.publish(tmp_path, check=False)
    text = (tmp_path / "docs" / "flux.md").read_text()
    assert "\n| eager | 0.100 | 0.050 | 2.000 [2.000, 2.000] | 1.000" in text
    assert "\n| graph | does not run: no capture | - | - | - |" in text
    assert "fallback: k03 rope, 4 calls: too wide" in text
    assert "a new shape" in text
    assert "\n| k05_norm_scale_shift | 0.040 | 0.040 |" in text
    assert "3 of 57 layers" in text
    assert "stale" not in text
    summary = (tmp_path / "docs" / "steps.md").read_text()
    assert "\n| [flux](flux.md) | 0.5.23 | H200 | solution | 3 of 57 | 0.10 → 0.05 eager | 2.000 " in summary
    assert "fallback" not in summary
    assert (tmp_path / "docs" / "plots" / "shares.svg").read_text().startswith("<svg")
    assert page.publish(tmp_path, check=True) == []
    record_log.append(log(tmp_path), measured(hashes={"k05_norm_scale_shift": "0" * 64}))
    assert any("steps.md:" in line for line in page.publish(tmp_path, check=True))
    page.publish(tmp_path, check=False)
    assert "**stale**: k05_norm_scale_shift changed since" in (tmp_path / "docs" / "flux.md").read_text()


def test_the_page_names_known_models_of_which_no_step_is_timed(tmp_path):
    known = known_models.load_models(ROOT / known_models.FOLDER / "models.toml")
    text = (ROOT / known_models.FOLDER / "models.toml").read_text()
    heads = re.findall(r"^\[models\.([\w-]+)\]$", text, re.MULTILINE)
    assert set(heads) == set(known.models)
    few = re.split(r"^(?=\[models\.)", text, flags=re.MULTILINE)
    (tmp_path / "models.toml").write_text("".join(part for part in few if not part.startswith("[models.")) + few[1])
    name, releases = heads[0], known.releases_of(heads[0])
    both = [measured(model=name, release=one) for one in releases]
    untimed = "No step is timed on the H200 of"
    assert f"{untimed} {name} ({releases[1]})." in page.contents(both[:1], tmp_path)["steps.md"]
    assert "No step is timed" not in page.contents(both, tmp_path)["steps.md"]
    other = on_board(both[0], "NVIDIA H100 80GB HBM3")
    shown = page.contents([*both, other], tmp_path)["steps.md"]
    assert f"No step is timed on the H100 of {name} ({releases[1]})." in shown
    assert untimed not in shown


def test_rows_that_production_does_not_make_are_named_and_counted_apart(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    one = {"task": "k05", "op": "f", "inputs": {}}
    rows = (("made", True, 2), ("unmade", False, 3), (None, False, 4))
    record = measured(calls=[one | {"row": row, "production": made, "count": n} for row, made, n in rows])
    shown = page.contents([record], ROOT / known_models.FOLDER)["flux.md"]
    assert "ops: 9, 2 of them with a production row's shapes, 3 with those of a frozen row" in shown
    assert "| unmade (no production row) |" in shown
    assert "| made |" in shown


def test_the_calls_that_a_step_makes_most_come_first_and_the_rest_are_counted(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    counts = range(1, page.MOST_CALLS + 4)
    calls = [
        {"task": "k05", "op": "f", "inputs": {"x": f"[{n}]"}, "row": None, "production": False, "count": n}
        for n in counts
    ]
    shown = page.contents([measured(calls=calls)], ROOT / known_models.FOLDER)["flux.md"]
    assert f"<summary>Calls of our ops: {len(calls)} kinds</summary>" in shown
    found = [int(count) for count in re.findall(r"\| k05 \| f \| (\d+) \| x \[\d+\] \|", shown)]
    assert found == sorted(counts, reverse=True)[: page.MOST_CALLS]
    assert "\n3 kinds with fewer calls are in `steps.jsonl`.\n" in shown


def test_the_page_says_psnr_and_which_code_is_stale(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    same = {"relative": (1e-3, 0.0), "psnr_db": (60.0, None)}
    drifted = {**measured().drift.model_dump(), "steps": 1, "upstream_eager": same}
    record = measured(drift=drifted, hashes={"models": "0" * 64})
    found = page.contents([record], ROOT / known_models.FOLDER)
    assert "after 1 step, PSNR: solution to upstream 54.0 dB, upstream to eager equal, solution to" in found["flux.md"]
    assert "**stale**: the code or the settings of the run changed since" in found["flux.md"]
    assert "PSNR, dB" in found["plots/drift-flux-0.5.23-solution-h200.svg"]


def test_only_an_exact_arm_has_the_tier_of_an_upstream_that_is_bit_exact():
    exact, apart = ({"relative": (0.0, value), "psnr_db": (None, None)} for value in (0.0, 1e-3))
    drifted = {**measured().drift.model_dump(), "upstream_eager": exact}
    verdict = "bound: 1.00 of at most 1.5: upstream is bit-exact to eager, this arm is not"
    assert verdict in views.facts(measured(drift=drifted | {"solution_eager": apart}))
    assert verdict not in views.facts(measured(drift=drifted | {"solution_eager": exact}))


def test_the_readme_has_a_step_before_and_after_once_one_is_recorded(monkeypatch):
    """Milliseconds of the latest clean run of each model; what was refused, noisy or tiny is no answer."""
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    folder = ROOT / known_models.FOLDER
    assert readme_md([], folder) == readme_block.NOTHING
    lost = measured(dirty=True, hashes={"models": "0" * 64})
    unfit = [measured(noisy=("busy",)), lost, measured(arm="upstream"), measured(modes={})]
    assert readme_md(unfit, folder) == readme_block.NOTHING
    older = measured(release="0.5.12.post1")
    text = readme_md([measured(), *unfit, older], folder)
    picture, _, where, _, _, _, head, _, line, *_ = text.splitlines()
    assert picture == f"![{readme_block.SAYS}]({readme_block.DOCS}/{readme_block.PLOT})"
    assert head.count("|") == line.count("|")
    there = "diffusion/models/docs/flux.md"
    record = measured()
    place = f"H200 | {record.layers} of {record.layers_of_model}"
    twice, times = "2.000 [2.000, 2.000]", "0.10 → 0.05 eager"
    assert line == f"| [flux]({there}) | {place} | {times} | {twice} |"
    assert where.startswith("Steps of SGLang 0.5.23's own models")
    assert (
        "[every step](diffusion/models/docs/steps.md) and "
        "[what faster kernels could give it](diffusion/models/docs/ceilings.md)."
    ) in where
    whole = measured(layers=0, layers_of_model=0)
    assert "| whole |" in readme_md([whole], folder)
    apart = readme_md([measured(), measured(model="helios", release="0.5.12.post1")], folder)
    assert f"| [helios]({there.replace('flux', 'helios')}) (0.5.12.post1)" in apart, "not of the newest release"
    of_zimage = hashes([K05], [], known_models.load_models().models["zimage"], "0.5.23")
    none = measured(model="zimage", calls=(), hashes=of_zimage)
    first, second = readme_lines([none, measured()], folder)
    assert first.startswith("| [flux]"), "a model with calls of ours comes first"
    boards = [on_board(measured(), name) for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H200")]
    lines = readme_lines(boards, folder)
    assert [line.split(" | ")[1] for line in lines] == ["H200", "H100"], "a line for each kind of GPU"
    other = record.calls[0].model_copy(update={"task": "k01_norm_infer"}).model_dump()
    less = on_board(measured(calls=(other,), utc="2026-01-01T00:00:00Z"), "NVIDIA H200")
    changed = boards[1].model_copy(update={"hashes": {"k05_norm_scale_shift": "0" * 64}})
    for more, marks in ((boards[1], [0, 1]), (changed, [1, 1])):
        lines = readme_lines([more, less], folder)
        assert [line.count("(stale)") for line in lines] == marks, "a later run has calls of more tasks"
    without = less.model_copy(update={"calls": ()})
    assert " | H200 | " not in readme_md([boards[1], without], folder), "it has no times, and is stale"
    after = without.model_copy(update={"utc": "2999-01-01T00:00:00Z"})
    assert readme_md([boards[1], after], folder).count("(stale)") == 0
    assert second.endswith("| H200 | 3 of 57 | - | - |")
    far = {"estimate": 1.0, "low": 0.97, "high": 1.11, "level": 0.95}
    noisy = record.modes["eager"].model_copy(update={"noise": Interval(**far)})
    text = readme_md([record.model_copy(update={"modes": {**record.modes, "eager": noisy}})], folder)
    assert f"| {place} | too noisy | too noisy |" in text, "a mean of such times tells nobody anything"
    assert "*Too noisy*: upstream's step differs by more than 10% from itself." in text
    disturbed = record.model_copy(update={"modes": {**record.modes, "eager": noisy}})
    clean = measured(model="zimage", hashes=of_zimage)
    assert readme_lines([disturbed, clean], folder)[0].startswith("| [zimage]")
    gone = measured(calls=(), hashes={"models": "0" * 64})
    assert "| [" not in readme_md([gone], folder), "stale, and without a call of ours"
    old = measured(hashes={"k05_norm_scale_shift": "0" * 64})
    assert f"| [flux]({there}) (stale) | {place} | {times} | {twice} |" in readme_md([old], folder)
    assert readme_md([old], folder).endswith(
        "*Stale*: measured before the code, the shapes or a pin changed, or before a task was added.\n\n</details>\n"
    )
    assert readme_block.SAYS not in readme_md([old], folder), "the picture has no stale step"
    assert readme_block.plot(readme_block.steps_to_show([old], folder), folder) == {}


def readme_md(records, folder: Path) -> str:
    """The README's block of these records."""
    return readme_block.steps_md(readme_block.steps_to_show(records, folder), folder)


def readme_lines(records, folder: Path) -> list[str]:
    """The lines of the README's table."""
    return [line for line in readme_md(records, folder).splitlines() if line.startswith("| [")]


def test_a_run_of_other_modes_alone_stands_beside_an_earlier_one(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    folder = ROOT / known_models.FOLDER
    eager, graph = (mode.model_dump() for mode in measured().modes.values())
    whole = measured(command="kda whole", modes={"eager": eager, "compile": eager}, utc="2026-01-01T00:00:00Z")
    later = measured(command="kda later", modes={"compile": eager, "graph": graph}, utc="2026-01-02T00:00:00Z")
    found = page.contents([whole, later], folder)
    shown = found["flux.md"]
    assert re.findall(r"^## (.*)$", shown, re.MULTILINE) == [
        "sglang 0.5.23, solution, H200",
        "sglang 0.5.23, solution, H200, compile, graph",
    ]
    assert shown.count("| 0.5.23 | H200 | solution | 3 of 57 | 0.10 → 0.05 eager | 2.000 [2.000, 2.000] |") == 1
    assert re.findall(r"^\| (eager|compile|graph) \|", shown, re.MULTILINE) == ["eager", "compile", "graph"]
    assert found["plots/shares.svg"].count("flux 0.5.23") == 1
    again = measured(command="kda again", modes={"eager": eager}, utc="2026-01-03T00:00:00Z")
    assert "kda whole" not in page.contents([whole, later, again], folder)["flux.md"]
    old = measured(command="kda old", hashes={"models": "0" * 64}, utc="2026-01-01T00:00:00Z")
    assert "kda old" not in page.contents([old, later], folder)["flux.md"]


def test_a_models_page_has_its_newest_release_first_and_its_hotspots(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    runs = [measured(release=one) for one in ("0.5.23", "0.5.12.post1")]
    old = measured(release="0.5.23", arm="exact", hashes={"k05_norm_scale_shift": "0" * 64})
    other = measured(model="zimage")
    found = page.contents([old, *runs, other], ROOT / known_models.FOLDER, {"flux": "## Hotspots\n"})
    assert re.findall(r"^## (.*)$", found["flux.md"], re.MULTILINE) == [
        *(f"sglang {one}, solution, H200" for one in ("0.5.23", "0.5.12.post1")),
        "sglang 0.5.23, exact, H200",
        "Hotspots",
    ]
    assert "Hotspots" not in found["zimage.md"]
    names = re.findall(r"^\| \[[\w-]+\]\(([\w-]+\.md)\)", found["steps.md"], re.MULTILINE)
    assert set(names) == {"flux.md", "zimage.md"}


def times(us: float, ours: float) -> dict[str, object]:
    """A mode of this many microseconds a step, upstream's and ours."""
    samples = {"upstream": (us, us), "subject": (ours, ours), "again": (us, us)}
    return join_parts([Timed(samples=samples)] * 3).model_dump()


def test_each_arm_counts_in_its_fastest_mode_of_runs_of_the_same_step():
    record = measured(modes={"eager": times(100, 60), "graph": times(90, 80)}, utc="2026-01-02T00:00:00Z")
    alone = fastest(record, [], [])
    assert (alone.mode_before, alone.before, alone.mode_after, alone.after) == ("graph", 0.09, "eager", 0.06)
    assert alone.speedup.estimate == pytest.approx(1.5)
    assert str(alone) == "0.090 ms (graph) -> 0.060 ms (eager), 1.500 [1.500, 1.500]"
    assert f"each arm in its fastest mode: {alone}" in views.timings(record)
    compiled = measured(modes={"compile": times(50, 40)}, utc="2026-01-01T00:00:00Z")
    both = fastest(record, [compiled], [compiled])
    assert (both.mode_before, both.mode_after, both.speedup.estimate) == ("compile", "compile", pytest.approx(1.25))
    theirs = fastest(record, [compiled], [])
    assert (theirs.before, theirs.after) == (0.05, 0.06), "a stale run tells upstream's time alone"
    older = measured(modes={"eager": times(10, 10)}, utc="2026-01-01T00:00:00Z")
    assert fastest(record, [older], [older]) == alone, "the later run of a mode counts"
    assert fastest(record, [], [compiled.model_copy(update={"arm": "exact"})]) == alone
    for other in ({"wheel": "sglang 0.5.23 1"}, {"layers": 4}, {"model": "ltx2"}):
        assert fastest(record, [compiled.model_copy(update=other)], [compiled.model_copy(update=other)]) == alone
    assert fastest(record, [on_board(compiled, "NVIDIA H100 80GB HBM3")], []) == alone
    assert fastest(measured(modes={"graph": join_parts([Timed(refused="no capture")]).model_dump()}), [], []) is None


def test_a_stale_run_does_not_make_the_arm_faster_on_the_page(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    folder = ROOT / known_models.FOLDER
    record = measured(modes={"eager": times(100, 60)})
    stale = measured(modes={"compile": times(50, 10)}, hashes={"models": "0" * 64}, utc="2026-01-01T00:00:00Z")
    disturbed = measured(modes={"graph": times(10, 5)}, noisy=("busy",), utc="2026-01-01T00:00:00Z")
    (best,) = page.fastest_of([record], [stale, disturbed, record], folder).values()
    assert (best.mode_before, best.before, best.mode_after, best.after) == ("compile", 0.05, "eager", 0.06)
    assert "| 0.05 compiled → 0.06 eager | 0.833 " in page.contents([stale, disturbed, record], folder)["flux.md"]
    earlier = measured(modes={"eager": times(100, 5)}, hashes={"models": "0" * 64}, utc="2026-01-01T00:00:00Z")
    (line,) = readme_lines([earlier, measured(modes={"graph": times(90, 60)})], folder)
    assert "| 0.09 → 0.06 CUDA graph | 1.500 " in line, "a current run counts, whatever modes it has"


def on_board(record: StepRecord, name: str) -> StepRecord:
    """The record as if it had been made on a GPU of this name."""
    return record.model_copy(update={"machine": record.machine.model_copy(update={"before": gpu_reading(name)})})


def test_the_readme_draws_current_steps_and_folds_their_table(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    folder = ROOT / known_models.FOLDER
    names = ("qwen-image", "flux", "zimage", "wan-ti2v", "ltx2", "helios")
    known = known_models.load_models().models
    records = [measured(model=name, hashes=hashes([K05], [], known[name], "0.5.23")) for name in names]
    records += [on_board(records[-1], "NVIDIA B200"), measured(model="joyimage-edit", hashes={"models": "0" * 64})]
    text = readme_md(records, folder)
    before, _, table = text.partition("<details>")
    assert before.startswith(f"![{readme_block.SAYS}]({readme_block.DOCS}/{readme_block.PLOT})\n")
    assert re.findall(r"\n\| \[([\w-]+)\]", table) == [*sorted([*names, "helios"]), "joyimage-edit"], (
        "no flattering order"
    )
    ((path, drawn),) = readme_block.plot(readme_block.steps_to_show(records, folder), folder).items()
    assert path == folder / "docs" / readme_block.PLOT
    found = re.findall(r">([\w-]+), \d+\.\d\d → \d+\.\d\d ms<", drawn)
    assert found == sorted(names), "one kind of GPU, and nothing stale"
    assert "speedup of a step, H200, SGLang 0.5.23" in drawn


def test_a_disturbed_run_does_not_replace_a_clean_one(monkeypatch):
    monkeypatch.setenv("KDA_ROOT", str(ROOT))
    folder = ROOT / known_models.FOLDER
    clean, noisy = measured(command="kda clean"), measured(command="kda noisy", noisy=("GPU was busy",))
    assert "kda clean" in page.contents([clean, noisy], folder)["flux.md"]
    assert "kda clean" in page.contents([noisy, clean], folder)["flux.md"]
    alone = page.contents([noisy], folder)["flux.md"]
    assert "noisy: GPU was busy" in alone
    lost = measured(command="kda lost", dirty=True, hashes={"models": "0" * 64})
    assert "kda clean" in page.contents([clean, lost], folder)["flux.md"]
    assert staleness.LOST in page.contents([lost], folder)["flux.md"]
    changed = page.contents([clean, measured(command="kda changed", dirty=True)], folder)["flux.md"]
    assert "` with changes, `kda changed`" in changed
    assert staleness.LOST not in changed


def test_a_claim_that_does_not_follow_from_its_samples_is_refused(tmp_path):
    good = measured()
    forged = good.modes["eager"].model_copy(update={"noise": good.modes["eager"].speedup})
    record_log.append(log(tmp_path), good.model_copy(update={"modes": {"eager": forged}}))
    with pytest.raises(LedgerError, match=r"modes\.eager: its intervals are not those of its samples"):
        page.publish(tmp_path, check=True)
    assert page.claims(good) is None
    assert page.claims(good.model_copy(update={"tiny": True})) == "a run without a GPU holds times"
    beyond = good.drift.model_copy(update={"ratio": 0.5})
    assert "drift" in page.claims(good.model_copy(update={"drift": beyond}))


# ---- calls without computing


def call(row: str | None, count: int, task: str = "k01_a") -> Call:
    return Call(task=task, op="f", inputs={}, count=count, row=row, production=True)


def test_calls_of_a_row_add_up_within_a_request_and_the_first_request_decides():
    found = census.by_row([[call("a", 2), call(None, 9), call("a", 3)], [call("a", 50), call("b", 7)]])
    assert found == {("k01_a", "a"): 5, ("k01_a", "b"): 7}


def test_rows_get_their_calls_and_nothing_else_changes():
    text = (
        '# rows\n\n[[workload]]\nid = "a"\nop = "f"\nproduction = true\ncalls_a_step = 1\nscalars = { eps = 1 }\n\n'
        '[[workload]]\nid = "a2"\nop = "f"\n\n# another\n[[workload]]\nid = "b"\nop = "f"\ninputs.x = { shape = [1] }\n'
    )
    wanted = text.replace("calls_a_step = 1\n", "calls_a_step = 60\n")
    wanted = wanted.replace('id = "b"\nop = "f"\n', 'id = "b"\nop = "f"\ncalls_a_step = 2\n')
    assert census.with_calls(text, {"a": 60, "b": 2}) == wanted
    assert census.with_calls(wanted, {"a": 60, "b": 2}) == wanted
    with pytest.raises(UsageError, match="found none: c"):
        census.with_calls(text, {"a": 1, "c": 1})


def test_values_that_a_model_reads_are_zero():
    with FakeTensorMode(), census._ReadsZero():
        x = torch.ones(3)
        assert (x[0].item(), (x > 0).any().item(), x.long().tolist()) == (0.0, False, [0, 0, 0])


def test_the_rows_have_the_calls_that_a_real_class_makes(known):
    """Qwen-Image and, whose release reads values, Z-Image: the whole models at their real sizes."""
    wheels()
    newest, first = ("0.5.23", "qwen-image"), ("0.5.12.post1", "zimage")
    for release, name in (newest, first):
        answers = run_step.find_calls(name, release, known, ROOT / known_models.FOLDER)
        assert all(answer.as_on_gpu for answer in answers)
        counts = census.by_row(answer.calls for answer in answers)
        assert len(counts) >= 3
        for (folder, row), count in counts.items():
            (written,) = [one for one in Task(ROOT / "diffusion" / folder).workloads if one.id == row]
            assert written.calls_a_step == count, f"{folder}, {row}: kda model calls --write"


def test_a_class_that_launches_other_kernels_is_counted_as_on_a_cpu(known):
    """Z-Image of 0.5.23: behind the question whether a tensor is on a GPU it launches a kernel that is no task's."""
    wheels()
    (answer,) = run_step.find_calls("zimage", "0.5.23", known, ROOT / known_models.FOLDER)
    assert not answer.as_on_gpu
    assert {call.task for call in answer.calls} == {"k03_qknorm_rope"}


# ---- a real class


def wheels() -> None:
    """Skip where the packages or the wheels are missing that the classes of both releases need."""
    for name in boot.NEEDED:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed: {boot.EXTRA}")
    for pin in known_models.load_models(ROOT / known_models.FOLDER / "models.toml").releases.values():
        if not (cache_folder(ROOT) / "wheels" / pin.wheel).is_file():
            pytest.skip(f"{pin.wheel} is not in the cache: kda fetch")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory) -> dict:
    """What model_probe.py found with the pinned wheel's Qwen-Image, two heads wide."""
    wheels()
    folder = ROOT / known_models.FOLDER
    pin = known_models.load_models(folder / "models.toml").releases["0.5.12.post1"]
    tree = boot.obtain(pin, folder / pin.files, offline=True)
    command = [sys.executable, str(Path(__file__).with_name("model_probe.py")), str(tree)]
    temporary = tmp_path_factory.mktemp("temporary")
    env = {"PATH": "", "PYTHONPATH": import_path(), "KDA_ROOT": str(ROOT), "HOME": str(tree), "TMPDIR": str(temporary)}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert list(temporary.glob("kda-*")) == []
    return json.loads(ran.stdout.splitlines()[-1])


def test_a_wrong_solution_shows_in_the_drift(narrow):
    assert narrow["right"]["within"]
    assert not narrow["wrong"]["within"]
    assert narrow["wrong"]["solution_eager"]["relative"][-1] > 3 * narrow["right"]["solution_eager"]["relative"][-1]
    assert narrow["wrong"]["upstream_eager"] == narrow["right"]["upstream_eager"]  # nothing of it stayed behind
    assert narrow["right"]["rounding"]["relative"][-1] > 0


def test_the_exact_arm_has_ops_that_give_upstreams_bits_and_upstreams_own_for_the_others(narrow):
    found = narrow["exact"]
    assert {op for op, ours in found.items() if ours} >= {"apply_rotary_embedding", "fuse_scale_shift_kernel"}
    assert not found["fused_norm_scale_shift"]
    assert not found["fused_inplace_qknorm_rope"]


def test_calls_of_a_real_class_reach_the_ops(narrow):
    calls = {call["op"]: call for call in narrow["calls right"]}
    assert {"fused_norm_scale_shift", "fused_scale_residual_norm_scale_shift", "fused_inplace_qknorm_rope"} <= set(
        calls
    )
    assert calls["fused_inplace_qknorm_rope"]["row"] is None
    assert narrow["calls right"] == narrow["calls wrong"]


def test_weights_are_measured_without_allocating_them(narrow):
    assert narrow["weights"] == narrow["parameters"] > 0
