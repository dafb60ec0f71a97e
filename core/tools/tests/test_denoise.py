"""`kda model denoise` and `kda model compare` with a stand-in for SGLang: what is passed on, kept, refused.

No number here was measured on anything.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.tools.tests import fake_sglang
from kda_judge.contract.errors import ArmFailed, KdaError, MissingRequirement, UsageError
from kda_judge.contract.tasks import find_tasks
from kda_judge.evidence.gpu_state import GpuState
from kda_tools.cli.base import app
from kda_tools.models import known_models
from kda_tools.models.denoise_presets import WARMUP, Choice, arguments, check_release, presets
from kda_tools.models.denoise_run import fault_in
from kda_tools.models.perf_dumps import Dump, Run, read_run
from kda_tools.project import preflight

STOPS = (
    "Detected a quantized model format ('x'). Falling back to diffusers backend.",
    "Pipeline class 'X' specified in 'y' has no native sglang support. Falling back to diffusers backend.",
    "Using diffusers backend for model 'x' (explicitly requested)",
    "Loaded diffusers pipeline: QwenImagePipeline",
    "Error while loading customized transformer, falling back to native version",
    "Component: text_encoder doesn't have a customized version yet, using native version",
    "Native component vae: AutoencoderKL is loaded, performance may be sub-optimal",
    "Generation failed: CUDA out of memory",
)
"""As 0.5.12.post1 and 0.5.23 print them."""


class Machine:
    """A machine where SGLang is installed and one of two GPUs is idle."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.set = folder, monkeypatch.setenv
        self.calls = folder / "calls.jsonl"
        self.out = folder / "out"

    def kda(self, *words: object) -> str:
        result = CliRunner().invoke(app, list(map(str, words)), catch_exceptions=True)
        if isinstance(result.exception, KdaError):
            raise result.exception
        assert result.exit_code == 0, (result.output, result.exception)
        return result.output

    def denoise(self, preset: str = "qwen", *words: object) -> str:
        return self.kda("model", "denoise", preset, "--out", self.out, *words)

    def called(self) -> list[dict]:
        return [json.loads(line) for line in self.calls.read_text().splitlines()]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    programs = fake_sglang.install(tmp_path / "installed")
    states = [
        GpuState.model_construct(
            name="NVIDIA Test", uuid=f"GPU-{n}", driver="580.1", processes=(), utilisation=90 * (n == 0)
        )
        for n in range(2)
    ]
    monkeypatch.setattr(preflight, "_states", lambda: states)
    monkeypatch.setattr(preflight, "ROOM_GB", 0)
    for name in (preflight.VISIBLE, preflight.FLASHINFER, "HF_TOKEN", "KDA_APPLY", "FAKE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HF_HOME", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PATH", os.pathsep.join([str(programs), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.setenv("FAKE_CALLS", str(tmp_path / "calls.jsonl"))
    return Machine(tmp_path, monkeypatch)


def test_a_run_keeps_dumps_log_and_one_picture(machine: Machine) -> None:
    said = machine.denoise()
    folder = machine.out / "qwen-baseline"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["dump-0.json", "dump-1.json", "dump-2.json", "log.txt", "proof.png", "run.json"]
    assert fake_sglang.LOADED in (folder / "log.txt").read_text()
    assert "Metrics dumped to" in said
    run = Run.model_validate_json((folder / "run.json").read_text())
    assert (run.proof, run.applied, run.settings.gpu, run.settings.commit) == (
        "proof.png",
        None,
        "NVIDIA Test",
        "wheel 0.5.12.post1",
    )
    first = machine.called()[0]
    for word in ("--backend=sglang", "--width=1024", "--num-inference-steps=50", "--seed=42", "--warmup"):
        assert word in first["argv"]
    assert first["env"] == {
        "CUDA_VISIBLE_DEVICES": "GPU-1",
        "FLASHINFER_DISABLE_VERSION_CHECK": "1",
        "HF_HOME": str(machine.folder / "HF_HOME"),
        "SGLANG_DIFFUSION_SYNC_STAGE_PROFILING": "0",
        "SGLANG_GIT_COMMIT": "wheel 0.5.12.post1",
    }
    with pytest.raises(UsageError, match="expected a new folder: choose another --label"):
        machine.denoise()


@pytest.mark.parametrize("phrase", STOPS)
def test_a_fallback_stops_the_run_at_once(machine: Machine, phrase: str) -> None:
    machine.set("FAKE", f"say:{phrase}")
    began = time.monotonic()
    with pytest.raises(ArmFailed, match="no number of this run is kept"):
        machine.denoise()
    assert time.monotonic() - began < 50  # the stand-in sleeps for a minute
    assert [path.name for path in (machine.out / "qwen-baseline").iterdir()] == ["log.txt"]


def test_what_is_no_fallback_stops_nothing() -> None:
    assert fault_in(fake_sglang.LOADED) is None
    assert (
        fault_in("Falling back to preset 'slow'. FlashAttention is not supported; falling back to Torch SDPA.") is None
    )


@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ("unloaded", "expected a line 'Loaded transformer"),
        ("exit", "sglang ended with exit code 9"),
        ("dumpless", "sglang wrote no perf dump"),
        ("broken dump", "expected a perf dump of SGLang"),
        ("stageless", "expected a stage that denoises, got InputValidationStage, QwenImageLayeredBefore"),
        ("commit", "expected a dump of wheel 0.5.12.post1, got 0000"),
        ("pictureless", "sglang wrote no image and no clip"),
    ],
)
def test_every_failure_leaves_the_log_alone(machine: Machine, fake: str, message: str) -> None:
    machine.set("FAKE", fake)
    with pytest.raises(ArmFailed, match=message):
        machine.denoise()
    folder = machine.out / "qwen-baseline"
    assert [path.name for path in folder.iterdir()] == ["log.txt"]
    failed = (folder / "log.txt").read_text()
    machine.set("FAKE", "")
    machine.denoise("qwen", "--repeats", 1)  # again, under the same label; the log goes on
    assert (folder / "run.json").is_file()
    assert (folder / "log.txt").read_text().startswith(failed)


