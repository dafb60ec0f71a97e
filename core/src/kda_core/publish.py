"""Make the generated files from the ledgers, or compare them: results, upstream source, and the README's table."""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from pathlib import Path

from kda_core.derive import mismatches
from kda_core.errors import LedgerError, UsageError
from kda_core.ledger import read
from kda_core.report import COMMAND, HEADER, published, replace_block, results_md, top_table_md
from kda_core.tasks import Task, checkout_root, find_tasks

README_BLOCK = "results"


def publish(tasks: Sequence[Task], check: bool) -> list[str]:
    """Write every generated file of `tasks` and the README's table of all tasks; returns what changed.

    With `check` nothing is written, and each file that differs is returned with its first differing line. That the
    ledger's numbers follow from its samples is checked before writing; `validate` checks it for every run by itself.

    Raises:
        LedgerError: a ledger is broken, or the run to publish claims numbers that its samples do not give.
        UsageError: the README lacks the markers of its table.
    """
    if not check:
        for task in tasks:
            _demand_true_numbers(task)
    found = []
    for path, content in _contents(tasks):
        old = path.read_text(encoding="utf-8") if path.is_file() else None
        if old == content:
            continue
        found.append(_difference(path, old, content) if check else str(path))
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8", newline="\n")
    return found


def _demand_true_numbers(task: Task) -> None:
    for record in published(task, read(task.ledger)).values():
        if wrong := mismatches(record):
            raise LedgerError(f"{task.ledger}: run {record.run_id}: {'; '.join(wrong[:3])} ({len(wrong)} in all)")


def _contents(tasks: Iterable[Task]) -> Iterable[tuple[Path, str]]:
    for task in tasks:
        yield task.path / "docs" / "results.md", results_md(task, read(task.ledger))
        yield task.path / "docs" / "baseline_source.md", _baseline_source(task)
    root = checkout_root()
    if root is not None:
        readme = root / "README.md"
        if not readme.is_file():
            raise UsageError(f"{readme}: file not found; it holds the table of all tasks")
        try:
            yield readme, replace_block(readme.read_text(encoding="utf-8"), README_BLOCK, top_table_md(find_tasks()))
        except ValueError as error:
            raise UsageError(f"{readme}: {error}") from None


def _baseline_source(task: Task) -> str:
    from kda_core.upstream import baseline_source

    parts = [baseline_source(pin, task.path / pin.files).rstrip() for pin in task.config.upstream.values()]
    body = "\n\n".join(parts) or "This task stands on no upstream release."
    return f"{HEADER}\n# Where the upstream arms of {task.folder} come from\n\n{body}\n"


def _difference(path: Path, old: str | None, new: str) -> str:
    if old is None:
        return f"{path}: file not found; run `{COMMAND}`"
    lines = zip_longest(old.splitlines(), new.splitlines(), fillvalue="(end of file)")
    for number, (got, expected) in enumerate(lines, start=1):
        if got != expected:
            return f"{path}:{number}: expected {expected!r}, got {got!r}; run `{COMMAND}`"
    return f"{path}: differs in line endings or the newline at its end; run `{COMMAND}`"
