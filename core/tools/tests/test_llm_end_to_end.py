"""`kda llm` with nothing faked but the GPU: a real server with a tiny model, real guidellm, over loopback.

What both need is in an environment of its own (`nox -s llm-tools`); where it is absent the test is skipped, as in
`nox -s tests`. The session `llm` makes it and runs this file alone.
"""

import os
import signal
import socket
import subprocess
import sys
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
pytestmark = pytest.mark.skipif(engines.tools_bin() is None, reason="no .nox/llm; nox -s llm-tools makes it")


def kda(*words: object, code: int = 0) -> str:
    done = subprocess.run([*KDA, *map(str, words)], capture_output=True, text=True, check=False, timeout=200)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    return said


@contextmanager
def serving() -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """`kda llm serve`, ready, and ended by SIGTERM."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*KDA, "serve", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            heard = []
            for line in server.stdout:
                heard.append(line)
                if line.startswith("ready: "):
                    break
            assert heard, "the server said nothing"
            assert heard[-1] == f"ready: http://127.0.0.1:{port}\n", "".join(heard)
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.terminate()
            server.communicate(timeout=30)


def engine_of(server: "subprocess.Popen[str]") -> int:
    """The process that `kda llm serve` started."""
    (child,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return int(child)


def test_from_a_server_to_cards(tmp_path: Path) -> None:
    # a load that comes through, one of a wrong model, one whose server dies meanwhile
    few = ("--requests", 8, "--input-tokens", 32, "--output-tokens", 8)
    with serving() as (url, server):
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
        engine = engine_of(server)
        at_work(engine)
        os.kill(engine, signal.SIGKILL)
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
    kda("inventory", captured(tmp_path / "gpu"), "--out", tmp_path / "gpu.json")
    assert "1 card in" in kda("cards", tmp_path / "gpu.json", tmp_path / "cards")
    (card,) = (tmp_path / "cards").iterdir()
    assert cards.read(card).operator == "fused_add_rmsnorm"


def at_work(engine: int) -> None:
    """Wait until the engine has worked on the load for a second of processor time."""
    import time

    def spent() -> float:
        fields = Path(f"/proc/{engine}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    begun, end = spent(), time.monotonic() + READY_S
    while spent() < begun + 1 and time.monotonic() < end:
        time.sleep(0.05)
    assert spent() >= begun + 1, "the load did not reach the server"
