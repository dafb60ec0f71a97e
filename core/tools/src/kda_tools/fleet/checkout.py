"""Bring the checkout to the nodes of a cluster.

The commit and the pinned wheels are one archive, which Ray sends to every node once. On this machine nothing is sent.
"""

from __future__ import annotations

import subprocess
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kda_judge.arms.upstream import cache_folder, obtain
from kda_judge.contract.config import Pin
from kda_judge.contract.errors import UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import checkout_root
from kda_judge.evidence import provenance

SOURCES = ("core/runtime/src", "core/judge/src", "core/tools/src")
"""Source folders of the checkout, which go on the import path of the processes that run from it."""
WHEELS = Path(".cache") / "upstream" / "wheels"
"""Where a checkout keeps the pinned wheels."""


@dataclass(frozen=True)
class Baggage:
    """What the actors are started with."""

    environment: dict[str, str]
    """Environment variables of the processes that the actors start."""
    sources: tuple[str, ...] = ()
    """Folders of the archive that go on the import path; empty if the checkout is used in place."""
    archive: Path | None = None


def in_place() -> Baggage:
    """For workers on this machine: the checkout, or the installed packages, that run here."""
    root = checkout_root()
    environment = {"PYTHONPATH": import_path()} | ({"KDA_ROOT": str(root)} if root else {})
    return Baggage(environment)


def pack_checkout(folder: Path, pins: Iterable[Pin]) -> Baggage:
    """For workers anywhere: an archive in `folder` of the commit, with the wheels.

    Raises:
        UsageError: there is no checkout with a commit here, or it has changes: the nodes would run other code.
    """
    root = checkout_root()
    git = provenance.git_state(root)
    if root is None or git.commit == provenance.UNKNOWN_COMMIT or not (root / ".git").exists():
        raise UsageError("--address: expected to be started in a git checkout, whose commit goes to the nodes")
    if git.dirty:
        raise UsageError(f"--address: {root} has changes that are in no commit, and nodes get the commit: commit first")
    archive = folder / f"kda-{git.commit[:12]}.zip"
    command = ["git", "-C", str(root), "archive", "--format=zip", "-o", str(archive), git.commit]
    subprocess.run(command, check=True, capture_output=True)
    with zipfile.ZipFile(archive, "a", zipfile.ZIP_STORED) as packing:
        for pin in {pin.wheel: pin for pin in pins}.values():
            wheel = obtain(pin, cache_folder(root), offline=False)
            packing.write(wheel, str(WHEELS / wheel.name))
    environment = {
        provenance.COMMIT_VARIABLE: git.commit,
        provenance.DIRTY_VARIABLE: "0",
        "KDA_CACHE": "",  # the archive's own cache, not one that the node's environment names
        "PYTHONPATH": "",
    }
    return Baggage(environment, SOURCES, archive)
