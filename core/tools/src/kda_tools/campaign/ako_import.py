"""`kda campaign ako import`: copy the best version of an AKO4ALL run into the task's solution, and record its log.

The numbers of the log are claims of its agent. So its iterations are neither kept nor reverted here, but `claimed`.
"""

from __future__ import annotations

import hashlib
import math
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import read_json
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import provenance
from kda_tools.campaign.allowed import protected_hashes
from kda_tools.campaign.events import Claimed, Launched
from kda_tools.campaign.journal import COPY, Journal
from kda_tools.campaign.place import Campaign, campaign_of, name_of
from kda_tools.campaign.repository import Repository, as_utf8
from kda_tools.campaign.rules import read_rules
from kda_tools.port.ako_export import MARK, Exported, package_name
from kda_tools.project.export.sources import VENDORED
from kda_tools.project.export.write import write_texts

ROW = re.compile(r"^\|\s*(\d+)\s*\|([^|]*)\|([^|]*)\|([^|]*)\|([^|]*)\|\s*$")
FIELD = re.compile(r"^- \*\*(Hypothesis|Changes|Analysis|Next):\*\*\s*(.*)$")
SECTION = re.compile(r"^### Iter (\d+)\b")
IMPROVED = "improved"


AGENT = "AKO4ALL"


def bring_back(task: Task, folder: Path) -> list[Claimed]:
    """Replace the task's solution by the best version, and record all iterations as claims.

    In the worktree of a campaign they are added to its record; elsewhere they are a campaign of their own in the task's
    `docs/iterations.jsonl`.

    Raises:
        UsageError: the folder is no export of this task and its present solution, shared code was changed, the log
            does not parse, the best iteration has no commit, or another command writes to the campaign. Nothing is
            written then.
    """
    campaign = _campaign(task)
    with campaign.alone() if campaign else nullcontext():
        return _bring_back(task, folder, campaign)


def _bring_back(task: Task, folder: Path, campaign: Campaign | None) -> list[Claimed]:
    mark = _mark(task, folder)
    log_file = folder / "ITERATIONS.md"
    if not log_file.is_file():
        raise UsageError(f"{log_file}: expected AKO4ALL's log, got no file")
    found = iterations(log_file.read_text(encoding="utf-8"), log_file)
    improved = [one for one in found if one.status == IMPROVED and one.speedup is not None]
    best = max(improved, key=lambda one: one.speedup or 0.0, default=None)
    commits, texts = _commits(folder), None
    if best is not None:
        if best.iteration not in commits:
            raise UsageError(
                f"{folder}: expected a commit '[iter {best.iteration}] ...', the best iteration of ITERATIONS.md, "
                "found none"
            )
        texts = _version(task, folder, commits[best.iteration], mark)
        _demand_committed(task)
    own = (f"solution/{package_name(task)}", f":!solution/{package_name(task)}/{VENDORED}")
    made = [
        one.model_copy(
            update={
                "commit": commits[one.iteration],
                "patch": as_utf8(_git(folder, "show", "--format=", "--no-color", commits[one.iteration], "--", *own)),
                "taken": one is best,
            }
        )
        if one.iteration in commits
        else one
        for one in found
    ]
    _record(task, mark, made, campaign)
    if texts is not None:
        _replace(task, texts)
    return made


def _campaign(task: Task) -> Campaign | None:
    """The campaign whose worktree this is; None elsewhere."""
    repository = Repository((checkout_root() or task.path).resolve())
    name = campaign_of(repository)
    return Campaign(name, Task(task.path.resolve()), repository) if name else None


def _record(task: Task, mark: Exported, made: Sequence[Claimed], campaign: Campaign | None) -> None:
    if campaign is not None:
        for one in made:
            campaign.journal.append(one)
        campaign.sync(campaign.state())
        return
    journal = Journal(task.path / "docs" / COPY, name_of(task, "ako"), task.op)
    first = Launched(
        target=next(iter(task.config.targets), ""),
        agent=AGENT,
        base=mark.commit,
        base_branch="",
        rules=read_rules(task),
        hashes=protected_hashes(task),
        warnings=(),
        confined=False,
    )
    journal.append(first)
    for one in made:
        journal.append(one)


