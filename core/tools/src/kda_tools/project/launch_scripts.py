"""Write the launch scripts, `FAMILY/scripts/launch_kernels/`: a short file per task and target calls one launcher."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kda_judge.contract.tasks import NUMBER, Task

FOLDER = Path("scripts") / "launch_kernels"
"""Folder of the launch scripts in a family's folder."""
LAUNCHER = Path("core") / "tools" / "launch_kernel.sh"
SCRIPT = """\
#!/usr/bin/env bash
# Launch an agent on {op} for {target}. Written by `kda publish`; docs/campaigns.md says what it does and reads.
exec "${{KDA_BASH_BIN:-bash}}" "$(dirname -- "${{BASH_SOURCE[0]}}")/{launcher}" {op} {target} "$@"
"""


def expected_scripts(task: Task) -> dict[Path, str]:
    """Path -> text of a task's launch scripts, one for each target of its config."""
    number = NUMBER.match(task.folder)
    folder = task.path.parent / FOLDER
    up = "/".join([".."] * (len(FOLDER.parts) + 1))
    return {
        folder / f"{number[0] if number else ''}{target}_{task.op}.sh": SCRIPT.format(
            op=task.op, target=target, launcher=f"{up}/{LAUNCHER.as_posix()}"
        )
        for target in task.config.targets
    }


def differing(task: Task) -> dict[Path, str]:
    """Path -> text of the scripts that are missing or differ; empty if the checkout has no launcher."""
    if not (task.path.parent.parent / LAUNCHER).is_file():
        return {}
    return {
        path: text
        for path, text in expected_scripts(task).items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    }


def write(task: Task) -> list[Path]:
    """Write the scripts that are missing or differ; returns their paths."""
    changed = differing(task)
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    return list(changed)


def publish(tasks: Iterable[Task], check: bool) -> list[str]:
    """Write the scripts of these tasks, or with `check` report those that are missing or differ."""
    if check:
        return [line for task in tasks for line in problems(task)]
    return [str(path) for task in tasks for path in write(task)]


def problems(task: Task) -> list[str]:
    """One line for each script that is missing or differs."""
    return [f"{path}: not the launch script of {task.op}; run `kda publish`" for path in differing(task)]