def test_a_token_is_for_gated_models_and_never_written(machine: Machine) -> None:
    with pytest.raises(UsageError, match=r"flux: black-forest-labs/FLUX\.1-dev is gated: set HF_TOKEN"):
        machine.denoise("flux")
    machine.set("HF_TOKEN", "hf_secret")
    machine.set("FAKE", "token")
    said = machine.denoise("flux", "--repeats", 1)
    assert machine.called()[-1]["env"]["HF_TOKEN"] == "hf_secret"
    assert "request with ***" in said
    machine.denoise("qwen", "--repeats", 1)
    assert "HF_TOKEN" not in machine.called()[-1]["env"]
    for path in machine.out.rglob("*"):
        assert not path.is_file() or b"hf_secret" not in path.read_bytes(), path


def test_a_local_model_keeps_the_hub_offline(machine: Machine) -> None:
    (machine.folder / "model").mkdir()
    machine.denoise("flux", "--repeats", 1, "--model", machine.folder / "model")  # no token needed
    called = machine.called()[-1]
    assert called["env"]["HF_HUB_OFFLINE"] == "1"
    assert f"--model-path={machine.folder / 'model'}" in called["argv"]


def test_switches_reach_sglang(machine: Machine) -> None:
    (machine.folder / "prompt.txt").write_text("a sentence of mine\n\n")
    (machine.folder / "weights").mkdir()
    machine.denoise(
        "qwen", "--repeats", 1, "--no-compile", "--no-warmup", "--sync-steps", "--profile", "--label", "mine",
        "--prompt-path", machine.folder / "prompt.txt", "--transformer-path", machine.folder / "weights",
    )  # fmt: skip
    called = machine.called()[-1]
    argv = called["argv"]
    assert argv[argv.index("--enable-torch-compile") + 1] == "false"
    assert "--warmup" not in argv
    assert "--profile" in argv
    assert f"--prompt-path={machine.folder / 'prompt.txt'}" in argv
    assert f"--transformer-path={machine.folder / 'weights'}" in argv
    assert not any(word.startswith("--prompt=") for word in argv)
    assert called["env"]["SGLANG_DIFFUSION_SYNC_STAGE_PROFILING"] == "1"
    assert (machine.out / "qwen-mine" / "run.json").is_file()