def iterations(text: str, where: Path) -> list[Claimed]:
    """The iterations in ITERATIONS.md: each is a row of the table, with the section of the same number.

    Raises:
        UsageError: a section has no row, an iteration has two rows, or a number is invalid.
    """
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    sections: dict[int, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        if section := SECTION.match(line):
            current = sections.setdefault(int(section[1]), {})
        elif field := FIELD.match(line):
            current[field[1].lower()] = field[2]
    found: dict[int, Claimed] = {}
    for line in text.splitlines():
        if (row := ROW.match(line)) is None:
            continue
        number, words = int(row[1]), sections.get(int(row[1]), {})
        if number < 1:
            raise UsageError(f"{where}: iteration {number}: expected numbers from 1 on in the table")
        if number in found:
            raise UsageError(f"{where}: iteration {number} has two rows in the table; expected one")
        found[number] = Claimed(
            iteration=number,
            title=row[2].strip(),
            speedup=_number(row[3], where, number, "Speedup"),
            runtime_ms=_number(row[4], where, number, "Runtime (ms)"),
            status=row[5].strip().lower(),
            hypothesis=words.get("hypothesis", ""),
            changes=words.get("changes", ""),
            analysis=words.get("analysis", ""),
        )
    if lost := sorted(set(sections) - set(found)):
        raise UsageError(f"{where}: iteration {lost[0]} has a section and no row in the table; add its row")
    return [found[number] for number in sorted(found)]


def _number(cell: str, where: Path, iteration: int, column: str) -> float | None:
    text = cell.strip().removesuffix("x").removesuffix("\N{MULTIPLICATION SIGN}").strip()
    if text in ("", "-", "—", "N/A", "n/a"):
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"{where}: iteration {iteration}, {column}: expected a number or -, got {cell.strip()!r}")
    return number


def _mark(task: Task, folder: Path) -> Exported:
    path = folder / MARK
    if not path.is_file():
        raise UsageError(f"{path}: expected what `kda campaign ako export` wrote, got no file")
    mark = read_json(Exported, path)
    if mark.task != task.folder:
        raise UsageError(f"{path}: an export of {mark.task}, expected {task.folder}")
    if not re.fullmatch(r"[0-9a-f]{40}", mark.commit):
        raise UsageError(f"{path}: key 'commit': expected the commit of the export, got {mark.commit!r}: export again")
    if mark.solution != provenance.hashes(task)["solution"]:
        raise UsageError(
            f"{task.path / 'solution'}: changed since it was exported (commit {mark.commit[:12]}); bring the run back "
            "on a branch of that commit, and merge that"
        )
    return mark


def _git(folder: Path, *arguments: str) -> str:
    ran = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False)
    if ran.returncode:
        raise UsageError(f"{folder}: git {arguments[0]}: {ran.stderr.decode(errors='replace').strip()}")
    return ran.stdout.decode(errors="surrogateescape")


def _commits(folder: Path) -> dict[int, str]:
    """Iteration -> its last commit, found by the commit's subject."""
    found: dict[int, str] = {}
    for line in _git(folder, "log", "--format=%H %s").splitlines():
        commit, _, subject = line.partition(" ")
        if (number := re.match(r"\[iter (\d+)\]", subject)) is not None:
            found.setdefault(int(number[1]), commit)
    return found


def _version(task: Task, folder: Path, commit: str, mark: Exported) -> dict[str, str]:
    """The solution's files at a commit, with their imports of the runtime as a task writes them."""
    begin = f"solution/{package_name(task)}/"
    names = _git(folder, "ls-tree", "-r", "--name-only", commit, "--", begin).splitlines()
    texts = {name.removeprefix(begin): _git(folder, "show", f"{commit}:{name}") for name in names}
    if bad := [name for name, text in texts.items() if text != as_utf8(text)]:
        raise UsageError(f"{folder}: {begin}{bad[0]} at {commit[:12]}: expected text in UTF-8")
    if "__init__.py" not in texts:
        raise UsageError(f"{folder}: {begin}__init__.py: not there at {commit[:12]}")
    shared = {name: text for name, text in texts.items() if name.startswith(f"{VENDORED}/")}
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in shared.items()}
    if changed := sorted(
        name for name in hashes.keys() | mark.library.keys() if hashes.get(name) != mark.library.get(name)
    ):
        raise UsageError(
            f"{folder}: {begin}{changed[0]} at {commit[:12]}: shared code was changed, which is not a task's; take "
            "that change out, or bring it to core/runtime by hand first"
        )
    own = {name: text for name, text in texts.items() if name not in shared}
    return {name: _absolute(text) if name.endswith(".py") else text for name, text in own.items()}


def _absolute(text: str) -> str:
    """`from ._kda.op import` -> `from kda_runtime.op import`, at any depth."""
    return re.sub(rf"^(\s*from )\.+{VENDORED}(?=[. ])", r"\1kda_runtime", text, flags=re.MULTILINE)


def _demand_committed(task: Task) -> None:
    folder = task.path / "solution"
    if (root := checkout_root()) is not None and _git(root, "status", "--porcelain", "--", str(folder)).strip():
        raise UsageError(f"{folder}: has changes that are not committed; commit or stash them first")


def _replace(task: Task, texts: Mapping[str, str]) -> None:
    folder = task.path / "solution"
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.relative_to(folder).as_posix() not in texts:
            path.unlink()
    write_texts(folder, texts)
