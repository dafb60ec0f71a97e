"""`kda llm` without a real server: models as data, fake servers and engines, captures, inventories, cards, pages."""

import json
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from core.tools.tests.every_task import TASKS
from core.tools.tests.trace_factory import GEMM, H200, Trace
from kda_judge.arms import upstream
from kda_judge.contract.errors import ArmFailed, MissingRequirement, UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence import gpu_state, record_log
from kda_tools import cli
from kda_tools.llm import (
    engines,
    guidellm_load,
    inventory,
    kernel_cards,
    known_llms,
    load_record,
    operation_bytes,
    page,
    profile_server,
    serve,
    server_client,
    tiny_model,
)
from kda_tools.llm.capture_record import CapturedPhase, CaptureRecord, OperationCall, TensorOf
from kda_tools.llm.llm_views import inventory_lines
from kda_tools.llm.load_record import LoadRecord, RequestTimes
from kda_tools.traces import cards as drafts
from kda_tools.traces import catalogue, traced_rows
from kda_tools.traces.copy_limit import CopyLimit
from kda_tools.traces.trace_profile import Tensor

ROOT = Path(__file__).resolve().parents[3]
KNOWN = known_llms.load_llms(ROOT / "llm" / "models.toml")
NOW = ("20261123T000000Z-0a1b2c", "2026-11-23T00:00:00Z", "kda llm inventory")


def kda(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    """The command's exit code."""
    monkeypatch.setattr("sys.argv", ["kda", *map(str, words)])
    try:
        cli._run()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


# ---- models as data -------------------------------------------------------------------------------------------------


def test_the_priority_models_are_there_and_captured_ones_can_be_built() -> None:
    asked = ("qwen3-8b", "qwen3-30b-a3b", "llama3.1-8b", "qwen3-235b-a22b", "llama3.3-70b", "deepseek-v3.2", "glm-4.5")
    assert {*asked, "glm-5", "kimi-k2", "minimax-m2", "gpt-oss-120b", tiny_model.NAME} <= set(KNOWN.models)
    assert [name for name, one in KNOWN.models.items() if one.captured and one.hub] == list(asked[:3])
    tiny, written = KNOWN.models[tiny_model.NAME].config, tiny_model.CONFIG
    pairs = {"layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads"}
    for key, value in tiny.model_dump(exclude_none=True, exclude_defaults=True).items():
        if (theirs := pairs.get(key, key)) in written:
            assert written[theirs] == value, key


@pytest.mark.parametrize(
    "task", [task for task in TASKS if task.family == known_llms.FOLDER.name], ids=lambda task: task.op
)
def test_every_model_behind_the_rows_of_a_language_task_is_known(task: Task) -> None:
    """A row that names no model of models.toml would be on no page."""
    behind = {model for row in task.workloads for model in row.models}
    assert behind <= set(KNOWN.models), "add it to llm/models.toml, each figure with its source"
    assert behind <= set(task.config.task.models)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("concurrency = 32", "concurency = 32", "unknown key 'loads.mid.concurency'; did you mean concurrency"),
        ("kv_heads = 2\n", "", "kv_heads, head_dim: expected both for grouped attention"),
        ("experts_per_token = 2\n", "", "experts, experts_per_token, moe_intermediate_size: expected all of them"),
        ("gpus = { h200 = 1 }\n", "", "gpus, gpus_source: expected both or neither"),
        ('attention = "latent"\n', 'attention = "latent"\nkv_heads = 0\n', "kv_heads"),
        ('title = "GLM-5"', 'title = "GLM-5"\ncaptured = true', "captured: expected grouped attention"),
    ],
)
def test_a_broken_file_is_refused_by_key(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = (ROOT / "llm" / "models.toml").read_text()
    assert old in text
    (tmp_path / "models.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as error:
        known_llms.load_llms(tmp_path / "models.toml")
    assert str(tmp_path / "models.toml") in str(error.value)
    assert words in str(error.value)


def test_serving_commands(tmp_path: Path) -> None:
    def words(name: str, engine: Any, target: Any) -> str:
        return " ".join(engines.command(KNOWN, name, engine, target, "127.0.0.1", 81, str(tmp_path)))

    assert words("deepseek-v3.2", "sglang", "h200").endswith("--tp 8 --enable-metrics --dp 8 --enable-dp-attention")
    (config,) = re.findall(r"--profiler-config (\{.*\})", words("qwen3-8b", "vllm", "h200"))
    assert json.loads(config)["torch_profiler_dir"] == str(tmp_path)
    assert "--cb-max-batch-tokens 256" in words("qwen3-8b", "transformers", None)
    assert "--device" not in words("qwen3-8b", "transformers", "h200")
    for name, engine, target, said in (
        ("kimi-k2", "sglang", "h200", "--target h200: expected b200 for kimi-k2"),
        ("deepseek-v3.2", "transformers", "h200", "serves on 8 GPUs"),
        ("tiny-moe", "sglang", None, "expected a model with weights to serve"),
        ("qwen3-8b", "sglang", None, "there is no GPU here, and --engine sglang needs one"),
        ("deepseek-v3.2", "transformers", None, "there is no GPU here, and deepseek-v3.2 needs one"),
        ("qwen3-9b", "sglang", None, "unknown model 'qwen3-9b'; nearest: qwen3-8b"),
    ):
        with pytest.raises(UsageError, match=re.escape(said)):
            words(name, engine, target)


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        ("kimi-k2", "NVIDIA H200", "--target h200: expected b200 for kimi-k2"),
        ("qwen3-8b", "NVIDIA A100", "--target: expected h200 or b200: this machine's NVIDIA A100 is none of them"),
        ("qwen3-8b", "NVIDIA H200", "--tp 1"),
        ("tiny", "NVIDIA A100", "--tp 1"),
    ],
)
def test_without_a_target_the_command_is_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, model: str, gpu: str, said: str
) -> None:
    monkeypatch.setattr(gpu_state, "has_gpu", lambda: True)
    monkeypatch.setattr(gpu_state, "read_state", lambda _device: SimpleNamespace(name=gpu))
    code = kda(monkeypatch, "llm", "serve", model, "--engine", "sglang", "--print")
    assert said in "".join(capsys.readouterr())
    assert code == (2 if said.startswith("--target") else 0)