def test_compare_gives_intervals_over_repeats(machine: Machine) -> None:
    machine.denoise("qwen", "--label", "before", "--repeats", 3)
    machine.calls.unlink()
    machine.set("FAKE_SCALE", "0.5")
    machine.set("KDA_APPLY", "portable: norm_infer")
    machine.denoise("qwen", "--label", "after", "--repeats", 3)
    said = machine.kda("model", "compare", machine.out / "qwen-before", machine.out / "qwen-after")
    rows = {line[:36].strip(): line for line in said.splitlines()}
    for name in ("end to end", "denoising", "step, median of 50", "DenoisingStage", "DecodingStage"):
        assert "2.000 [2.000, 2.000]" in rows[name], said
    assert "1122.00        561.00" in rows["end to end"]
    assert "1020.00        510.00" in rows["denoising"]  # without the stage before it
    assert "B: after, 3 repeats, with kda apply (portable: norm_infer)" in said
    assert "--sync-steps" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile"], "made with --profile"),
        (["--no-compile"], r"same settings, got\n  choice\.compiled: True and False"),
        (["--repeats", "2"], "expected 3 repeats or more, got 2"),
    ],
)
def test_compare_refuses_other_runs(machine: Machine, words: list[str], message: str) -> None:
    machine.denoise("qwen", "--label", "a")
    machine.denoise("qwen", "--label", "b", *words)
    with pytest.raises(UsageError, match=message):
        machine.kda("model", "compare", machine.out / "qwen-a", machine.out / "qwen-b")


