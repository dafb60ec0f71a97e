"""List the optional submodules below `external/`: collections of knowledge that are kept elsewhere."""

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
    """Whether the submodule's files are in the checkout."""

    @property
    def command(self) -> str:
        """The command that fetches the submodule."""
        return f"git submodule update --init {self.path}"


def externals(root: Path) -> list[External]:
    """The submodules below `external/` that `.gitmodules` names, in its order.

    Raises:
        UsageError: the file does not have git's format.
    """
    parser = configparser.ConfigParser()
    # Git indents its keys; configparser would read them as continued lines.
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