def test_an_address_of_ipv6_has_brackets_in_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "sglang", "exit 0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(serve, "demand_free", lambda *_: None)
    asked: list[str] = []
    monkeypatch.setattr(serve, "run", lambda _words, _env, url, _said: asked.append(url))
    assert kda(monkeypatch, "llm", "serve", "qwen3-8b", "--engine", "sglang", "--target", "h200", "--host", "::1") == 0
    assert asked == ["http://[::1]:8000"]


# ---- servers that are not -------------------------------------------------------------------------------------------


class Fake(BaseHTTPRequestHandler):
    """A server whose answers the test sets: path -> (code, body) or a function of the body that was posted."""

    answers: dict[str, Any] = {}

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        posted = json.loads(self.rfile.read(length)) if length else None
        found = self.answers.get(self.path, (404, "no such path"))
        code, body = found(posted) if callable(found) else found
        self.send_response(code)
        self.end_headers()
        self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

    do_GET = do_POST = answer  # noqa: N815  # names that http.server calls

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def server(answers: dict[str, Any]) -> Iterator[str]:
    """Its address."""
    fake = type("Asked", (Fake,), {"answers": answers})
    with ThreadingHTTPServer(("127.0.0.1", 0), fake) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()


def models(*names: str) -> dict[str, Any]:
    return {"data": [{"id": name, "owned_by": "sglang"} for name in names]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_what_is_wrong_with_a_server_is_said() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(MissingRequirement, match=r"no server answers .*`kda llm serve`"):
        server_client.demand_tokens(gone, "a")
    assert not server_client.alive(gone)
    for url in ("ftp://a", "http://", "localhost:80", "http://a:99999", "http://a/v1"):
        with pytest.raises(UsageError, match="expected a server's address"):
            server_client.check_url(url)
    with server({"/v1/models": (200, models("b"))}) as url, pytest.raises(UsageError, match=r"--model a: .* serves: b"):
        server_client.demand_tokens(url, "a")
    with (
        server({"/v1/models": (200, models()), "/v1/completions": (500, "out of memory")}) as url,
        pytest.raises(MissingRequirement, match="got HTTP 500: out of memory"),
    ):
        server_client.demand_tokens(url, "a")
    with server({"/v1/models": (200, "<html>")}) as url, pytest.raises(MissingRequirement, match="is it such a server"):
        server_client.served_models(url)
    with server({"/v1/models": (200, models("b"))}) as url:
        assert server_client.owner(url) == "sglang"
        assert server_client.alive(url)  # it answers /health with 404


def test_a_port_in_use_and_an_engine_that_is_absent_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with server({}) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(MissingRequirement, match=rf"--port {port}: .*Address already in use; choose another"):
            serve.demand_free("127.0.0.1", port)
    monkeypatch.setenv("PATH", "/nowhere")
    assert kda(monkeypatch, "llm", "serve", "qwen3-8b", "--engine", "vllm", "--target", "h200") == 3
    assert "vllm: expected it on PATH or in .nox/llm" in (said := capsys.readouterr().err)
    assert "pip install vllm" in said


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def test_engines_are_started_and_an_early_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Fake executables: what SGLang and vLLM are called with, and what happens when they end."""
    program(tmp_path, "sglang", 'echo "got: $*"; exit 7')
    port = free_port()
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    words = ("llm", "serve", "llama3.1-8b", "--engine", "sglang", "--target", "h200", "--port", port)
    assert kda(monkeypatch, *words) == 5
    said = capfd.readouterr()
    assert f"got: serve --model-path meta-llama/Llama-3.1-8B-Instruct --host 127.0.0.1 --port {port} --tp 1" in said.out
    assert "ended with exit code 7 before" in said.err
    answering = "import http.server as h; h.HTTPServer(('127.0.0.1', {}), h.SimpleHTTPRequestHandler).handle_request()"
    program(tmp_path, "vllm", f'exec python3 -c "{answering.format(port)}"')
    heard: list[str] = []
    assert serve.run([str(tmp_path / "vllm")], dict(os.environ), f"http://127.0.0.1:{port}", heard.append) == 0
    assert heard == [f"ready: http://127.0.0.1:{port}"]


# ---- loads ----------------------------------------------------------------------------------------------------------


def loaded(**changes: Any) -> LoadRecord:
    times = [
        RequestTimes(sent_s=i / 10, first_token_s=i / 10 + 0.05, done_s=i / 10 + 0.1, output_tokens=11)
        for i in range(10)
    ]
    known: dict[str, Any] = {
        "run_id": NOW[0],
        "utc": "2026-11-23T00:00:00Z",
        "seconds": 1.0,
        "command": "kda llm bench",
        "model": "tiny",
        "engine": "sglang",
        "load": "low",
        "concurrency": 1,
        "requests": 10,
        "data": "random 64/16",
        "commit": "unknown",
        "dirty": False,
        "generator": "guidellm 0.8.1",
        "cpu": "a",
        "gpu": None,
        "errored": 0,
        "incomplete": 0,
        "errors": {},
        "died": False,
        "succeeded": tuple(times),
    }
    return LoadRecord(**{**known, **changes})


def test_times_of_a_load() -> None:
    record = loaded()
    first, between, rate = (
        f(record) for f in (load_record.first_token_ms, load_record.inter_token_ms, load_record.tokens_per_s)
    )
    assert first is not None
    assert between is not None
    assert rate is not None
    assert first.estimate == pytest.approx(50)
    assert between.estimate == pytest.approx(5)
    assert rate.estimate == pytest.approx(110)  # 110 tokens in one second
    assert rate.low < 110 < rate.high
    assert not record.partial
    assert loaded(died=True).partial
    assert loaded(requests=11).partial
    assert load_record.first_token_ms(loaded(succeeded=())) is None
    assert load_record.tokens_per_s(loaded(succeeded=())) is None


def report(ok: int, failed: int, incomplete: int = 0) -> dict[str, Any]:
    """As guidellm 0.8.1 writes it, in what is read of it."""

    def one(i: int, **more: Any) -> dict[str, Any]:
        times = {"request_start": 100.0 + i, "first_token_iteration": 100.5 + i, "request_end": 101.0 + i}
        return {
            "info": {"timings": {**times, "token_iterations": 8}, "error": "HTTPStatusError(500)\\nmore", **more},
            "output_metrics": {"text_tokens": 16},
        }

    totals = {"successful": ok, "errored": failed, "incomplete": incomplete}
    listed = {"successful": [one(i) for i in range(ok)], "errored": [one(i) for i in range(failed)], "incomplete": []}
    benchmark = {"requests": listed, "scheduler_metrics": {"requests_made": totals}}
    return {"metadata": {"guidellm_version": "0.8.1"}, "benchmarks": [benchmark]}


def test_a_report_of_guidellm(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(2, 3, 1)))
    found = guidellm_load.read_report(path)
    assert [one.sent_s for one in found.succeeded] == [0.0, 1.0]
    assert found.errors == {"HTTPStatusError(500)": 3}
    assert found.incomplete == 1
    broken = report(2, 3)
    broken["benchmarks"][0]["scheduler_metrics"]["requests_made"]["errored"] = 0  # a report that hides its failures
    for content in (broken, {}, {"benchmarks": []}):
        path.write_text(json.dumps(content))
        with pytest.raises(ArmFailed, match=r"expected a report of guidellm 0\.8"):
            guidellm_load.read_report(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"prompt": "a"}\nx', ":2: expected"), ('{"text": "a"}', ":1: expected"), ("", "expected at least one line")],
)
def test_a_file_of_prompts_is_checked(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{tmp_path / 'prompts.jsonl'}")) as error:
        guidellm_load._checked(tmp_path / "prompts.jsonl")
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("told", "code", "said"),
    [
        (report(3, 0), 0, "3 of 3 requests succeeded"),
        (report(0, 3), 5, "none of 3 requests succeeded"),
        (report(1, 1, 1), 5, "a partial record"),
        (None, 5, "guidellm ended with 1 and without a report; it said: RuntimeError: no backend"),
    ],
    ids=["all", "none", "some", "no report"],
)
def test_failures_are_counted_whatever_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, told: Any, code: int, said: str
) -> None:
    """A fake guidellm, which ends with 0 as the real one does when every request failed."""
    (tmp_path / "told.json").write_text(json.dumps(told))
    find = 'for w in "$@"; do o=$w; done; o=$(echo "$o" | sed "s/.*path\\": \\"//; s/\\".*//")'  # the last word
    fail = 'echo "RuntimeError: no backend" >&2; exit 1'
    program(tmp_path, "guidellm", fail if told is None else f'{find}\ncp {tmp_path}/told.json "$o"')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    completed = (200, {"choices": [{"text": "a"}]})
    with server({"/v1/models": (200, models("a")), "/v1/completions": completed}) as url:
        words = ("llm", "bench", url, "--requests", 3, "--json", tmp_path / "record.json")
        assert kda(monkeypatch, *words) == code
    seen = capsys.readouterr()
    assert said in seen.out + seen.err
    if told is not None:
        record = LoadRecord.model_validate_json((tmp_path / "record.json").read_bytes())  # of a failed load, too
        assert (len(record.succeeded), record.errored) == tuple(
            told["benchmarks"][0]["scheduler_metrics"]["requests_made"][key] for key in ("successful", "errored")
        )


def test_a_tokenizer_that_is_no_folder_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert kda(monkeypatch, "llm", "bench", "http://127.0.0.1:1", "--tokenizer", "./none") == 2
    assert "--tokenizer ./none: expected a folder or a name on the Hub" in capsys.readouterr().err


def test_a_load_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    program(tmp_path, "guidellm", f'echo "$@" > {tmp_path}/words; exec sleep 600')
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(guidellm_load, "REPORT_S", 1.0)
    completed = (200, {"choices": [{"text": "a"}]})
    with server({"/v1/models": (200, models("a")), "/v1/completions": completed}) as url:
        assert kda(monkeypatch, "llm", "bench", url, "--requests", 3, "--timeout-s", 1) == 5
    said = capsys.readouterr()
    assert f"loading {url}: 3 requests, 1 at once, 1 s at most" in said.out
    assert "guidellm: it was to end after 1 s, and ran for 2 s" in said.err
    assert "--constraint kind=max_duration,seconds=1" in (tmp_path / "words").read_text()


# ---- profiles of servers --------------------------------------------------------------------------------------------


def plan(url: str, folder: Path, engine: Any = "sglang", wait_s: float = 5.0) -> profile_server.ProfilePlan:
    return profile_server.ProfilePlan(url, engine, folder, 10, 0.0, False, wait_s, every_s=0.01)


def gauges(prefix: str, names: tuple[str, str], *readings: tuple[float, float]) -> Any:
    """/metrics with the next reading at each call, the last one for ever."""
    left = list(readings)

    def answer(_: object) -> tuple[int, str]:
        now = left.pop(0) if len(left) > 1 else left[0]
        lines = (f'{prefix}:{name}{{model_name="a b"}} {value}' for name, value in zip(names, now, strict=True))
        return 200, "# HELP x\n" + "\n".join(lines)

    return answer


SGLANG = ("num_running_reqs", "num_queue_reqs")


def test_a_profile_waits_for_a_steady_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_server, "SETTLED_S", 0.01)
    posted: list[Any] = []

    def start(body: Any) -> tuple[int, str]:
        posted.append((body, len(readings)))
        (tmp_path / "1-TP-0.trace.json.gz").write_bytes(b"x")
        return 200, "Start profiling."

    readings: list[None] = []
    filling = gauges("sglang", SGLANG, *((float(i), 3.0) for i in range(1, 9)), (32.0, 0.0))

    def counted(body: object) -> tuple[int, str]:
        readings.append(None)
        return filling(body)  # type: ignore[no-any-return]

    with server({"/metrics": counted, "/start_profile": start}) as url:
        found = profile_server.run(plan(url, tmp_path), KNOWN.engines["sglang"], lambda _: None)
    assert [path.name for path in found] == ["1-TP-0.trace.json.gz"]
    ((body, asked),) = posted
    only_the_gpu = {"activities": ["GPU"], "record_shapes": False, "with_stack": False}
    assert body == {"output_dir": str(tmp_path), "num_steps": 10, **only_the_gpu}
    assert asked >= 8 + profile_server.READINGS  # none of the filling ones counts


def test_vllm_is_started_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_server, "SETTLED_S", 0.01)
    order: list[str] = []

    def note(name: str) -> Any:
        def answer(_: object) -> tuple[int, str]:
            order.append(name)
            if name == "stop":
                (tmp_path / "rank0.pt.trace.json").write_text("x")
            return 200, ""

        return answer

    metrics = gauges("vllm", ("num_requests_running", "num_requests_waiting"), (8.0, 0.0))
    with server({"/metrics": metrics, "/start_profile": note("start"), "/stop_profile": note("stop")}) as url:
        profile_server.run(plan(url, tmp_path, "vllm"), KNOWN.engines["vllm"], lambda _: None)
    assert order == ["start", "stop"]


def test_no_profile_of_an_unsteady_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_server, "SETTLED_S", 0.01)
    engine = KNOWN.engines["sglang"]
    started: list[None] = []

    def start(_: object) -> tuple[int, str]:
        started.append(None)
        (tmp_path / "late.trace.json").write_text("x")
        return 200, ""

    for readings in ([(0.0, 0.0)], [(8.0, 2.0)], [(2.0, 0.0), (20.0, 0.0)] * 40):
        with (
            server({"/metrics": gauges("sglang", SGLANG, *readings), "/start_profile": start}) as url,
            pytest.raises(UsageError, match="expected a steady load within"),
        ):
            profile_server.run(plan(url, tmp_path, wait_s=0.2), engine, lambda _: None)
    assert not started
    with (
        server({"/metrics": (200, "other 1"), "/start_profile": start}) as url,
        pytest.raises(MissingRequirement, match="--enable-metrics"),
    ):
        profile_server.run(plan(url, tmp_path), engine, lambda _: None)
    ends = gauges("sglang", SGLANG, *[(8.0, 0.0)] * profile_server.READINGS, (0.0, 0.0))
    with (
        server({"/metrics": ends, "/start_profile": start}) as url,
        pytest.raises(ArmFailed, match=r"from 8 to 0 requests at work: late\.trace\.json"),
    ):
        profile_server.run(plan(url, tmp_path), engine, lambda _: None)
    # SGLang answers before it profiles: the load ends later, and the trace comes after that.
    left = [*[(8.0, 0.0)] * (profile_server.READINGS + 4), (0.0, 0.0)]
    flips = gauges("sglang", SGLANG, *left)
    asked: list[None] = []

    def counted(body: object) -> tuple[int, str]:
        asked.append(None)
        if len(asked) == len(left) + 2:
            (tmp_path / "later.trace.json").write_text("x")
        return flips(body)  # type: ignore[no-any-return]

    with (
        server({"/metrics": counted, "/start_profile": (200, "")}) as url,
        pytest.raises(ArmFailed, match=r"from 8 to 0 requests at work: later\.trace\.json"),
    ):
        profile_server.run(plan(url, tmp_path), engine, lambda _: None)
    with (
        server({"/metrics": gauges("sglang", SGLANG, (8.0, 0.0)), "/start_profile": (200, "")}) as url,
        pytest.raises(MissingRequirement, match="the server writes on its own machine"),
    ):
        profile_server.run(plan(url, tmp_path / "none", wait_s=0.3), engine, lambda _: None)


# ---- inventories and cards ------------------------------------------------------------------------------------------

NORM, FUSED, DRAW = "sglang::rmsnorm", "sglang::fused_add_rmsnorm_reg_kernel", "distribution_elementwise_kernel"
TENSORS = {
    "gemm": [([64, 4096], "bfloat16"), ([6144, 4096], "bfloat16")],
    "fused_add_rmsnorm": [([64, 4096], "bfloat16"), ([64, 4096], "bfloat16"), ([4096], "bfloat16")],
    "stand-in multinomial": [([64, 151936], "float32")],
}
TIMES = {"gemm": (GEMM, 800.0), "fused_add_rmsnorm": (FUSED, 100.0), "stand-in multinomial": (DRAW, 100.0)}


def tensors(name: str) -> tuple[TensorOf, ...]:
    found = []
    for shape, dtype in TENSORS[name]:
        strides = [1] if len(shape) == 1 else [shape[1], 1]
        found.append(TensorOf(dtype=dtype, shape=tuple(shape), strides=tuple(strides)))
    return tuple(found)


def captured(folder: Path, device: str = "cuda") -> Path:
    """A folder as `kda llm capture` leaves it: two phases of two steps, each operation called twice a step.

    Of a step's GPU time, 2000 us, GEMMs take 80%, norm and stand-in 10% each; the second phase's norm takes half.
    """
    folder.mkdir(exist_ok=True)
    phases = []
    for batch, part in ((64, 1.0), (1, 0.5)):
        trace = Trace()
        at = 0.0
        for step in range(2):
            trace.step(step, at, 2100.0)
            for number in range(2):
                for name, (kernel, us) in TIMES.items():
                    us = us * (part if name == "fused_add_rmsnorm" else 1)
                    trace.annotation(f"kda|{name}", at + 1, 5)
                    trace.kernel(kernel, at + 10, us, trace.launch(at + 2))
                    at += us + 20
                assert number >= 0
        file = f"decode-b{batch}.trace.json"
        if device == "cuda":
            trace.write(folder / file, gpu=H200)
        calls = tuple(OperationCall(name=name, tensors=tensors(name), calls_a_step=2.0) for name in TIMES)
        sizes = {"batch": batch, "new_tokens": 1, "kv_tokens": 2048, "steps": 2}
        times = (2000.0, 2010.0, 1990.0) if device == "cuda" else ()
        phases.append(
            CapturedPhase(
                name=f"decode-b{batch}", calls=calls, trace=file if device == "cuda" else None, graph_us=times, **sizes
            )
        )
    record = CaptureRecord(
        run_id="r",
        utc=NOW[1],
        command="kda llm capture",
        model="qwen3-8b",
        layers=36,
        layers_of_model=36,
        device=device,
        gpu=None,
        dtype="bfloat16",
        seed=0,
        files=None,
        kernels=f"sglang 0.5.23 {'0' * 64}",
        stand_ins=("stand-in multinomial",),
        commit="unknown",
        dirty=False,
        versions={},
        noisy=(),
        phases=tuple(phases),
    )
    (folder / "capture.json").write_text(record.model_dump_json())
    return folder


LIMITS = {"NVIDIA H200": CopyLimit("NVIDIA H200", ((1, 2.0), (100_000_000, 25.0)), ("run",))}


def test_a_trace_has_every_step_and_the_calls_of_these_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from kda_tools.llm.capture import _profile
    from kda_tools.llm.served_step import Calls

    calls, x = Calls(), torch.ones(4)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    _profile(lambda: calls("sum", torch.add, x, x), 3, tmp_path / "trace.json", calls)
    names = Counter(event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"])
    assert [names[f"ProfilerStep#{number}"] for number in range(5)] == [0, 1, 1, 1, 0]
    assert names["kda|sum"] == 3
    assert list(calls.seen.values()) == [3]


def test_a_capture_becomes_cards(tmp_path: Path) -> None:
    found = inventory.of_capture(captured(tmp_path / "capture"), *NOW)
    again = tmp_path / "inventory.json"
    again.write_text(found.model_dump_json())
    found = inventory.read(again)
    assert [phase.gpu_us for phase in found.phases] == pytest.approx([2000, 1900])
    # as if no task here were about these operations yet
    unsolved = tuple(one.model_copy(update={"task": None}) for one in catalogue.load(ROOT))
    made, lines = kernel_cards.cards(found, unsolved, LIMITS, 0.01)
    assert {one.name: one.what for one in lines} == {
        "gemm": "no card: gemm is not bound by bytes",
        "fused_add_rmsnorm": "card",
        "stand-in multinomial": "a stand-in: no server runs it like this",
    }
    (card,) = made
    assert (card.operator, card.model, card.phase) == ("fused_add_rmsnorm", "qwen3-8b", "decode-b64")
    assert card.share == pytest.approx(0.1)
    assert [(one.phase, round(one.share, 4)) for one in card.phases] == [("decode-b64", 0.1), ("decode-b1", 0.0526)]
    moved = 2 * (4 * 64 * 4096 + 4096)
    row = card.row[0]
    assert (row.phase, row.bytes, row.calls_per_step, row.us_per_call) == ("decode-b64", moved, 2.0, 100.0)
    assert row.inputs is not None
    assert [(list(one.shape), one.dtype) for one in row.inputs] == [
        ([64, 4096], "c10::BFloat16"),
        ([64, 4096], "c10::BFloat16"),
        ([4096], "c10::BFloat16"),
    ]
    # Amdahl: what two calls of 100 us give at their limit, of a step with its idle times
    assert row.limit_us is not None
    saved = 2 * (100.0 - row.limit_us)
    assert card.saved_us_per_step == pytest.approx(saved)
    assert card.step_speedup_at_most == pytest.approx(card.step_us / (card.step_us - saved))
    assert card.step_us == 2000.0  # the step as a CUDA graph, and not the eager one
    assert "| decode-b1 | 2 | 50.00 |" in traced_rows.with_shapes("# a task", card)
    (path,) = drafts.write(made, tmp_path / "cards")
    assert drafts.read(path) == card
    assert not kernel_cards.cards(found, unsolved, LIMITS, 0.11)[0]


def test_no_cards_of_what_is_not_known(tmp_path: Path) -> None:
    entries = catalogue.load(ROOT)
    untimed = inventory.of_capture(captured(tmp_path / "cpu", "cpu"), *NOW)
    assert not untimed.timed
    assert "without a GPU nothing was timed" in "\n".join(inventory_lines(untimed, []))
    with pytest.raises(UsageError, match=r"nothing was timed.* capture on a machine with a GPU"):
        kernel_cards.cards(untimed, entries, {}, 0.01)
    trace = Trace()
    trace.call("aten::mul", "a", 1, 10, 90, ([8], "float"))
    trace.kernel("b", 200, 10, trace.launch(150, name="cudaGraphLaunch"))
    traced = inventory.of_traces([trace.write(tmp_path / "t.json")], 1, "qwen3-8b", "sglang 0.5.23", *NOW)
    with pytest.raises(UsageError, match=r"expected at most 5% of GPU time unattributed, got 10\.0%"):
        kernel_cards.cards(traced, entries, {}, 0.01)


def test_inventories_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    folder = captured(tmp_path / "capture")
    trace = folder / "decode-b64.trace.json"
    with pytest.raises(UsageError, match="got one of `kda llm capture`"):
        inventory.of_traces([trace], 1, "qwen3-8b", "sglang 0.5.23", *NOW)
    other = Trace()
    other.call("vllm::unified_attention", "vllm::paged", 1, 10, 90)
    path = other.write(tmp_path / "v.json")
    for engine in ("sglang", "transformers"):
        with pytest.raises(UsageError, match=f"expected a trace of {engine}, got one with kernels of vllm"):
            inventory.of_traces([path], 1, "qwen3-8b", f"{engine} 1.0", *NOW)
    with pytest.raises(
        UsageError, match=r"--engine 'sglnag 0\.5': expected one of transformers, sglang, vllm, and its"
    ):
        inventory.of_traces([path], 1, "qwen3-8b", "sglnag 0.5", *NOW)
    other.write(trace)
    with pytest.raises(UsageError, match="is it another trace"):
        inventory.of_capture(folder, *NOW)
    with pytest.raises(UsageError, match="`kda llm capture` writes one"):
        inventory.of_capture(tmp_path, *NOW)
    (tmp_path / "broken.json").write_text("{")
    for file, said in (
        (tmp_path / "broken.json", "broken.json: not valid JSON"),
        (folder / "capture.json", "expected an inventory, got a capture: first run kda llm inventory"),
    ):
        assert kda(monkeypatch, "llm", "cards", file, tmp_path / "cards") == 2
        assert said in " ".join(capsys.readouterr().err.split())


def test_phases_of_a_server_are_named_by_rank_and_stage(tmp_path: Path) -> None:
    def written(name: str, us: float) -> Path:
        trace = Trace()
        trace.call("aten::mul", "a", 1, 10, us)
        return trace.write(tmp_path / name)

    what = ("qwen3-8b", "sglang 0.5.23", *NOW)
    paths = [written(f"1764100000.5-TP-0-{stage}.trace.json", us) for stage, us in (("DECODE", 90), ("EXTEND", 80))]
    found = inventory.of_traces([*paths, written("rank0.1764.pt.trace.json", 70)], 4, *what)
    named = [phase.name for phase in found.phases]
    assert named == ["1764100000.5-TP-0-DECODE", "1764100000.5-TP-0-EXTEND", "rank0.1764"]
    assert {phase.steps for phase in found.phases} == {4}
    with pytest.raises(UsageError, match=r"DECODE\.trace\.json: it marks no steps, so say by --steps"):
        inventory.of_traces(paths, None, *what)
    for twice in ([paths[0], paths[0]], [paths[0], written("copy.json", 90)]):
        with pytest.raises(UsageError, match="expected traces that differ in name and content"):
            inventory.of_traces(twice, 4, *what)


def test_options_of_traces_are_refused_with_a_capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = captured(tmp_path / "capture", "cpu")
    for words, said in (
        ((folder, "--model", "qwen3-8b"), "a capture knows them: leave --model, --engine and --steps out"),
        ((folder, folder), "expected one folder of a capture, or a server's traces, got several paths"),
    ):
        assert kda(monkeypatch, "llm", "inventory", *words) == 2
        assert said in capsys.readouterr().err
    assert kda(monkeypatch, "llm", "profile", "http://127.0.0.1:1", folder / "capture.json") == 2
    assert "expected the folder where the server writes, got a file" in capsys.readouterr().err


def test_bytes_of_operations() -> None:
    """By hand, for T = 2 tokens, 4 and 2 heads of 8, bfloat16."""

    def t(*shape: int, dtype: str = "c10::BFloat16") -> Tensor:
        return Tensor(shape, dtype)

    q, k, pool = t(2, 4, 8), t(2, 2, 8), t(1000, 16)
    one = (q, k, k, pool, pool, t(4096, 8, dtype="float"), t(2, dtype="long"), t(2, dtype="long"))
    # q, k read and written, v read; k, v to the pool; two rows of angles, positions, slots
    assert operation_bytes.FORMULAS["rope_kv_store"](one) == 2 * 128 + 2 * 64 + 64 + 128 + 64 + 16 + 16
    assert operation_bytes.FORMULAS["silu_and_mul"]([t(2, 8)]) == 32 + 16
    assert operation_bytes.FORMULAS["embedding"]([t(2, dtype="long"), t(1000, 8)]) == 16 + 2 * 2 * 16


# ---- pages ----------------------------------------------------------------------------------------------------------


def test_the_pages_of_this_checkout_are_those_of_its_records() -> None:
    pytest.importorskip("matplotlib")
    assert page.publish(ROOT / "llm", check=True) == []


def test_a_recorded_inventory_makes_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "models.toml").write_bytes((ROOT / "llm" / "models.toml").read_bytes())
    assert page.NOT_MEASURED in page.contents(tmp_path)["qwen3-8b.md"]
    untimed = inventory.of_capture(captured(tmp_path / "cpu", "cpu"), *NOW)
    record_log.append(inventory.log(tmp_path), untimed)
    record_log.append(load_record.log(tmp_path), loaded(model="Qwen/Qwen3-8B"))
    assert page.NOT_MEASURED in (text := page.contents(tmp_path)["qwen3-8b.md"])  # a CPU says nothing
    assert "no load on a machine with a GPU" in text
    timed = inventory.of_capture(captured(tmp_path / "capture"), *NOW)
    record_log.append(inventory.log(tmp_path), timed)
    record_log.append(load_record.log(tmp_path), loaded(model="Qwen/Qwen3-8B", gpu="NVIDIA H200"))
    made = page.contents(tmp_path)
    text = made["qwen3-8b.md"]
    covered = "[l02_fused_add_rmsnorm](../../llm/l02_fused_add_rmsnorm/docs/results.md)"
    assert f"| `fused_add_rmsnorm` | norm | 10.0% | decode-b64 | covered by {covered} |" in text
    assert "| decode-b64 | NVIDIA H200 | 2000.0 | 2000 [1990, 2010] | 0.0% |" in text
    assert "stand-ins, which no server runs like this: stand-in multinomial" in text
    assert "10 of 10" in text
    assert "<svg" in made["plots/qwen3-8b-shares.svg"]
    noisy = timed.model_copy(update={"noisy": ("others used the GPU",), "utc": "2026-11-23T01:00:00Z"})
    assert page.chosen([timed, noisy]) is timed
    assert page.part_of(timed.phases[0], page.PARTS[0][0]) == pytest.approx(0.8)


# ---- the step -------------------------------------------------------------------------------------------------------


def test_a_step_counts_what_a_server_would_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """On a CPU, with PyTorch's operations; the grouped GEMM and its alignment against plain indexing."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for model, layers in (("tiny", 2), ("tiny-moe", 1)):
        out = tmp_path / model
        words = ("llm", "capture", model, out, "--layers", layers, "--steps", 2)
        assert kda(monkeypatch, *words) == 0
        said = capsys.readouterr().out
        assert "without a GPU nothing was timed" in said
        record = CaptureRecord.model_validate_json((out / "capture.json").read_bytes())
        assert (record.device, record.layers) == ("cpu", layers)
        assert {phase.trace for phase in record.phases} == {None}
        calls = {(p.name, call.name): call for p in record.phases for call in p.calls}
        norm = calls["decode-b4-kv32", "fused_add_rmsnorm"]
        assert (norm.calls_a_step, norm.tensors[0].shape) == (2 * layers, (4, 64))
        rope = calls["prefill-24", "rope_kv_store"]
        assert rope.tensors[0].strides == (128, 16, 1)  # q is a slice of the merged projection
        assert ("prefill-24", "topk_softmax") in calls or model == "tiny"
    assert kda(monkeypatch, "llm", "capture", "tiny", tmp_path / "tiny") == 2
    assert "DIR " in capsys.readouterr().err  # a folder that holds a capture
    assert kda(monkeypatch, "llm", "capture", "kimi-k2", tmp_path / "k") == 2
    assert "expected a model whose step is built here" in capsys.readouterr().err
    from kda_tools.llm.step_ops import MoeRouting, PlainOps

    ops, draw = PlainOps(), torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*shape, generator=draw) for shape in ((5, 8), (3, 6, 8)))
    weights, experts = ops.topk_softmax(torch.randn(5, 3, generator=draw), 2)
    out = x.new_empty(5, 2, 6)
    ops.moe_gemm(x, weight, out, MoeRouting(weights, experts, ops.moe_align(experts, 3, 4), 4), True)
    expected = torch.einsum("td,tkfd->tkf", x, weight[experts.long()]) * weights[..., None]
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("option", ["--prefill", "--decode", "--kv"])
def test_sizes_of_a_capture_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, option: str
) -> None:
    assert kda(monkeypatch, "llm", "capture", "tiny", tmp_path / "out", option, 100_000_000_000) == 2
    assert "Input should be less than or equal to" in capsys.readouterr().err