def test_compare_refuses_other_presets_stages_commits_and_changed_dumps(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.denoise("qwen", "--label", "a")
    a, b = machine.out / "qwen-a", machine.out / "qwen-b"
    with pytest.raises(UsageError, match="expected a folder that kda model denoise wrote"):
        machine.kda("model", "compare", a, b)
    machine.set("FAKE", "other stages")
    machine.denoise("qwen", "--label", "b")
    with pytest.raises(UsageError, match="the same stages and steps in every repeat"):
        machine.kda("model", "compare", a, b)
    machine.set("FAKE", "")
    for commit, message in (("1" * 40, r"settings\.commit|  commit: wheel"), ("2" * 40 + "+dirty", "had changes")):
        monkeypatch.setattr(preflight, "commit", lambda installed, commit=commit: commit)
        machine.denoise("qwen", "--label", commit[:4])
        with pytest.raises(UsageError, match=message):
            machine.kda("model", "compare", a, machine.out / f"qwen-{commit[:4]}")
    dump = a / "dump-1.json"
    dump.write_text(dump.read_text().replace('"step": 0', '"step": 1'))
    with pytest.raises(UsageError, match=r"dump-1\.json: expected the dump with sha256"):
        machine.kda("model", "compare", a, a)
    dump.unlink()
    with pytest.raises(UsageError, match="got no file"):
        machine.kda("model", "compare", a, a)
    (a / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"run\.json: expected what kda model denoise writes"):
        machine.kda("model", "compare", a, a)


def test_bad_inputs_are_refused_before_sglang_starts(machine: Machine) -> None:
    two = machine.folder / "two.txt"
    two.write_text("one\ntwo\n")
    for words, message in (
        (["quen"], "unknown preset 'quen'; nearest: qwen"),
        (["qwen", "--label", "../up"], "--label '../up': expected letters"),
        (["qwen", "--model", "me/model-AWQ"], "--model me/model-AWQ: expected a model without"),
        (["qwen", "--model", "/no/such"], "--model /no/such: expected a folder"),
        (["qwen", "--transformer-path", "./no"], "--transformer-path ./no: expected a folder"),
        (["qwen", "--prompt-path", two], "expected one line, the prompt, got 2"),
        (["qwen", "--prompt-path", machine.folder / "no"], "--prompt-path .*no: expected a file"),
        (["qwen", "--image", two], "qwen starts from no image"),
        (["qwen-edit"], "--image: qwen-edit starts from an image"),
        (["qwen-edit", "--image", machine.folder / "no.png"], r"--image .*no\.png: expected a file, got none"),
    ):
        with pytest.raises(UsageError, match=message):
            machine.denoise(*words)
    with pytest.raises(MissingRequirement, match="expected 2 idle of 2 GPUs, got 1"):
        machine.denoise("ltx23-two-stage")
    assert not machine.calls.exists()


def test_a_machine_without_sglang(machine: Machine) -> None:
    machine.set("PYTHONPATH", "")
    with pytest.raises(MissingRequirement, match=r"sglang: .* has no sglang, expected 0\.5\.12\.post1 or 0\.5\.23"):
        machine.denoise()


def test_a_run_that_is_interrupted_leaves_the_log_alone(machine: Machine) -> None:
    """Ctrl-C ends SGLang's workers too, which are in its session."""
    code = """
import signal, sys
from kda_judge.evidence.gpu_state import GpuState
from kda_tools.cli.base import app
from kda_tools.project import preflight
preflight._states = lambda: [GpuState.model_construct(name="T", uuid="GPU-0", driver="1", processes=(), utilisation=0)]
preflight.ROOM_GB = 0
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started all this in the background
app(["model", "denoise", "qwen", "--out", sys.argv[1]])
"""
    env = {
        **os.environ,
        "FAKE": "say:still loading",
        "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path]),
        "PYTHONUNBUFFERED": "1",
    }
    command = [sys.executable, "-c", code, str(machine.out)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as ran:
        assert ran.stdout is not None
        assert any(b"still loading" in line for line in ran.stdout)
        ran.send_signal(signal.SIGINT)
        ran.communicate(timeout=50)
    assert ran.returncode != 0
    assert [path.name for path in (machine.out / "qwen-baseline").iterdir()] == ["log.txt"]


def test_every_model_behind_the_rows_has_a_preset() -> None:
    known = set(presets())
    tasks = [task for task in find_tasks() if task.family == known_models.FOLDER.parts[0]]
    behind = {model for task in tasks for model in task.config.task.models}
    assert behind <= known
    assert {"ltx23-one-stage", "ltx23-two-stage"} <= known
    assert set(preflight.releases()) == set(WARMUP)
    for name, preset in presets().items():
        for release in WARMUP:
            if preset.only not in (None, release):
                with pytest.raises(UsageError, match=f"{name}: expected SGLang {preset.only}.*, got {release}"):
                    check_release(name, preset, release)
                continue
            check_release(name, preset, release)
            words = arguments(preset, Choice(), release)
            assert "--backend=sglang" in words
            assert all(isinstance(word, str) for word in words)


def test_the_denoise_sum_leaves_out_what_comes_before() -> None:
    stages = [("HeliosChunkedDenoisingStage", 2.0), ("LTX2RefinementStage", 3.0), ("XBeforeDenoisingStage", 50.0)]
    dump = Dump.model_validate(
        {
            "commit_hash": "x", "tag": "t", "total_duration_ms": 60.0, "denoise_steps_ms": [],
            "steps": [{"name": name, "duration_ms": ms} for name, ms in stages],
        }
    )  # fmt: skip
    assert dump.denoise_ms == 5.0


def test_a_run_without_a_key_is_refused_by_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match=r"run\.json: expected what kda model denoise writes: label: Field required"):
        read_run(tmp_path)
