"""Read `docs/watchlist.toml`: open pull requests of upstream that a task or a port could collide with."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict, read_toml, validate
from kda_tools.traces.catalogue import load

FILE = Path("docs") / "watchlist.toml"


class Pull(Strict):
    """One pull request."""

    repository: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    number: Annotated[int, Field(gt=0)]
    title: str
    entries: Annotated[tuple[str, ...], Field(min_length=1)]
    """Ids of the catalogue's entries whose patterns the pull request touches."""
    opened: dt.date
    seen: dt.date
    """Date of the last look that found it open."""

    @model_validator(mode="after")
    def _seen_after_it_was_opened(self) -> Pull:
        if self.seen < self.opened:
            raise ValueError(f"seen: expected {self.opened}, when it was opened, or later, got {self.seen}")
        return self

    @property
    def line(self) -> str:
        """The pull request in one line, for a terminal and for a port's notes."""
        return f"{self.repository}#{self.number} ({self.title}), opened {self.opened}, seen open {self.seen}"


class Watchlist(Strict):
    """The content of `docs/watchlist.toml`."""

    pull: tuple[Pull, ...] = ()


def load_watchlist(root: Path) -> tuple[Pull, ...]:
    """The pull requests of the checkout's watchlist; none without such a file.

    Raises:
        UsageError: the file breaks the schema, or names an entry that the catalogue lacks.
    """
    path = root / FILE
    pulls = validate(Watchlist, read_toml(path), path).pull if path.is_file() else ()
    known = {entry.id for entry in load(root)} if pulls else set()
    for pull in pulls:
        if unknown := sorted(set(pull.entries) - known):
            raise UsageError(f"{path}: pull {pull.number}, key 'entries': expected ids of the catalogue, got {unknown}")
    return pulls


def pulls_of_task(root: Path, folder: str) -> tuple[Pull, ...]:
    """The pull requests that touch entries of a task; `folder` is its folder's name, as in `k02_rotary_embedding`."""
    if not (pulls := load_watchlist(root)):
        return ()
    own = {entry.id for entry in load(root) if entry.task == folder}
    return tuple(pull for pull in pulls if own & set(pull.entries))
