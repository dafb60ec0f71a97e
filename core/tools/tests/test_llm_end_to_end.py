"""`kda llm` with nothing faked but the GPU: a real server with a tiny model, real guidellm, over loopback.

What both need is in an environment of its own (`nox -s llm-tools`); where it is absent the test is skipped, as in
`nox -s tests`. The session `llm` makes it and runs this file alone.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from core.tools.tests.test_llm import captured
from kda_tools.llm import engines
from kda_tools.llm.load_record import LoadRecord
from kda_tools.traces import cards

KDA = (sys.executable, "-m", "kda_tools", "llm")
READY_S = 120
RECEIVED = "[Request received]"
"""What `transformers serve` says of each request."""
pytestmark = [
    pytest.mark.skipif(engines.tools_bin() is None, reason="no .nox/llm; nox -s llm-tools makes it"),
    pytest.mark.timeout(900),  # three servers' worth of imports, on a machine that may be busy
]


def kda(*words: object, code: int = 0) -> str:
    done = subprocess.run([*KDA, *map(str, words)], capture_output=True, text=True, check=False, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


@contextmanager
def serving(log: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`kda llm serve`, ready, and ended by SIGTERM; what it says goes to a file, as a pipe would fill."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*KDA, "serve", "--port", str(port)]
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True) as server:
        try:
            wait(log, f"ready: http://127.0.0.1:{port}\n", 1)
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.terminate()
            server.wait(30)


def wait(log: Path, text: str, times: int) -> None:
    """Until the log has the text so many times."""
    end = time.monotonic() + READY_S
    while (said := log.read_text(errors="replace")).count(text) < times:
        assert time.monotonic() < end, said[-2000:]
        time.sleep(0.05)


def engine_of(server: "subprocess.Popen[str]") -> int:
    """The process that `kda llm serve` started."""
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return int(child)


def test_from_a_server_to_cards(tmp_path: Path) -> None:
    # a load that comes through, one of a wrong model, one whose server dies meanwhile
    few = ("--requests", 8, "--input-tokens", 32, "--output-tokens", 8)
    log = tmp_path / "server.log"
    with serving(log) as (url, server):
        said = kda("bench", url, "--load", "mid", *few, "--json", tmp_path / "load.json")
        assert "8 of 8 requests succeeded, 0 failed" in said
        assert "there is no GPU" in said
        assert "HTTP 400" in kda("bench", url, "--model", "nope/x", *few, code=3)
        long = ("--requests", 300, "--input-tokens", 32, "--output-tokens", 8)
        load = subprocess.Popen(
            [*KDA, "bench", url, "--load", "low", *map(str, long), "--json", str(tmp_path / "died.json")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait(log, RECEIVED, log.read_text().count(RECEIVED) + 40)
        os.kill(engine_of(server), signal.SIGKILL)
        said, _ = load.communicate(timeout=150)
        assert load.returncode == 5, said
        assert "the server died: a partial record" in said
    record = LoadRecord.model_validate_json((tmp_path / "load.json").read_bytes())
    assert [one.output_tokens for one in record.succeeded] == [8] * 8
    assert not record.partial
    died = LoadRecord.model_validate_json((tmp_path / "died.json").read_bytes())
    assert died.died
    assert died.succeeded, "what had come back is kept"
    assert died.errored

    # capture, inventory and cards of a machine without a GPU, then of a trace with GPU events
    said = kda("capture", "tiny-moe", tmp_path / "capture")
    assert "without a GPU nothing was timed" in said
    kda("inventory", tmp_path / "capture", "--out", tmp_path / "cpu.json")
    assert "nothing was timed" in kda("cards", tmp_path / "cpu.json", tmp_path / "none", code=2)
    assert not (tmp_path / "none").exists()
    traced = captured(tmp_path / "gpu")
    kda("inventory", traced, "--out", tmp_path / "gpu.json")
    assert "covered by l02_fused_add_rmsnorm" in kda("cards", tmp_path / "gpu.json", tmp_path / "solved")
    for file in traced.iterdir():  # the same kernel, by a name that no task has
        file.write_text(file.read_text().replace("fused_add_rmsnorm", "sum_then_scale"))
    kda("inventory", traced, "--out", tmp_path / "new.json")
    assert "1 card in" in kda("cards", tmp_path / "new.json", tmp_path / "cards")
    (card,) = (tmp_path / "cards").iterdir()
    assert cards.read(card).operator == "sum_then_scale"
