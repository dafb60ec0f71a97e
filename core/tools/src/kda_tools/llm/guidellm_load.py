"""Run `kda llm bench`: load a server with guidellm, and make a record from guidellm's report.

guidellm ends with exit code 0 even if every request failed, so its report is read and its exit code is ignored.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import ArmFailed, UsageError
from kda_judge.contract.tasks import checkout_root
from kda_judge.evidence import gpu_state, provenance
from kda_tools.llm import engines, server_client
from kda_tools.llm.load_record import LoadRecord, RequestTimes

INSTALL = "nox -s llm-tools"
TAKES_IGNORE_EOS = ("sglang", "vllm")
"""Engines that continue after an end-of-sequence token on request; others reject a request with this key."""
REPORT_S = 300.0
"""Seconds beside the load for guidellm to start and to write its report."""
SHOWN_ERROR = 160
"""Most characters kept of the error text of a failed request."""


@dataclass(frozen=True)
class LoadPlan:
    """What the user asked for."""

    url: str
    model: str
    tokenizer: str
    """A folder, or a name on the Hub: what counts the tokens of random prompts."""
    load: str
    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    data: Path | None
    """A file of JSON lines, each with a key `prompt`; None: random tokens."""
    local: bool
    """Whether the Hub must not be asked."""
    timeout_s: float
    """Seconds after which the load ends; the record then holds only the requests done by that time."""
    command: str


def run(plan: LoadPlan, show: Callable[[str], None]) -> LoadRecord:
    """Load the server and return the record, which counts failed requests too.

    Raises:
        MissingRequirement: no server, an answer with an error, or guidellm is not installed.
        UsageError: a model that the server does not have, or a data file without prompts.
        ArmFailed: guidellm ended without a report, or did not end.
    """
    digest = None if plan.data is None else _checked(plan.data)
    program = engines.find_program("guidellm", INSTALL)
    server_client.demand_tokens(plan.url, plan.model)
    engine = server_client.owner(plan.url)
    git = provenance.git_state(checkout_root())
    begun, utc, run_id = time.monotonic(), provenance.utc(), provenance.run_id()
    with tempfile.TemporaryDirectory(prefix="kda-load-") as folder:
        report = Path(folder) / "report.json"
        words = [program, *arguments(plan, engine, report)]
        env = engines.environment(plan.local)
        show(f"loading {plan.url}: {plan.requests} requests, {plan.concurrency} at once, {plan.timeout_s:g} s at most")
        until_s = plan.timeout_s + REPORT_S
        try:
            ran = subprocess.run(
                words, env=env, cwd=folder, capture_output=True, text=True, check=False, timeout=until_s
            )
        except subprocess.TimeoutExpired:
            raise ArmFailed(f"guidellm: it was to end after {plan.timeout_s:g} s, and ran for {until_s:g} s") from None
        if not report.is_file():
            last = (ran.stderr.strip() or ran.stdout.strip() or "nothing").splitlines()[-1]
            gone = "" if server_client.alive(plan.url) else f"; {plan.url} answers no more"
            raise ArmFailed(f"guidellm ended with {ran.returncode} and without a report{gone}; it said: {last}")
        found = read_report(report)
    machine = provenance.host()
    return LoadRecord(
        run_id=run_id,
        utc=utc,
        seconds=round(time.monotonic() - begun, 1),
        command=plan.command,
        model=Path(plan.model).name if Path(plan.model).is_absolute() else plan.model,
        engine=engine,
        load=plan.load,
        concurrency=plan.concurrency,
        requests=plan.requests,
        data=f"random {plan.input_tokens}/{plan.output_tokens}" if plan.data is None else plan.data.name,
        data_sha256=digest,
        commit=git.commit,
        dirty=git.dirty,
        generator=f"guidellm {found.version}",
        cpu=machine.cpu,
        gpu=gpu_state.read_state(0).name if gpu_state.has_gpu() else None,
        errored=sum(found.errors.values()),
        incomplete=found.incomplete,
        errors=found.errors,
        died=not server_client.alive(plan.url),
        succeeded=found.succeeded,
    )


def arguments(plan: LoadPlan, engine: str, report: Path) -> list[str]:
    """What guidellm is called with."""
    backend = {
        "kind": "openai_http",
        "target": plan.url,
        "model": plan.model,
        "request_format": "/v1/completions",
        "max_tokens": plan.output_tokens,
    }
    data: dict[str, Any] = {"kind": "json_file", "path": str(plan.data and plan.data.absolute())}
    if plan.data is None:
        data = {"kind": "synthetic_text", "prompt_tokens": plan.input_tokens}
        if engine in TAKES_IGNORE_EOS:
            data["output_tokens"] = plan.output_tokens
    return [
        *("run", "--disable-console"),
        *("--backend", json.dumps(backend)),
        *("--tokenizer", json.dumps({"kind": "huggingface_auto", "model": plan.tokenizer})),
        *("--data", json.dumps(data)),
        *("--profile", "kind=concurrent", "--override", "profile.streams", str(plan.concurrency)),
        *("--constraint", f"kind=max_requests,count={plan.requests}"),
        *("--constraint", f"kind=max_duration,seconds={plan.timeout_s:g}"),
        *("--output", json.dumps({"kind": "json", "path": str(report)})),
    ]


@dataclass(frozen=True)
class Report:
    """The part of guidellm's report that is used."""

    version: str
    succeeded: tuple[RequestTimes, ...]
    errors: dict[str, int]
    incomplete: int


