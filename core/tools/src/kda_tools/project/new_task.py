"""`kda new`: copy a task folder under a new name, so that the copy can be validated, benched and listed unedited."""

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, find_tasks
from kda_runtime import tuned_table
from kda_tools import checkout_folder
from kda_tools.lab.tune import tuning_files as tune
from kda_tools.project import launch_scripts
from kda_tools.publish.generate import publish
from kda_tools.publish.task_notes import COPIED, unlink
from kda_tools.traces import cards
from kda_tools.traces.traced_rows import rows_text, with_shapes

IGNORED = shutil.ignore_patterns(
    *("__pycache__", "*.py[co]", ".*", "build", "dist", "*.egg-info", "*.so"),
    *("*.jsonl", "results.md", "rows.csv", "rows.json", "tuning.md", "tuning*.csv", "grid.md", "profile.md"),
    *("sanitize.md", "tried.md", "ports.md", "iterations.md", "baseline_source.md", "card.toml", "from_trace.toml"),
    *("*.svg", "*.png", "*.*-rep"),
)
"""What a copy must not inherit: caches, build outputs, results, and what is generated."""
NOTES = {
    "prompt.md": (
        "Say here what your op computes, for which shapes, and what is special; let config.toml, bench/ and the",
        "description in pyproject.toml say the same.",
    ),
    "config.toml": (
        "Set title, models, ops, pins, the tolerances with the reason of each, targets and [cpu] to what is yours, and",
        "leave targets out where you have none.",
    ),
    "docs/dispatch.md": ("Write down what holds for your kernels, and what you measured.",),
}
"""File of a copy that still describes its source -> what to do with it, in a note below the file's first line. While
a file has its note, the task cannot be published and is not on its family's map."""
LETTERS = {"llm": "l"}
"""Family -> first letter of its task folders, used if the family has no task yet; the default is k."""
RESERVED = frozenset({"core", "docs", "external"})
NAME = re.compile(r"(?:(?P<family>[a-z][a-z0-9_]*)/)?(?:(?P<letter>[a-z])(?P<number>\d{2,})_)?(?P<op>[a-z][a-z0-9_]*)")


@dataclass(frozen=True)
class Name:
    """Where a new task goes."""

    family: str
    folder: str
    op: str


