"""The worked example works as it stands: its blocks, in order, make a task that is verified, compiled and tuned."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from core.tools.tests import test_form
from core.tools.tests.every_task import ROOT, copy_of_one_task
from kda_judge.arms.upstream import cache_folder, obtain
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_tools.lab.inspect.aot import compile_task
from kda_tools.project import check_tuning
from kda_tools.project.validate import remarks

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the same commands measure, for minutes")

PAGES = ("add_a_kernel_example.md", "tune_a_kernel.md")
TEXT = "".join((ROOT / "docs" / page).read_text(encoding="utf-8") for page in PAGES)
COMMANDS = """
set -euo pipefail
kda() {  # but for compiling every candidate, which test_tune.py tries
  case "$*" in
    "tune gated_silu") ;;
    *) python -m kda_tools "$@" ;;
  esac
}
nox() {  # as noxfile.py, with fewer rows
  case "$*" in
    "-s lint -- --fix") python -m ruff check -q diffusion/k*_gated_silu
                        python -m ruff format -q --check diffusion/k*_gated_silu ;;
    "-s bench-gated_silu") kda bench gated_silu --generations 1 --rows '*decode*' ;;
    "-s validate-gated_silu") kda validate gated_silu --static ;;
    "-s tests -- "*) TRITON_INTERPRET=1 python -m pytest -q -p no:cacheprovider diffusion/k*_gated_silu ;;
    *) echo "no session for: nox $*"; return 1 ;;
  esac
}
"""


class Block(NamedTuple):
    """A fenced block, and the file that the text before it names."""

    file: str | None
    kind: str
    body: str


def blocks() -> Iterator[Block]:
    """Those that make the task, in order."""
    for before, kind, body in re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL):
        named = re.findall(r"^File `([^`]+)`", before, re.MULTILINE)
        yield Block(named[-1] if named else None, kind, body)


def write(path: str, text: str) -> str:
    """A command that writes a file of the new task."""
    return f'printf %s {shlex.quote(text)} > "$(echo "$KDA_ROOT"/diffusion/k*_gated_silu)/{path}"\n'


def script() -> str:
    """All of it."""
    made, patches = [COMMANDS], []
    solution = ""
    for block in blocks():
        if block.kind == "sh":
            made.append(block.body)
        elif block.file is not None:
            made.append(write(block.file, block.body))
            solution = block.body if block.file == "solution/silu_and_mul.py" else solution
        else:
            patches.append(block.body)
            if len(patches) == 2:
                made.append(write("solution/silu_and_mul.py", tuned(solution, *patches)))
    return "".join(made)


def tuned(solution: str, head: str, plan: str) -> str:
    """The solution with what stands between docstring and kernel, and its plan, replaced."""
    docstring = solution[: solution.index('"""\n', 3) + 4]
    rest = solution[solution.index("# --- kernel") :]
    start, end = rest.index("def plan("), rest.index("def _ready(")
    return f"{docstring}\n{head}{rest[:start]}{plan}{rest[end:]}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with the task that is copied."""
    copy_of_one_task(tmp_path, "docs/call_paths.md", "docs/work_on_a_task.md")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_example_from_nothing_to_a_tuned_task(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ruff")
    source = Task(checkout / "diffusion" / "k03_qknorm_rope")
    cache = cache_folder(ROOT)
    try:
        obtain(source.config.upstream["sglang-0.5.12.post1"], cache, offline=False)
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    environment = {
        **os.environ,
        "PYTHONPATH": import_path(),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "KDA_ROOT": str(checkout),
        "KDA_CACHE": str(cache),
    }
    done = subprocess.run(
        ["bash", "-c", script()], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CORRECT" in done.stdout
    assert "silu_and_mul_kernel, 1 variant" in done.stdout
    task = Task(checkout / "diffusion" / "k04_gated_silu")
    assert remarks(task) == []
    for ask in (test_form.test_files, test_form.test_card, test_form.test_notes_on_dispatch, test_form.test_contract):
        ask(task)
    test_form.test_solution(task)
    assert check_tuning.check(task) == []
    compiled = compile_task(task, task.workloads, ["sm_90a"])
    assert compiled is not None
    assert [kernel.spill_bytes for kernel in compiled] == [0]
    monkeypatch.setattr(test_form, "TASKS", [source, task])
    test_form.test_packages()


def test_documents_name_modules_that_exist() -> None:
    """By the end of their paths, as in `judge.py` or `bench/tune.py`; what blocks of code name may be elsewhere."""
    places = [f"/{path.relative_to(ROOT)}" for path in ROOT.glob("*.py")]
    places += [str(path) for folder in ("core", "diffusion") for path in (ROOT / folder).rglob("*.[pc]*")]
    made = {block.file for block in blocks()}
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"`((?!sglang/|jit_kernel/|DIR/)(?:\w+/)*\w+\.(?:py|c))`", text)) - made
        gone = [name for name in sorted(named) if not any(place.endswith(f"/{name}") for place in places)]
        assert gone == [], document
