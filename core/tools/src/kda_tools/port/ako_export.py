"""`kda campaign ako export`: writes a task in the form that AKO4ALL works on; no file of it imports this repository."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import Strict
from kda_judge.contract.tasks import Task, checkout_root
from kda_judge.evidence import provenance
from kda_tools.port.row_source import comparison, makers, operands, rows_text, tensors_passed, tolerances
from kda_tools.project.export.sources import collect
from kda_tools.project.export.write import write_texts
from kda_tools.publish.task_notes import HOW_TO_WORK

MARK = ".kda-ako.json"
"""The file that records what was exported; the import reads it."""
KERNEL = '''"""{title}: the public functions of the kernel to optimise.

Edit what is in `{package}/`, but for `{package}/_kda/`. Every copy of this folder has a package of its own.
"""

import importlib.util
import re
import sys
from pathlib import Path

_here = Path(__file__).resolve().parent
_name = re.sub(r"\\W", "_", f"{package}_{{_here.name}}")
_init = _here / "{package}" / "__init__.py"
_spec = importlib.util.spec_from_file_location(
    _name, _init, submodule_search_locations=[str(_init.parent)]
)
_package = sys.modules[_name] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_package)
{assigned}
__all__ = {all_names}
'''
BENCH = '''"""{title}: correctness against input/reference.py, then microseconds of GPU time, per shape and in total.

    python bench/bench_{op}.py

Compares solution/{op}.py with input/{op}.py, the kernel as it was exported. Prints CORRECT=True or CORRECT=False, and
without a GPU no time: it then runs the smallest shapes alone.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
{tables}{inputs}

