"""Collections of knowledge kept elsewhere: optional submodules below `external/`, and links."""

from __future__ import annotations

import configparser
from dataclasses import dataclass
from pathlib import Path

from kda_judge.contract.errors import UsageError

MODULES = ".gitmodules"


@dataclass(frozen=True)
class External:
    """One submodule."""

    path: str
    url: str
    present: bool
    """Whether its files are there."""

    @property
    def command(self) -> str:
        """What brings it."""
        return f"git submodule update --init {self.path}"


def externals(root: Path) -> list[External]:
    """The submodules below `external/` that `.gitmodules` names, in its order.

    Raises:
        UsageError: the file is not of git's form.
    """
    parser = configparser.ConfigParser()
    # Git indents its keys, which configparser takes for continued lines.
    file = root / MODULES
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    try:
        parser.read_string("\n".join(line.strip() for line in text.splitlines()))
    except configparser.Error as error:
        why = " ".join(str(error).split())
        raise UsageError(f"{file}: expected git's list of submodules, got: {why}") from None
    found = []
    for section in parser.sections():
        path = parser[section].get("path", "")
        if path.startswith("external/"):
            folder = root / path
            present = folder.is_dir() and any(folder.iterdir())
            found.append(External(path, parser[section].get("url", ""), present))
    return found
