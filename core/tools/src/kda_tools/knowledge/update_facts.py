"""Write the files of facts of every release that the tasks are pinned to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kda_judge.arms.upstream import cache_folder, check_wheel, obtain
from kda_judge.contract.config import Pin
from kda_judge.contract.tasks import Task
from kda_tools.knowledge.extract_ops import extract
from kda_tools.knowledge.op_facts import FACTS, to_toml


def pins(tasks: Iterable[Task]) -> dict[str, Pin]:
    """File of facts -> the pin, each wheel once."""
    found = {}
    for task in tasks:
        for pin in task.config.upstream.values():
            if pin.package == "sglang":
                found[f"{pin.package}-{pin.version}.toml"] = pin
    return found


def update(root: Path, tasks: Iterable[Task], check: bool, offline: bool) -> list[str]:
    """Write the files; returns those that changed, or with `check` those that differ from what the wheel gives.

    Raises:
        MissingRequirement: a wheel is not in the cache and cannot be downloaded.
    """
    changed = []
    for name, pin in sorted(pins(tasks).items()):
        wheel = obtain(pin, cache_folder(root), offline=offline)
        check_wheel(wheel, pin)
        text, path = to_toml(extract(wheel, pin.package, pin.version)), root / FACTS / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        changed.append(f"{path}: is not what the wheel gives; run `kda catalogue update`" if check else str(path))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8", newline="\n")
    return changed
