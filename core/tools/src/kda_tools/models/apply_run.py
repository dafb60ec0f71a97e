"""Run a command with solutions in place of upstream's functions, and report which calls they took."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_tools.models.apply_counts import Counted, Gathered, gather
from kda_tools.models.apply_hook import APPLIED, COUNTS


class Calls(BaseModel):
    """How the calls of one function ended, summed over all processes."""

    function: str
    replaced: bool
    """Whether its module was imported and it could be replaced."""
    taken: int = 0
    """Calls by the solution's kernels."""
    compiled: int = 0
    """The same inside graphs of torch.compile. Replays of CUDA graphs are not counted."""
    fell_back: dict[str, int] = {}
    """Why -> calls that upstream's own function took."""
    plain: dict[str, int] = {}
    """Why -> calls inside graphs of torch.compile that the solution's plain PyTorch path took."""
    left: list[str] = []
    """Why it could not be replaced."""


class Report(BaseModel):
    """What `kda apply` says at exit."""

    command: list[str]
    exit_code: int
    """The command's exit code; 128 plus the signal's number if a signal ended it."""
    form: str
    releases: list[str]
    """Versions of the framework that its processes imported."""
    refused: list[str]
    """Versions that are not known."""
    processes: int
    functions: list[Calls]


def found_command(command: Sequence[str]) -> list[str]:
    """The command with the path of its program.

    Raises:
        UsageError: there is no such program.
    """
    if not command:
        raise UsageError("expected a command after `--`, for example `kda apply -- sglang generate ...`, got none")
    if (program := shutil.which(command[0])) is None:
        raise UsageError(f"{command[0]}: expected a program, on PATH or by its path, got none that can be run")
    return [program, *command[1:]]


def run(
    command: Sequence[str],
    site: Path,
    counts: Path,
    functions: Mapping[str, Sequence[str]],
    form: str,
    extra: Mapping[str, str],
) -> Report:
    """Run the command to its end with `site` on its PYTHONPATH; it uses this process's input and output.

    `extra` holds more environment variables. `counts` is an empty folder. `functions`: release -> the plan's functions.
    """
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, **extra, "PYTHONPATH": path, COUNTS: str(counts)}
    names = dict.fromkeys(name for some in functions.values() for name in some)
    env[APPLIED] = f"{form}: {', '.join(names)}"
    with subprocess.Popen(command, env=env) as child:
        code = _wait(child)
    return report(gather(counts), list(command), code if code >= 0 else 128 - code, functions, form)


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Its exit code. Ctrl-C reaches it without us; SIGTERM is passed on; both leave time for the report."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, lambda *_: None),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: child.terminate()),
    }
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(found: Gathered, command: list[str], code: int, functions: Mapping[str, Sequence[str]], form: str) -> Report:
    """The counters by function, of the releases that were imported."""
    releases = sorted({event["version"] for event in found.events_named("began")})
    names = dict.fromkeys(name for release in releases for name in functions[release])
    replaced = {event["function"] for event in found.events_named("replaced")}
    calls = {name: Calls(function=name, replaced=name in replaced) for name in names}
    for event in found.events_named("left"):
        reasons = calls[event["function"]].left
        reasons.extend({event["reason"]} - set(reasons))
    for counted, number in found.calls.items():
        _add(calls[counted.function], counted, number)
    return Report(
        command=command,
        exit_code=code,
        form=form,
        releases=releases,
        refused=sorted({event["version"] for event in found.events_named("refused")}),
        processes=found.processes,
        functions=list(calls.values()),
    )


def _add(calls: Calls, counted: Counted, number: int) -> None:
    match counted.outcome:
        case "taken":
            calls.taken += number
        case "compiled":
            calls.compiled += number
        case "fell_back" | "plain" as outcome:
            reasons = getattr(calls, outcome)
            reasons[counted.reason] = reasons.get(counted.reason, 0) + number
        case other:
            raise AssertionError(other)


def demand_applied(done: Report, known: Sequence[str]) -> None:
    """Raise an error if nothing could be replaced in this run.

    Raises:
        MissingRequirement: the release is not known, or the command succeeded but never imported the framework.
    """
    if done.refused:
        raise MissingRequirement(
            f"sglang {', '.join(done.refused)}: expected {' or '.join(known)}; install one of these"
        )
    if not done.releases and done.exit_code == 0:
        raise MissingRequirement(
            "no process of the command imported sglang with the hook: nothing was replaced. A Python that is started "
            "with -I or -E ignores PYTHONPATH, and so does one whose environment is set afresh"
        )


def lines(done: Report) -> list[str]:
    """The report as text."""
    release = f"sglang {', '.join(done.releases)}" if done.releases else "no sglang imported"
    out = [f"kda apply: {release}, {done.form} form, {done.processes} process{'es'[: 2 * (done.processes != 1)]}"]
    if done.releases and not any(calls.taken or calls.compiled for calls in done.functions):
        out.append("  no call was taken: this run is SGLang's own")
    for calls in done.functions:
        fell = Counter(calls.fell_back)
        if not calls.replaced and not calls.left:
            out.append(f"  {calls.function}: its module was not imported")
            continue
        compiled = f" and {calls.compiled} in compiled graphs" if calls.compiled else ""
        out.append(f"  {calls.function}: {calls.taken} calls taken{compiled}, {fell.total()} fell back to upstream")
        out += [f"    not replaced: {reason}" for reason in calls.left]
        out += [f"    {number} fell back: {reason}" for reason, number in fell.most_common()]
        out += [
            f"    {number} took the plain PyTorch path in a compiled graph: {reason}"
            for reason, number in Counter(calls.plain).most_common()
        ]
    return out
