"""Check a task's documents: leftovers of the task it was copied from, dead links, and the runs they quote."""

import json
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import median

from kda_judge.contract.strict_models import read_toml
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import ledger
from kda_tools.publish.read_once import once_per_task

LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
"""A relative Markdown link or picture."""
QUOTED = re.compile(r"\b(?:\d{8}T\d{6}Z-[0-9a-f]{6}|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)\b")
"""A quoted run (its id) or sweep (its time)."""
TIMED = re.compile(
    r"(?P<times>\d+\.\d+(?:(?:,| and|, and)\s+\d+\.\d+)*)\s+us\s+\(run\s+(?P<run>\d{8}T\d{6}Z-[0-9a-f]{6})\)"
)
"""Quoted times with the run that measured them: `2.03 and 2.06 us (run ID)`."""
COPIED = "of which this task is a copy (`kda new`)"
"""Words of the note that `kda new` puts into each file of a copy that still describes the source."""
EXAMPLE = 'models = ["example"]'
"""A line of the example rows that `kda new --template` writes."""
HOW_TO_WORK = "docs/work_on_a_task.md"
"""Path in the checkout of the page on what counts, what may be edited, commands and rules; cards do not repeat it."""
NOTED = ("prompt.md", "config.toml", "docs/dispatch.md")
"""The files into which `kda new` puts its note."""


def copied(task: Task) -> list[str]:
    """The files, relative to the task, that still have the note of a copy."""
    texts = ((name, task.path / name) for name in NOTED)
    return [name for name, path in texts if path.is_file() and COPIED in path.read_text(encoding="utf-8")]


@once_per_task
def leftovers(task: Task) -> list[str]:
    """Leftovers of the task that this one was copied from, one line each; a task with any is not published.

    `kda new` leaves only its notes. A plainly copied folder also has names and records of its source. The rows of a
    template are of a model that does not exist.
    """
    found = [f"{task.path / name}: the note of `kda new` still stands" for name in copied(task)]
    rows = task.path / "bench" / "workloads.toml"
    if rows.is_file() and EXAMPLE in rows.read_text(encoding="utf-8", errors="replace"):
        found.append(f"{rows}: rows of the template's model, {EXAMPLE}, still stand")
    return [*found, *_names(task), *foreign_records(task)]


def foreign_records(task: Task) -> list[str]:
    """Machine-written logs in `docs/` that hold records of another task."""
    found = []
    for path, ops in _logged(task):
        if named := set(ops) - {None, task.op}:
            others = ", ".join(sorted(filter(None, named)))
            found.append(f"{path}: holds records of {others}, not of {task.op}: delete it, then run `kda publish`")
    return found


def foreign_lines(task: Task) -> list[str]:
    """Lines of another task in a log that also has lines of this task (else the log came with a copied folder)."""
    return [
        f"{path}:{number}: it is of {op}, expected of {task.op} as others in this file: remove the line"
        for path, ops in _logged(task)
        for number, op in enumerate(ops, start=1)
        if op not in (None, task.op) and task.op in ops
    ]


def _logged(task: Task) -> Iterator[tuple[Path, list[str | None]]]:
    """Each log in `docs/`, and for each of its lines the task that the line is about."""
    for path in sorted(task.path.glob("docs/*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield path, [_task_of(line) for line in lines]


def _task_of(line: str) -> str | None:
    """The task that a line of a log names; None if it names none."""
    try:
        named = json.loads(line)["task"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return str(named)


def _names(task: Task) -> list[str]:
    """Names of the source that a copied folder still has."""
    found = []
    wanted = f"kda-{task.op.replace('_', '-')}"
    project = task.path / "pyproject.toml"
    name = read_toml(project).get("project", {}).get("name") if project.is_file() else wanted
    if name != wanted:
        found.append(f"{project}: key 'project.name': expected {wanted!r}, got {name!r}")
    card = task.path / "prompt.md"
    title = card.read_text(encoding="utf-8").partition("\n")[0] if card.is_file() else ""
    if title and not title.lower().startswith(f"# {task.op}:"):
        found.append(f"{card}:1: expected the title '# {task.op}: ...', got {title!r}")
    return found


def dead_links(task: Task) -> list[str]:
    """Relative links of the card and of `docs/` that lead nowhere, one line each; the site cannot be built with one.

    A task outside a checkout may still link to documents of the checkout; such links are not reported.
    """
    root = checkout_root()
    known = root if root is not None and task.path.resolve().is_relative_to(root.resolve()) else task.path
    return [
        f"{path}:{number}: link to {match['target']}: no such file"
        for path in _written(task)
        for number, match in _links(path.read_text(encoding="utf-8"))
        if not (found := path.parent / match["target"]).exists() and found.resolve().is_relative_to(known.resolve())
    ]


def unrecorded(task: Task) -> list[str]:
    """Runs, sweeps and times that the task's notes quote but that are in none of its records, one line each.

    Files with the note of a copy are left out: they describe the source.

    Raises:
        LedgerError: notes quote a time, and the ledger is broken.
    """
    records = "".join(path.read_text(encoding="utf-8") for path in sorted(task.path.glob("docs/*.jsonl")))
    foreign = {task.path / name for name in copied(task)}
    texts = {path: path.read_text(encoding="utf-8") for path in _written(task) if path not in foreign}
    found = [
        f"{path}:{number}: {name} is quoted, and no line of docs/*.jsonl has it"
        for path, text in texts.items()
        for number, name in quoted(text)
        if name not in records
    ]
    return found + [line for path, text in texts.items() for line in _unmeasured(task, path, text)]


def _unmeasured(task: Task, path: Path, text: str) -> Iterator[str]:
    """Times that a text quotes from a run in the ledger, but that are no median of any row, arm and metric of it."""
    matches = list(TIMED.finditer(text))
    runs = {record.run_id: record for record in ledger.read(task.ledger)} if matches else {}
    for match in matches:
        if match["run"] in runs:
            rows = runs[match["run"]].rows
            samples = (parts for row in rows for arm in row.arms.values() for parts in arm.samples.values())
            medians = [median(chain(*parts)) for parts in samples if any(parts)]
            number = text.count("\n", 0, match.start()) + 1
            for time in re.findall(r"[\d.]+", match["times"]):
                digits = len(time.partition(".")[2])
                if time not in {f"{us:.{digits}f}" for us in medians}:
                    yield f"{path}:{number}: {time} us is quoted, and no arm's median in run {match['run']} is that"


def quoted(text: str) -> Iterator[tuple[int, str]]:
    """Line number and name of every run and sweep that a text quotes."""
    for number, line in enumerate(text.splitlines(), start=1):
        yield from ((number, match[0]) for match in QUOTED.finditer(line))


def unlink(task: Task) -> None:
    """Replace every dead link by its text: a copy lacks its source's records, to which the notes may link."""
    for path in _written(task):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines(keepends=True)
        for number, match in reversed(list(_links(text))):
            if not (path.parent / match["target"]).exists():
                line = lines[number - 1]
                kept = line[match.start("text") : match.end("text")]
                lines[number - 1] = line[: match.start()] + kept + line[match.end() :]
        path.write_text("".join(lines), encoding="utf-8")


def _written(task: Task) -> list[Path]:
    return [path for path in (task.path / "prompt.md", *sorted(task.path.glob("docs/*.md"))) if path.is_file()]


def _links(text: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Line number and match (positions within the line) of every relative link outside code."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not line.startswith("    "):
            blanked = re.sub(r"`[^`]*`", lambda code: " " * len(code[0]), line)
            yield from ((number, match) for match in LINK.finditer(blanked))