def test_what_does_not_fit_is_left_out_and_weights_that_do_not_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    torch = pytest.importorskip("torch")
    from kda_tools.llm.served_step import ServedStep

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pools = ServedStep.step

    def step(self: Any, batch: int, new: int, kv: int) -> Any:
        if batch == 9:
            torch.empty(1 << 60, dtype=torch.int8)
        return pools(self, batch, new, kv)

    monkeypatch.setattr(ServedStep, "step", step)
    words = ("llm", "capture", "tiny", tmp_path / "out", "--layers", 1, "--steps", 1)
    assert kda(monkeypatch, *words, "--decode", 9) == 0
    assert "decode-b9-kv32: out of memory: " in capsys.readouterr().out
    monkeypatch.setattr(ServedStep, "_weights", lambda *_: torch.empty(1 << 60, dtype=torch.int8))
    assert kda(monkeypatch, *words[:3], tmp_path / "other", *words[4:]) == 3
    assert re.search("tiny, 1 layers: out of memory: .*; take fewer --layers", capsys.readouterr().err)


def test_upstreams_kernels_import_and_its_grouped_gemm_takes_our_routing() -> None:
    pytest.importorskip("triton")
    pin = KNOWN.kernels.pin
    try:
        upstream.check_python(pin, "a capture")
        tree = upstream.fetch(pin, ROOT / "llm" / pin.files, upstream.cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(str(error).splitlines()[0])
    probe = Path(__file__).with_name("llm_kernel_probe.py")
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(probe), str(tree), pin.version]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    differences = [float(line) for line in done.stdout.split()]
    assert len(differences) == 3
    assert all(one <= 2e-3 for one in differences)  # one rounding of float16 near 2; NaN is what was not written