def read_report(path: Path) -> Report:
    """Read guidellm's JSON report.

    Raises:
        ArmFailed: it is not as version 0.8 writes it.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        benchmark = told["benchmarks"][0]
        requests = benchmark["requests"]
        sent = [one["info"]["timings"]["request_start"] for one in requests["successful"]]
        start = min(sent, default=0.0)
        errors = Counter(_error(one) for one in requests["errored"])
        totals = benchmark["scheduler_metrics"]["requests_made"]  # `request_totals` leaves out some of them
        if (totals["successful"], totals["errored"]) != (len(sent), errors.total()):
            raise ValueError(f"requests_made {totals} are not the requests that it lists")
        return Report(
            version=str(told["metadata"]["guidellm_version"]),
            succeeded=tuple(_times(one, start) for one in requests["successful"]),
            errors=dict(errors),
            incomplete=int(totals["incomplete"]),
        )
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ArmFailed(
            f"{path.name}: expected a report of guidellm 0.8, got {type(error).__name__}: {error}; install the release "
            f"that is pinned: {INSTALL}"
        ) from None


def _times(request: Mapping[str, Any], start: float) -> RequestTimes:
    timings = request["info"]["timings"]
    first, several = timings["first_token_iteration"], (timings["token_iterations"] or 0) > 1
    return RequestTimes(
        sent_s=max(timings["request_start"] - start, 0.0),
        first_token_s=first - start if first is not None and several else None,
        done_s=timings["request_end"] - start,
        output_tokens=int(request["output_metrics"]["text_tokens"] or 0),
    )


def _error(request: Mapping[str, Any]) -> str:
    """The error text of a failed request in one line, cut before details that differ between requests."""
    message = str(request["info"].get("error") or "no reason given").split("\\n")[0]
    return " ".join(message.split())[:SHOWN_ERROR]


def _checked(path: Path) -> str:
    """sha256 of a file of prompts.

    Raises:
        UsageError: a line that is no JSON object with a text `prompt`; names the line.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"--data {path}: expected `random` or a file of JSON lines, got: {error.strerror}") from None
    lines: Sequence[bytes] = content.splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            fits = isinstance(json.loads(line)["prompt"], str)
        except (ValueError, KeyError, TypeError):
            fits = False
        if not fits:
            raise UsageError(f'--data {path}:{number}: expected {{"prompt": "..."}}, got {line[:60]!r}')
    if not lines:
        raise UsageError(f"--data {path}: expected at least one line, got none")
    return hashlib.sha256(content).hexdigest()
