"""Write an export: a plain package, or a kernel for the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task, checkout_root
from kda_tools.project.export.readme import origin_json, readme
from kda_tools.project.export.sources import collect, exported_files, with_docstring
from kda_tools.publish.read_once import unchanged_files

BACKEND = "cuda"
"""Backend of a Hub kernel in pure Python. There is none for the CPU, where PyTorch comes without Triton."""
ORGANISATION = "ORGANISATION"
"""Placeholder for the user or organisation that uploads a Hub kernel."""
VERSION = 1
"""Version of the Hub kernel's interface."""
ABOUT = "README.md says how it is called and what of it is measured."
"""Sentence in the export's docstring. It is the same before and after the first published run: records hash it."""


FORMS = ("plain", "hf")


@unchanged_files()
def export(task: Task, folder: Path, form: str, runtime: bool, exact: bool = False) -> Path:
    """Write the export into `folder`, which must be new or empty; returns the package in it.

    `exact`: with upstream's bits, where an op can give them.

    Raises:
        UsageError: the folder is not empty, its name cannot be imported, or the options exclude each other.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: expected a new or an empty folder")
    if form == "hf" and runtime:
        raise UsageError("--runtime: a Hub kernel may depend on torch and the Hub's curated packages alone")
    name = folder.resolve().name if form == "plain" else f"kda_{task.op}"
    if not name.isidentifier() or iskeyword(name):
        raise UsageError(f"{folder}: expected a folder whose name Python can import (letters, digits, _)")
    files = hashed_files(task, runtime, exact)
    files["provenance.json"] = origin_json(task, {name: _sha256(text) for name, text in sorted(files.items())})
    ops = ", ".join(task.config.ops)
    folder.mkdir(parents=True, exist_ok=True)
    if form == "plain":
        call = f"from {name} import {ops}"
        files["README.md"] = readme(task, name, "runtime" if runtime else "plain", call, exact)
        return write_texts(folder, files)
    call = f'from kernels import get_kernel\n\n{name} = get_kernel("{ORGANISATION}/{name}", version={VERSION})'
    text = readme(task, name, "plain", call, exact)
    head, steps = "---\ntags:\n- kernels\nlicense: apache-2.0\n---\n\n", next_steps(task, folder)
    write_texts(folder, {"README.md": f"{head}{text}\n## How it comes to the Hub\n\n{steps}"})
    built = write_texts(folder / "build" / f"torch-{BACKEND}", files)
    (built / "metadata.json").write_text(json.dumps(_metadata(name), indent=2) + "\n", encoding="utf-8")
    return built


def write_arm(task: Task, folder: Path) -> Path:
    """Write the plain export as an arm of a run: without README and provenance, whose tables take seconds to make."""
    return write_texts(folder, hashed_files(task, runtime=False, exact=False))


def hashed_files(task: Task, runtime: bool, exact: bool) -> dict[str, str]:
    """The files of an export that a record hashes, by their path: all but README and provenance."""
    files = collect(task, runtime, exact) if runtime else exported_files(task, exact)
    files["__init__.py"] = with_docstring(task, files["__init__.py"], ABOUT)
    if (root := checkout_root()) is not None and (root / "LICENSE").is_file():
        files["LICENSE"] = (root / "LICENSE").read_text(encoding="utf-8")
    return files


def next_steps(task: Task, folder: Path) -> str:
    """The remaining steps for a Hub kernel, in words: `get_kernel` finds its version by the branch."""
    place = f"{ORGANISATION}/kda_{task.op} {folder.resolve().name}"
    return (
        f"Put your user or organisation for {ORGANISATION}, here and in README.md, then:\n\n"
        f"    hf auth login\n    hf upload {place} --repo-type kernel --revision v{VERSION}\n"
    )


def _metadata(name: str) -> dict[str, object]:
    """The metadata of a build variant that the package `kernels` reads."""
    return {
        "id": f"_{name}_{BACKEND}",
        "name": name.replace("_", "-"),
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": BACKEND},
    }


def write_texts(folder: Path, files: Mapping[str, str]) -> Path:
    """Write files (path in the folder -> text), and the folders that they need; returns the folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def discard(folder: Path) -> None:
    """Remove an export that failed its check."""
    shutil.rmtree(folder, ignore_errors=True)
