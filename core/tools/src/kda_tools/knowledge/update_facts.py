"""Write the files of facts of every release that the tasks are pinned to."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kda_judge.arms.upstream import cache_folder, check_wheel, obtain
from kda_judge.contract.config import Pin
from kda_judge.contract.tasks import Task
from kda_tools.knowledge.extract_ops import extract
from kda_tools.knowledge.op_facts import FACTS, to_toml
from kda_tools.publish.write_pages import write_pages


def pins(tasks: Iterable[Task]) -> dict[str, Pin]:
    """File of facts -> the pin, each wheel once."""
    found = {}
    for task in tasks:
        for pin in task.config.upstream.values():
            if pin.package == "sglang":
                found[f"{pin.package}-{pin.version}.toml"] = pin
    return found


def update(root: Path, tasks: Iterable[Task], check: bool, offline: bool) -> list[str]:
    """Write the files; returns those that changed, or with `check` those that differ, with the first differing line.

    Raises:
        MissingRequirement: a wheel is not in the cache and cannot be downloaded.
    """
    wanted = {}
    for name, pin in sorted(pins(tasks).items()):
        wheel = obtain(pin, cache_folder(root), offline=offline)
        check_wheel(wheel, pin)
        wanted[root / FACTS / name] = to_toml(extract(wheel, pin.package, pin.version))
    return write_pages(wanted, check, "kda catalogue update")
