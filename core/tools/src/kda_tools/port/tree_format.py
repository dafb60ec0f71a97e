"""Formats files for an SGLang tree as its formatters, black and isort, would do; uses ruff if that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent, indent

from kda_judge.contract.errors import UsageError
from kda_tools.port.dispatch_edit import WIDTH

OPTIONS = ("--isolated", "--line-length", str(WIDTH))
CONFIG = 'lint.isort.known-first-party = ["sglang"]'
IMPORTS = ("--select", "I,RUF100", "--fix", "--config", CONFIG)


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


def formatted_bodies(bodies: Mapping[str, str], methods: Collection[str]) -> dict[str, str]:
    """Statements by the function that they are for, as wide as they may be there, or in a method of a class."""
    heads = {name: f"class A:\n{' ' * 4}def f():\n" if name in methods else "def f():\n" for name in bodies}
    pads = {name: " " * (8 if name in methods else 4) for name in bodies}
    whole = {f"{name}.py": heads[name] + indent(f"{text.strip()}\n", pads[name]) for name, text in bodies.items()}
    done = formatted(whole)
    return {name: dedent(done[f"{name}.py"].removeprefix(heads[name])) for name in bodies}