def new_task(source: Task, name: str, card: Path | None = None) -> Path:
    """Copy `source` as `name` (`family/kNN_op`, `kNN_op` or `op`) and return the new folder.

    Without a family the copy stays in the source's family; without a number it takes the next free one there. The
    public callables keep their names, since the copy still solves the same problem. Names of the task (folder, op,
    package, the op in its texts) are changed, and generated files are made again. Files that are true of the source
    alone say so: the tuned tables, the card, the notes on dispatch. `card` is a draft by `kda model trace`: the copy
    keeps it, its prompt gets the trace's shapes, and `bench/from_trace.toml` gets drafts of rows.
    """
    traced = cards.read(card) if card is not None else None
    root = checkout_folder.root()
    target = claim(source.family, name, root)
    folder = root / target.family / target.folder
    # The draft is renamed only when complete: a half-made task would appear in every listing.
    draft = root / f".{folder.name}.new"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        folder.parent.mkdir(exist_ok=True)
        shutil.copytree(source.path, draft, ignore=IGNORED)
        rules = _rules(source, target)
        for path in sorted(draft.rglob("*")):
            if path.is_file():
                _rewrite(path, rules)
        if card is not None and traced is not None:
            shutil.copyfile(card, draft / "docs" / "card.toml")
            (draft / "bench" / "from_trace.toml").write_text(rows_text(traced), encoding="utf-8")
            prompt = draft / "prompt.md"
            prompt.write_text(with_shapes(prompt.read_text(encoding="utf-8"), traced), encoding="utf-8")
        for name, todo in NOTES.items():
            if (draft / name).is_file():
                _note(draft / name, f"{source.family}/{source.folder}", todo)
        for tables in draft.glob(f"solution/**/{tuned_table.FILE}"):
            tune.disown(tables, target.op, source.folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    with removed_on_failure(folder):
        task = Task(folder)
        publish([task], check=False)
        unlink(task)
        launch_scripts.write(task)
    return folder


@contextmanager
def removed_on_failure(folder: Path) -> Iterator[None]:
    """Delete the new folder if the block fails or is interrupted."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def claim(family: str, name: str, root: Path) -> Name:
    """Where a new task `name` goes; `family` is the family of a name without one.

    Raises:
        UsageError: the name is not one of a task, or it is taken.
    """
    target = _parse(name, family, root)
    folder = root / target.family / target.folder
    if folder.exists():
        raise UsageError(f"kda new: {folder.relative_to(root)} exists already")
    for task in find_tasks():
        if task.op == target.op:
            raise UsageError(f"kda new: op {target.op!r} is taken by {task.family}/{task.folder}; op names are unique")
    return target


def _parse(name: str, otherwise: str, root: Path) -> Name:
    match = NAME.fullmatch(name)
    if match is None or re.match(r"[a-z]\d+(_|$)", match["op"]):
        raise UsageError(
            f"kda new: NAME: expected family/kNN_op, kNN_op or op in lower case letters, digits and _, got {name!r}"
        )
    family = match["family"] or otherwise
    if family in RESERVED:
        raise UsageError(f"kda new: NAME: {family!r} is no family of tasks, got {name!r}")
    numbers = _numbers(root / family)
    letter = match["letter"] or next((folder[0] for folder in numbers.values()), LETTERS.get(family, "k"))
    number = match["number"] or f"{max(numbers, default=0) + 1:02d}"
    if int(number) in numbers:
        raise UsageError(f"kda new: number {letter}{number} is taken by {family}/{numbers[int(number)]}")
    return Name(family=family, folder=f"{letter}{number}_{match['op']}", op=match["op"])


def _numbers(family: Path) -> dict[int, str]:
    """Task number -> folder name, of one family."""
    folders = [config.parent.name for config in family.glob("*/config.toml")]
    return {int(match[1]): folder for folder in folders if (match := re.match(r"[a-z](\d+)_", folder))}


def _rules(source: Task, target: Name) -> list[tuple[re.Pattern[str], str]]:
    """Pairs of pattern and replacement, to be applied in this order.

    The op's name is replaced only in places where it means the task. Elsewhere it may belong to upstream (a file, a
    module) or be a public callable, as in k01_norm_infer.
    """
    old, new = source.op, target.op
    return [
        (re.compile(pattern, re.MULTILINE), replacement)
        for pattern, replacement in (
            (rf"\b{source.family}(?=[./]{source.folder}\b)", target.family),
            (rf"\b{source.folder}\b", target.folder),
            (rf"\bkda-{old.replace('_', '-')}\b", f"kda-{new.replace('_', '-')}"),
            (rf"\b(bench|validate|compile|profile|sanitize|tune|launch)-{old}\b", rf"\g<1>-{new}"),
            (rf"\b(kda\s+\w+\s+){old}\b", rf"\g<1>{new}"),
            (rf"(?<=-k '){old}\b", new),
            (rf"^# {old}\b", f"# {new}"),
            (rf"(?<=^\[task\]\nop = \"){old}(?=\"$)", new),
        )
    ]


def _rewrite(path: Path, rules: list[tuple[re.Pattern[str], str]]) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:  # not a text file: nothing in it to rename
        return
    renamed = text
    for pattern, replacement in rules:
        renamed = pattern.sub(replacement, renamed)
    if renamed != text:
        path.write_text(renamed, encoding="utf-8")


def _note(path: Path, source: str, todo: Iterable[str]) -> None:
    """Write a note below the file's title (its first line): the file still describes `source`."""
    title, _, rest = path.read_text(encoding="utf-8").partition("\n")
    first = f"From {source}, {COPIED}: what follows, numbers too, is about that task."
    mark = ">" if path.suffix == ".md" else "#"
    note = "".join(f"{mark} {line}\n" for line in (first, *todo, "Then remove this note."))
    path.write_text(f"{title}\n\n{note}{rest}", encoding="utf-8")
