"""`kda new --template`: make a small complete task from data in `templates/`, in Triton or in CUDA C++."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from kda_judge.contract.errors import UsageError
from kda_judge.contract.strict_models import read_toml
from kda_judge.contract.tasks import Task, checkout_root, find_tasks
from kda_tools.project import launch_scripts
from kda_tools.project.export.write import write_texts
from kda_tools.project.new_task import Name, claim, removed_on_failure
from kda_tools.publish.generate import publish

FOLDER = Path(__file__).parent / "templates"
KINDS = ("silu", "rmsnorm", "adaln", "rope")
LANGUAGES = {"triton": "Triton", "cuda": "CUDA C++"}
NAMES = tuple(f"{language}-{kind}" for language in LANGUAGES for kind in KINDS)
COPIED = ("__init__.py", "hatch_build.py", "pyproject.toml")
"""Files that differ between tasks in names only; they are copied from a task of the checkout."""
FLOATS = 'DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")\n'
REFERENCE = '''\
"""The float64 oracle and the contract of a row. Bytes are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.tensor_spec import DType
from kda_judge.contract.workloads import Workload

'''
GRID = '''\
"""The regression grid: correctness-only rows over the op's envelope; without a GPU the small ones are checked."""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, TensorSpec
from kda_judge.contract.workloads import Workload

'''
THIN = '''

def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks: those of a few thousand elements, which cover every form."""
    return [row for row in rows if prod(row.inputs["x"].shape) <= 10_000]
'''
IMPORTS = {
    "triton": """from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kda_runtime.checks import Expect, given, unfit
from kda_runtime.launch import Launch
from kda_runtime.op import Op

BLOCK, WARPS = 1024, 4
\"\"\"Not measured: a 16-byte vector of 16-bit elements for every thread.\"\"\"

""",
    "cuda": """from pathlib import Path
from typing import NamedTuple

import torch

from kda_runtime.checks import Expect, given, unfit
from kda_runtime.cuda_cpp import CudaLaunch
from kda_runtime.op import Op

SOURCE = Path(__file__).with_name("@CALL@.cu")
ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half", torch.float32: "float"}
THREADS = 256
\"\"\"Not measured.\"\"\"


def row_threads(x: torch.Tensor) -> int:
    \"\"\"Threads for a row: a 16-byte vector each, whole warps, at most 512.\"\"\"
    vectors = -(-x.shape[-1] * x.itemsize // 16)
    return min(-(-vectors // 32) * 32, 512)

""",
}


def from_template(template: str, name: str) -> Path:
    """Make the task `name` (`family/kNN_op`, `kNN_op` or `op`) of a template, and return its folder.

    Raises:
        UsageError: no such template, no checkout, a name that is taken, or a checkout without any task.
    """
    if template not in NAMES:
        raise UsageError(f"--template {template}: expected one of {', '.join(NAMES)}")
    language, _, kind = template.partition("-")
    root, tasks = checkout_root(), find_tasks()
    if root is None or not tasks:
        raise UsageError("kda new --template: expected a checkout with a task; run it inside one, or set KDA_ROOT")
    target = claim(tasks[0].family, name, root)
    data = read_toml(FOLDER / f"{kind}.toml")
    folder = root / target.family / target.folder
    draft = root / f".{folder.name}.new"
    shutil.rmtree(draft, ignore_errors=True)
    try:
        write_texts(draft, _files(data, target, template, language, tasks[0]))
        folder.parent.mkdir(exist_ok=True)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    with removed_on_failure(folder):
        task = Task(folder)
        publish([task], check=False)
        launch_scripts.write(task)
    return folder


def _files(data: dict[str, Any], target: Name, template: str, language: str, other: Task) -> dict[str, str]:
    """Path in the task -> text of every file that is not generated."""
    common = read_toml(FOLDER / "common.toml")
    head = common.pop("cuda_head")
    call, title = data["call"], data["title"]
    words = {
        **{key.upper(): str(value).strip() for key, value in data.items() if isinstance(value, str)},
        "OP": target.op,
        "ALL": ", ".join(f'"{name}"' for name in sorted((call, "launches", "why_not"))),
        "LANGUAGE": LANGUAGES[language],
        "TEMPLATE": template,
    }
    made = {place: _filled(text.lstrip("\n"), words) for place, text in common.items()}
    made |= {
        place: _renamed((other.path / place).read_text(encoding="utf-8"), other, target, title) for place in COPIED
    }
    rows = f"# {call}: examples; replace them by captured rows, which are then frozen.\n{data['workloads']}"
    made["bench/workloads.toml"] = rows
    made["bench/reference.py"] = f"{REFERENCE}{FLOATS}\n\n{data['reference'].strip()}\n"
    made["bench/grid.py"] = f"{GRID}{FLOATS}{data['grid'].rstrip()}\n{THIN}"
    for arm, summary in (("primary", "PyTorch's own functions: the arm to beat"), ("eager", "In plain PyTorch")):
        made[f"baseline/{arm}.py"] = f'"""{summary}."""\n\nimport torch\n\n\n{data[arm].strip()}\n'
    made[f"solution/{call}.py"] = _solution(data, language)
    if language == "cuda":
        source = f"{data['cu'].strip()}\n"
        made[f"solution/{call}.cu"] = source.replace("\n\nnamespace {\n", f"\n{head}\nnamespace {{\n", 1)
    return made


def _solution(data: dict[str, Any], language: str) -> str:
    kernel = f"{data['triton'].strip()}\n\n\n" if language == "triton" else ""
    plan = data[f"{language}_plan"].strip()
    name = f"{data['call']}_kernel" if language == "triton" else "None"
    body = data["solution"].strip().replace("\n@PLAN@\n", f"\n\n{plan}\n\n").replace("@KERNEL@", name)
    imports = IMPORTS[language].replace("@CALL@", data["call"])
    if "Expect" not in body:
        imports = imports.replace("Expect, ", "")
    if "row_threads" not in plan:
        imports = re.sub(r"\n\ndef row_threads.*?\n\n(?=$)", "\n", imports, flags=re.DOTALL)
    elif "THREADS)" not in plan:
        imports = imports.replace('THREADS = 256\n"""Not measured."""\n', "")
    formula = data["formula"].partition(";    ")
    docstring = f'"""{data["title"]}.\n\n    {formula[2]}\n\nIn float32, rounded once at the end.\n"""\n\n'
    return f"{docstring}{imports}\n{kernel}{body}\n"


def _renamed(text: str, other: Task, target: Name, title: str) -> str:
    text = text.replace(f'"kda-{other.op.replace("_", "-")}"', f'"kda-{target.op.replace("_", "-")}"')
    return re.sub(r"^description = .*$", f'description = "{title}"', text, flags=re.MULTILINE)


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda match: words.get(match[1], match[0]), text)
