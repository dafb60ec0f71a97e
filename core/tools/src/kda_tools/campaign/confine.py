"""bwrap around an agent: the whole machine can be read, and only its campaign can be written."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from kda_tools.campaign.place import STATE_FOLDER, Campaign

PROGRAM = "bwrap"
BASE = ("--ro-bind", "/", "/", "--dev-bind", "/dev", "/dev", "--proc", "/proc", "--die-with-parent", "--unshare-pid")


def can_confine() -> bool:
    """Whether bwrap is installed and may make namespaces here."""
    if (program := shutil.which(PROGRAM)) is None:
        return False
    try:
        return subprocess.run([program, *BASE, "true"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def scratch(campaign: Campaign) -> Path:
    """Where the agent's temporary files and compilers' caches go; beside the worktree, and outside of every hash."""
    return campaign.repository.root.with_name(f"{campaign.name}.tmp")


def writable(campaign: Campaign) -> list[Path]:
    """Folders that a campaign writes to: worktree, scratch, and in git's folder objects, own branches and record."""
    common, private = campaign.repository.common, campaign.repository.private
    own = [common / "refs" / "heads" / "campaign" / campaign.name, common / "refs" / "kda" / campaign.name]
    logs = common / "logs" / "refs" / "heads" / "campaign" / campaign.name
    return [
        *(campaign.repository.root, scratch(campaign), common / "objects", private),
        *(*own, logs, common / STATE_FOLDER),
    ]


def environment(campaign: Campaign) -> dict[str, str]:
    """Environment variables that put temporary files and caches into `scratch`."""
    place = scratch(campaign)
    names = {"TMPDIR": "tmp", "TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    return {name: str(place / folder) for name, folder in names.items()}


def confined(start: Path, write_to: Iterable[Path], command: list[str], write_if_there: Iterable[str]) -> list[str]:
    """`command` from `start` on, in a namespace in which only `write_to` and `write_if_there` can be written.

    Missing folders of `write_to` are created.
    """
    folders = list(write_to)
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    own = [Path(name).expanduser() for name in write_if_there]
    paths = [str(path) for path in (*folders, *(path for path in own if path.exists()))]
    binds = [word for path in paths for word in ("--bind", path, path)]
    return [PROGRAM, *BASE, *binds, "--chdir", str(start), *command]