def load(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def as_tuple(value):
    return (value,) if isinstance(value, torch.Tensor) else tuple(value)


def outputs(row, function):
    """What a call gives on fresh inputs: what it returns, or what it wrote in place."""
    given, scalars = arguments(row)
    made = function(*given, **scalars)
    names = OPERANDS[row["op"]]
    if OUTPUTS[row["op"]][0] in names:  # in place
        return tuple(given[names.index(name)] for name in OUTPUTS[row["op"]])
    return as_tuple(made)


def correct(row, function, reference):
    """Why the outputs are wrong, or None."""
    for name, one, other in zip(OUTPUTS[row["op"]], outputs(row, function), outputs(row, reference)):
        if (why := off(name, one, other)) is not None:
            return why
    return None


def microseconds(row, function):
    import triton

    given, scalars = arguments(row)
    function(*given, **scalars)
    return triton.testing.do_bench_cudagraph(lambda: function(*given, **scalars)) * 1000


@torch.no_grad()
def main():
    reference = load(ROOT / "input" / "reference.py", "reference")
    before = load(ROOT / "input" / "{op}.py", "before")
    after = load(ROOT / "solution" / "{op}.py", "after")
    rows = ROWS if DEVICE == "cuda" else sorted(ROWS, key=size)[:2]
    wrong = []
    total = [0.0, 0.0]
    for row in rows:
        function = getattr(after, row["op"])
        why = correct(row, function, getattr(reference, row["op"]))
        if why is not None:
            wrong.append(row["id"])
            print(f"{{row['id']}}: WRONG: {{why}}")
        elif DEVICE == "cpu":
            print(f"{{row['id']}}: correct; not timed without a GPU")
        else:
            times = [microseconds(row, getattr(side, row["op"])) for side in (before, after)]
            total = [sum(pair) for pair in zip(total, times)]
            print(f"{{row['id']}}: {{times[1]:.2f}} us, as exported {{times[0]:.2f}} us, {{times[0] / times[1]:.3f}}x")
    print(f"CORRECT={{not wrong}}")
    if DEVICE == "cuda" and not wrong:
        print(f"TOTAL={{total[1]:.2f}} us, as exported {{total[0]:.2f}} us, SPEEDUP={{total[0] / total[1]:.3f}}x")
    return 1 if wrong else 0


def size(row):
    return sum(torch.Size(spec["shape"]).numel() for spec in row["inputs"].values())


if __name__ == "__main__":
    sys.exit(main())
'''
ITERATIONS = """# Iteration Log

## Summary

| Iter | Title | Speedup | Runtime (ms) | Status |
|------|-------|---------|--------------|--------|

## Iterations
"""
OWN_WORDS = ("TASK.md", "HINTS.md")
"""Files with AKO4ALL's own instructions."""


class Exported(Strict):
    """What an export was made of."""

    task: str
    commit: str
    solution: str
    """sha256 of the task's solution; the import refuses a task whose solution differs."""
    library: dict[str, str]
    """File of `_kda/` -> sha256. This code is shared and not to be edited."""


def export(task: Task, folder: Path) -> list[Path]:
    """Fill `folder`, a checkout of AKO4ALL or an empty folder; returns what was written.

    Raises:
        UsageError: the folder is neither of these, a file to be written exists already, or no commit is known.
    """
    empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not empty and not (folder / OWN_WORDS[0]).is_file():
        raise UsageError(
            f"{folder}: expected a new or empty folder, or a checkout of AKO4ALL, which has {OWN_WORDS[0]}"
        )
    commit = provenance.git_state(checkout_root()).commit
    if commit == provenance.UNKNOWN_COMMIT:
        raise UsageError(
            "kda campaign ako export: expected a git checkout with a commit, by which the import knows the base"
        )
    op, package = task.op, package_name(task)
    files = collect(task, runtime=False)
    names = sorted(task.config.ops)
    kernel = KERNEL.format(
        title=task.config.task.title,
        package=package,
        assigned="".join(f"{name} = _package.{name}\n" for name in names),
        all_names=json.dumps(names),
    )
    rows = [row for row in task.workloads if row.production] or list(task.workloads)
    texts = {f"{side}/{package}/{name}": text for side in ("input", "solution") for name, text in files.items()}
    texts |= {f"{side}/{op}.py": kernel for side in ("input", "solution")}
    texts["input/reference.py"] = (task.path / "baseline" / "eager.py").read_text(encoding="utf-8")
    bench = BENCH.format(
        title=task.config.task.title,
        op=op,
        package=package,
        tables=operands(task, names) + tolerances(task, names) + rows_text(task, rows),
        inputs=makers(task, rows, "DEVICE") + comparison(task, names),
    )
    texts[f"bench/bench_{op}.py"] = tensors_passed(task, names, bench)
    texts["context/card.md"] = _card(task, "")
    pages = [task.path / "docs" / page for page in ("dispatch.md", "results.md", "profile.md")]
    for path in (*pages, (checkout_root() or task.path) / HOW_TO_WORK):
        if path.is_file():
            texts[f"context/{path.name}"] = path.read_text(encoding="utf-8")
    texts["ITERATIONS.md"] = ITERATIONS
    texts["PROMPT.md"] = _prompt(task, folder)
    texts[MARK] = _mark(task, commit, files).model_dump_json(indent=1) + "\n"
    mine = {"ITERATIONS.md"}  # AKO4ALL comes with an empty one
    for name in texts:
        if (folder / name).exists() and name not in mine:
            raise UsageError(f"{folder / name}: is there already; export into a fresh checkout or an empty folder")
    log = folder / "ITERATIONS.md"
    if log.is_file() and any(line.startswith("### Iter ") for line in log.read_text(encoding="utf-8").splitlines()):
        outside = log.read_text(encoding="utf-8").partition("<!--")[0]
        if "### Iter " in outside:
            raise UsageError(f"{log}: holds iterations already; export into a fresh checkout or an empty folder")
    write_texts(folder, texts)
    return [folder / name for name in texts]


def package_name(task: Task) -> str:
    """The import name of the kernel's package."""
    return f"kda_{task.op}"


def _mark(task: Task, commit: str, files: Mapping[str, str]) -> Exported:
    library = {
        name: hashlib.sha256(text.encode()).hexdigest() for name, text in files.items() if name.startswith("_kda/")
    }
    return Exported(task=task.folder, commit=commit, solution=provenance.hashes(task)["solution"], library=library)


def _prompt(task: Task, folder: Path) -> str:
    """AKO4ALL's own instructions if they are in the folder, then what differs here, then the task's card."""
    parts = [(folder / name).read_text(encoding="utf-8").strip() for name in OWN_WORDS if (folder / name).is_file()]
    absent = [name for name in OWN_WORDS if not (folder / name).is_file()]
    here = (
        f"# Here\n\n- The benchmark is `python bench/bench_{task.op}.py`; it prints CORRECT, the time of each shape "
        f"and their total.\n- Edit `solution/{package_name(task)}/`, but for `_kda/` in it, which other kernels share. "
        "Do not edit `input/` and `bench/`.\n- `context/` has the task's card, what decides which call takes which "
        "path, what was measured, and the rules of every task; for commands and for what may be edited this list holds "
        "instead.\n- Write every iteration into ITERATIONS.md, the failed ones as well, and commit "
        "it as `[iter N] ...`."
    )
    if absent:
        here += f"\n- AKO4ALL's {' and '.join(absent)} was not there when this was written."
    return "\n\n---\n\n".join([*parts, here, _card(task, "context/").strip()]) + "\n"


def _card(task: Task, place: str) -> str:
    """The task's card; its link to the page on how to work now leads to the copy in the folder `place`."""
    text = (task.path / "prompt.md").read_text(encoding="utf-8")
    return text.replace(f"../../{HOW_TO_WORK}", f"{place}{Path(HOW_TO_WORK).name}")
