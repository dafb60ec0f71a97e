"""Run an engine until it ends or is stopped, and report when it is ready."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable, Sequence

from kda_judge.contract.errors import ArmFailed, MissingRequirement
from kda_tools.llm import server_client
from kda_tools.models.denoise_run import end_process_group

READY_S = 3600.0
"""Seconds for an engine to get ready, which may load a large model from the Hub."""


def demand_free(host: str, port: int) -> None:
    """Refuse a port that is in use, or that this user may not open.

    Raises:
        MissingRequirement: says which.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise MissingRequirement(
                f"--port {port}: expected a free port of {host}, got: {error.strerror}; choose another one"
            ) from None


def run(command: Sequence[str], env: dict[str, str], url: str, report: Callable[[str], None]) -> int:
    """Start the engine, say when it answers, and wait for its end; Ctrl-C and SIGTERM end it with all its processes.

    Raises:
        ArmFailed: it ended before it answered.
    """
    with subprocess.Popen(command, env=env, start_new_session=True) as engine:
        try:
            ended = server_client.wait_until(lambda: engine.poll() is not None or server_client.alive(url), READY_S)
            if engine.poll() is not None or not ended:
                code = engine.poll()
                raise ArmFailed(
                    f"{command[0]}: it ended with exit code {code} before {url}/health answered; what it said is above"
                    if ended
                    else f"{command[0]}: {url}/health did not answer within {READY_S:.0f} s"
                )
            report(f"ready: {url}")
            return engine.wait()
        except KeyboardInterrupt:
            report("ending the server")
            return 0
        finally:
            end_process_group(engine)
