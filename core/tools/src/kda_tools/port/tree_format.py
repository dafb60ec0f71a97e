"""Formats files for an SGLang tree as its formatters, black and isort, would do; uses ruff if that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from kda_judge.contract.errors import UsageError
from kda_tools.port.dispatch_edit import WIDTH

OPTIONS = ("--isolated", "--line-length", str(WIDTH))
CONFIG = ('lint.isort.known-first-party = ["sglang"]', "lint.isort.split-on-trailing-comma = false")
IMPORTS = ("--select", "I,RUF100", "--fix", *(word for one in CONFIG for word in ("--config", one)))


def formatted(files: Mapping[str, str]) -> dict[str, str]:
    """The files by their paths, with Python formatted. Without ruff they are unchanged, and standard error says so.

    Raises:
        UsageError: ruff cannot read a file; says which and why.
    """
    # Look beside this Python first: an environment's programs need not be on the path.
    ruff = shutil.which("ruff", path=sysconfig.get_path("scripts")) or shutil.which("ruff")
    if ruff is None:
        print(
            "note: files are not formatted as SGLang does: `pip install 'kda-tools[port]'` brings ruff", file=sys.stderr
        )
        return dict(files)
    with TemporaryDirectory(prefix="kda-format-") as folder:
        # Folders have numbers for names, so that ruff takes none of them for a package of the tree.
        places = {
            name: Path(folder) / str(at) / Path(name).name for at, name in enumerate(files) if name.endswith(".py")
        }
        for name, place in places.items():
            place.parent.mkdir()
            place.write_text(files[name], encoding="utf-8")
        for words in (("check", *IMPORTS), ("format",)):
            done = subprocess.run([ruff, *words, *OPTIONS, folder], capture_output=True, text=True, check=False)
            if done.returncode:
                raise UsageError(f"ruff {words[0]}: expected files of Python, got: {done.stdout}{done.stderr}")
        return {name: places[name].read_text(encoding="utf-8") if name in places else files[name] for name in files}