def test_what_a_task_or_upstream_covers_gets_no_card(tmp_path: Path) -> None:
    found = inventory.of_capture(captured(tmp_path / "capture"), *NOW)
    plain: dict[str, Any] = {"id": "a", "pattern": "norm", "kind": "norm"}
    covered = catalogue.CatalogueFile.model_validate_json(
        json.dumps({"entry": [{**plain, "fast": ["fused_add_rmsnorm"], "task": "l02_norm"}]})
    )
    has_it = [{"release": "sglang 0.5.23", "path": "a.py", "op": "fused"}]
    missed = catalogue.CatalogueFile.model_validate_json(
        json.dumps({"entry": [{**plain, "replaces": [{"operator": "^fused_add_rmsnorm$"}], "upstream": has_it}]})
    )
    untasked = catalogue.CatalogueFile.model_validate_json(
        json.dumps({"entry": [{**plain, "id": "b", "fast": ["fused_add_rmsnorm"], "upstream": has_it}]})
    )
    for entries, what in (
        (covered.entry, "covered by l02_norm"),
        ((*untasked.entry, *covered.entry), "covered by l02_norm"),
        (missed.entry, "no card, upstream has it: fused (sglang 0.5.23): every listed constraint holds"),
    ):
        made, lines = kernel_cards.cards(found, entries, LIMITS, 0.01)
        assert not made
        assert {one.name: one.what for one in lines}["fused_add_rmsnorm"] == what
