"""Run `sglang generate` several times with the same settings, and fail if the transformer is not SGLang's own.

A run fails if its log holds one of `STOPS` or lacks the line that says which transformer was loaded, or if it writes no
dump or no picture. No number of a failed run is kept: its folder holds only the log.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import ArmFailed, UsageError
from kda_tools.models import denoise_presets
from kda_tools.models.apply_hook import APPLIED
from kda_tools.models.perf_dumps import RECORD, Run, Settings, read_dump, sha256

STOPS = (
    # of the pipeline
    "falling back to diffusers backend",
    "using diffusers backend",
    "loaded diffusers pipeline",
    # of one component
    "falling back to native version",
    "doesn't have a customized version yet, using native version",
    # a generation that failed may end with exit code 0
    "generation failed:",
)
"""Phrases in SGLang's log, in lower case, that make a run fail."""
NATIVE = re.compile(r"native component .*: .* is loaded")
LOADED = re.compile(r"loaded transformer\S*: \S+ \(sgl-diffusion version\)")
"""The proof that the transformer is SGLang's own."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
LOG = "log.txt"
GRACE_S = 20
"""Seconds to wait for a command to end after SIGTERM, and again after SIGKILL."""
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")


@dataclass(frozen=True)
class Plan:
    """One run that is going to be made."""

    program: str
    """The command `sglang`."""
    settings: Settings
    label: str
    out: Path
    repeats: int
    environment: dict[str, str]
    """Variables beside those of this process."""

    @property
    def folder(self) -> Path:
        """Where the run will be."""
        return self.out / f"{self.settings.preset}-{self.label}"


def make(plan: Plan, report: Callable[[str], None]) -> Run:
    """Run every repeat, then write and return the record; `report` gets each log line as it comes.

    Raises:
        UsageError: the folder holds a run already.
        ArmFailed: SGLang failed or fell back; its dumps are gone, the log is kept.
    """
    folder = plan.folder
    if folder.exists() and any(path.name != LOG for path in folder.iterdir()):
        raise UsageError(f"{folder}: expected a new folder: choose another --label, nothing recorded is replaced")
    folder.mkdir(parents=True, exist_ok=True)
    with _discarding(folder):
        dumps = {}
        for number in range(plan.repeats):
            name = f"dump-{number}.json"
            _repeat(plan, number, folder / name, report)
            dumps[name] = sha256(folder / name)
        run = Run(
            label=plan.label,
            time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            applied=os.environ.get(APPLIED),
            settings=plan.settings,
            dumps=dumps,
            proof=next(path.name for path in folder.glob("proof.*")),
        )
        (folder / RECORD).write_text(run.model_dump_json(indent=1) + "\n", encoding="utf-8")
    return run


@contextmanager
def _discarding(folder: Path) -> Iterator[None]:
    """If the block ends by an exception, remove everything but the log from the folder."""
    try:
        yield
    except BaseException:
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOG:
                path.unlink()
        raise


def _repeat(plan: Plan, number: int, dump: Path, report: Callable[[str], None]) -> None:
    """One process of SGLang; the first one's picture is kept."""
    folder, settings = plan.folder, plan.settings
    pictures = folder / "pictures"
    pictures.mkdir()
    command = [plan.program, "generate"]
    command += denoise_presets.arguments(settings.values, settings.choice, settings.release)
    command += denoise_presets.write_config(settings.values, folder)
    command += [f"--perf-dump-path={dump}", f"--output-path={pictures}"]
    lines, code = _watched(command, environment(plan), folder / LOG, report)
    where = f"{settings.preset}, repeat {number + 1} of {plan.repeats}, {folder / LOG}"
    if code:
        raise ArmFailed(f"{where}: sglang ended with exit code {code}; no number of this run is kept")
    if settings.values.says_what_it_loaded and not any(LOADED.search(line.lower()) for line in lines):
        raise ArmFailed(
            f"{where}: expected a line 'Loaded transformer: ... (sgl-diffusion version)', got none; no number of this "
            "run is kept"
        )
    if not dump.is_file():
        raise ArmFailed(f"{where}: sglang wrote no perf dump; no number of this run is kept")
    try:
        written = read_dump(dump)
    except UsageError as error:
        raise ArmFailed(f"{where}: {error}; no number of this run is kept") from None
    if written.commit_hash != settings.commit:
        raise ArmFailed(f"{where}: expected a dump of {settings.commit}, got {written.commit_hash}")
    made = sorted(path for path in pictures.rglob("*") if path.is_file() and path.stat().st_size)
    if not made:
        raise ArmFailed(f"{where}: sglang wrote no image and no clip; no number of this run is kept")
    if not number:
        made[0].replace(folder / f"proof{made[0].suffix}")
    shutil.rmtree(pictures)
    (folder / "config.json").unlink(missing_ok=True)


def environment(plan: Plan) -> dict[str, str]:
    """SGLang's environment: Hub tokens only for gated models, and the Hub offline if the model is a local folder."""
    values, choice = plan.settings.values, plan.settings.choice
    local = denoise_presets.is_local(choice.model_path or values.model)
    kept = {name: value for name, value in os.environ.items() if name not in SECRETS or (values.gated and not local)}
    kept |= plan.environment | {"SGLANG_GIT_COMMIT": plan.settings.commit}
    kept |= {"HF_HUB_OFFLINE": "1"} if local else {}
    kept["SGLANG_DIFFUSION_SYNC_STAGE_PROFILING"] = "1" if choice.sync_steps else "0"
    return kept


def _watched(
    command: Sequence[str], env: dict[str, str], log: Path, report: Callable[[str], None]
) -> tuple[list[str], int]:
    """Run the command; returns its printed lines and its exit code. Tokens are hidden; the lines go to the log too.

    Raises:
        ArmFailed: a line holds one of `STOPS` or names a native component; the command is ended.
    """
    secrets = [env[name] for name in SECRETS if env.get(name)]
    lines = []
    with (
        log.open("a", encoding="utf-8") as kept,
        subprocess.Popen(
            command,
            env=env,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as child,
    ):
        assert child.stdout is not None
        try:
            for raw in child.stdout:
                line = COLOURS.sub("", raw.rstrip("\n"))
                for secret in secrets:
                    line = line.replace(secret, "***")
                lines.append(line)
                kept.write(line + "\n")
                report(line)
                if stop := fault_in(line):
                    raise ArmFailed(f"{log}: SGLang said {stop!r}; no number of this run is kept")
        except BaseException:
            end_process_group(child)
            raise
    return lines, child.returncode


def end_process_group(child: subprocess.Popen[Any]) -> None:
    """End the command and its workers: they are one process group and hold the GPU."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)


def fault_in(line: str) -> str | None:
    """The phrase in the line that shows a failure or code other than SGLang's own; None if there is none."""
    lower = line.lower()
    for phrase in STOPS:
        if phrase in lower:
            return phrase
    return found[0] if (found := NATIVE.search(lower)) else None
