"""`kda new`: copy a task folder under a new name, so that the copy validates, benches and is listed untouched."""

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kda_core import tuning
from kda_core.documents import COPIED, unlink
from kda_core.errors import UsageError
from kda_core.publish import publish
from kda_core.tasks import Task, checkout_root, find_tasks
from kda_core.tune import sweep as tune

IGNORED = shutil.ignore_patterns(
    *("__pycache__", "*.py[co]", ".*", "build", "dist", "*.egg-info", "*.so"),
    *("*.jsonl", "results.md", "tuning.md", "grid.md", "profile.md", "sanitize.md", "baseline_source.md"),
    *("*.svg", "*.png", "*.*-rep"),
)
"""What a copy must not inherit: caches, build outputs, results, and what is generated."""
NOTES = {
    "prompt.md": (
        "Say here what your op computes, for which shapes, and what counts; let config.toml, bench/ and the",
        "description in pyproject.toml say the same.",
    ),
    "config.toml": (
        "Set title, models, ops, pins, the tolerances with the reason of each, targets and [cpu] to what is yours, and",
        "leave targets out where you have none.",
    ),
    "docs/dispatch.md": ("Write down what holds for your kernels, and what you measured.",),
}
"""File of a copy that is still about its source -> what to do with it, said below the file's first line. While a note
stands, the task cannot be published and is not on its family's map."""
RESERVED = frozenset({"core", "docs", "external"})
NAME = re.compile(r"(?:(?P<family>[a-z][a-z0-9_]*)/)?(?:k(?P<number>\d{2,})_)?(?P<op>[a-z][a-z0-9_]*)")


@dataclass(frozen=True)
class Name:
    """Where a new task goes."""

    family: str
    folder: str
    op: str


def new_task(source: Task, name: str) -> Path:
    """Copy `source` as `name` (`family/kNN_op`, `kNN_op` or `op`) and return the new folder.

    Without a family the copy stays in the source's; without a number it takes the next free one there. The public
    callables keep their names, since the copy still solves the same problem; everything that identifies the task
    (import names, op, package, entry point, sessions, registrations) is renamed, what is generated is made for the
    copy, and what is true of the source alone says so: the tuned tables, the card, the notes on dispatch.
    """
    root = checkout_root()
    if root is None:
        raise UsageError("kda new: no checkout here; run it inside one, or set KDA_ROOT")
    target = _parse(name, source, root)
    folder = root / target.family / target.folder
    if folder.exists():
        raise UsageError(f"kda new: {folder.relative_to(root)} exists already")
    for task in find_tasks():
        if task.op == target.op:
            raise UsageError(f"kda new: op {target.op!r} is taken by {task.family}/{task.folder}; op names are unique")
    # Renamed only when complete: a half-made task would appear in every listing.
    draft = root / f".{folder.name}.new"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        folder.parent.mkdir(exist_ok=True)
        shutil.copytree(source.path, draft, ignore=IGNORED)
        rules = _rules(source, target)
        for path in sorted(draft.rglob("*")):
            if path.is_file():
                _rewrite(path, rules)
        for name, todo in NOTES.items():
            if (draft / name).is_file():
                _note(draft / name, f"{source.family}/{source.folder}", todo)
        for tables in draft.glob(f"solution/**/{tuning.FILE}"):
            tune.disown(tables, target.op, source.folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    task = Task(path=folder, package=f"{target.family}.{target.folder}")
    publish([task], check=False)
    unlink(task)
    return folder


def _parse(name: str, source: Task, root: Path) -> Name:
    match = NAME.fullmatch(name)
    if match is None or re.match(r"k\d+(_|$)", match["op"]):
        raise UsageError(
            f"kda new: NAME: expected family/kNN_op, kNN_op or op in lower case letters, digits and _, got {name!r}"
        )
    family = match["family"] or source.family
    if family in RESERVED:
        raise UsageError(f"kda new: NAME: {family!r} is no family of tasks, got {name!r}")
    numbers = _numbers(root / family)
    number = match["number"] or f"{max(numbers, default=0) + 1:02d}"
    if int(number) in numbers:
        raise UsageError(f"kda new: number k{number} is taken by {family}/{numbers[int(number)]}")
    return Name(family=family, folder=f"k{number}_{match['op']}", op=match["op"])


def _numbers(family: Path) -> dict[int, str]:
    """Task number -> folder name, of one family."""
    folders = [config.parent.name for config in family.glob("*/config.toml")]
    return {int(match[1]): folder for folder in folders if (match := re.match(r"k(\d+)_", folder))}


def _rules(source: Task, target: Name) -> list[tuple[re.Pattern[str], str]]:
    """What to replace, in this order.

    The op's name is replaced only where it means the task: elsewhere it may belong to upstream (a file, a module) or
    be a public callable, as in k01_norm_infer.
    """
    old, new = source.op, target.op
    return [
        (re.compile(pattern, re.MULTILINE), replacement)
        for pattern, replacement in (
            (rf"\b{source.family}(?=[./]{source.folder}\b)", target.family),
            (rf"\b{source.folder}\b", target.folder),
            (rf"\bkda-{old.replace('_', '-')}\b", f"kda-{new.replace('_', '-')}"),
            (rf"\bkda(_|::){old}(?![a-z0-9])", rf"kda\g<1>{new}"),
            (rf"\b(bench|validate|compile|profile|sanitize|tune)-{old}\b", rf"\g<1>-{new}"),
            (rf"\b(kda\s+\w+\s+){old}\b", rf"\g<1>{new}"),
            (rf"(?<=-k '){old}\b", new),
            (rf"\bfind_task\((['\"]){old}\1\)", rf"find_task(\g<1>{new}\g<1>)"),
            (rf"^# {old}\b", f"# {new}"),
            (rf"^{old}(?= = \"{target.family}\.{target.folder}\")", new),
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
    """Say below the file's title, its first line, that it is about `source` still."""
    title, _, rest = path.read_text(encoding="utf-8").partition("\n")
    first = f"From {source}, {COPIED}: what follows, numbers too, is about that task."
    mark = ">" if path.suffix == ".md" else "#"
    note = "".join(f"{mark} {line}\n" for line in (first, *todo, "Then remove this note."))
    path.write_text(f"{title}\n\n{note}{rest}", encoding="utf-8")
