"""A campaign's record: appended to one file in git's own folder, and copied to the task's `docs/iterations.jsonl`.

The copy is what is committed. The file itself lies outside the worktree, so that no checkout, no reset and no edit of
the worktree loses a line. Every line names the hash of the line before it. A line that a crash left unfinished was
never acknowledged: it is moved to `NAME.torn`, and the file goes on after the last whole line.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from kda_judge.contract.errors import LedgerError
from kda_judge.evidence import append_only, provenance
from kda_tools.campaign.events import Entry, Event

COPY = "iterations.jsonl"
"""In a task's `docs/`."""
START = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class Journal:
    """One campaign's record."""

    path: Path
    campaign: str
    task: str

    def read(self) -> list[Entry]:
        """Every line, in order; empty if nothing was recorded.

        Raises:
            LedgerError: a line that is no event, or one that does not follow from the line before.
        """
        return entries(self.content(), str(self.path))

    def content(self) -> bytes:
        """The whole lines, without one that a crash left unfinished."""
        data = self.path.read_bytes() if self.path.is_file() else b""
        return data[: data.rfind(b"\n") + 1]

    def append(self, event: Event) -> None:
        """Add one line, and wait until it is on disk."""
        with append_only.locked(self.path) as file:
            content = self.content()
            self._set_aside(file, len(content))
            last = content.splitlines()[-1] if content and event.kind != "launched" else b""
            entry = Entry(
                campaign=self.campaign,
                task=self.task,
                utc=provenance.utc(),
                previous=hashlib.sha256(last).hexdigest(),
                event=event,
            )
            append_only.write(file, entry.model_dump_json().encode() + b"\n")

    def copy_to(self, path: Path, before: bytes) -> None:
        """Replace `path` by `before` and all lines of this campaign, in one step; `before` is what preceded it."""
        draft = path.with_name(f".{path.name}.new")
        draft.write_bytes(before + self.content())
        draft.replace(path)

    def _set_aside(self, file: int, whole: int) -> None:
        size = os.fstat(file).st_size
        if size > whole:
            with self.path.with_suffix(".torn").open("ab") as torn:
                torn.write(os.pread(file, size - whole, whole) + b"\n")
            os.ftruncate(file, whole)


def entries(content: bytes, where: str) -> list[Entry]:
    """The lines of a file that may hold several campaigns, one after another, each checked against the one before."""
    found: list[Entry] = []
    previous = b""
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            entry = Entry.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "line"
            raise LedgerError(f"{where}:{number}: no event of a campaign: {key}: {first['msg']}") from None
        expected = START if entry.event.kind == "launched" else hashlib.sha256(previous).hexdigest()
        if entry.previous != expected:
            raise LedgerError(
                f"{where}:{number}: does not follow from the line before it: expected previous {expected[:12]}, got "
                f"{entry.previous[:12]}; a line was edited, removed or added by hand"
            )
        found.append(entry)
        previous = line
    return found
