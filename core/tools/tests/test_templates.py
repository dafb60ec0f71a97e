"""Every template makes a whole task: in form, valid, tested, verified on a CPU and compiled for every target."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from core.tools.tests import test_form
from core.tools.tests.every_task import ROOT, copy_of_one_task
from kda_judge.contract.errors import UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import find_task, find_tasks
from kda_tools.cli.base import app
from kda_tools.cli.measure import _not_interpreted
from kda_tools.lab.inspect.aot import compile_task
from kda_tools.project.from_template import NAMES, from_template
from kda_tools.project.new_task import IGNORED
from kda_tools.project.validate import problems, remarks
from kda_tools.publish.generate import publish

pytest.importorskip("torch")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one task."""
    copy_of_one_task(tmp_path)
    monkeypatch.setenv("KDA_ROOT", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    publish(find_tasks(), check=False)
    return tmp_path


def run(checkout: Path, *command: str, **more: str) -> str:
    env = {**os.environ, "PYTHONPATH": import_path(), "KDA_ROOT": str(checkout), **more}
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_every_template_is_a_whole_task(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ruff")
    for template in NAMES:
        from_template(template, f"my_{template.replace('-', '_')}")
    tasks = [task for task in find_tasks() if task.op.startswith("my_")]
    assert len(tasks) == len(NAMES) == 8
    source = find_task("qknorm_rope")
    monkeypatch.setattr(test_form, "TASKS", [source, *tasks])
    for task in tasks:
        assert problems(task) == []
        (remark,) = remarks(task)  # which keeps it off the pages until its rows are somebody's
        assert "rows of the template's model" in remark
        for ask in (
            test_form.test_files,
            test_form.test_card,
            test_form.test_notes_on_dispatch,
            test_form.test_contract,
        ):
            ask(task)
        test_form.test_solution(task)
        assert "@" not in "".join(path.read_text() for path in task.path.rglob("*.md"))
    test_form.test_packages()
    places = [str(task.path.relative_to(checkout)) for task in tasks]
    run(checkout, "-m", "ruff", "check", "-q", *places)
    run(checkout, "-m", "ruff", "format", "-q", "--check", *places)
    said = run(checkout, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *places, TRITON_INTERPRET="1")
    assert "failed" not in said
    assert "skipped" not in said
    # What every task has to do: tracing, graphs, plans, gradients and errors. Those tests take the tasks beside them.
    for tests in ("core/tools/tests", "core/judge/tests"):
        shutil.copytree(ROOT / tests, checkout / tests, ignore=IGNORED)
    whole = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "core/tools/tests/test_conformance.py")
    said = run(checkout, *whole, "-k", "silu-e or rms_norm-e or adaln-e or rope-e or silu-1x or adaln-1x")
    assert int(re.search(r"(\d+) passed", said)[1]) > 60  # type: ignore[index]
    for task in tasks:
        assert bool(_not_interpreted(task)) == ("cuda" in task.op)
        if "cuda" in task.op and shutil.which("nvcc") is None:
            continue
        compiled = compile_task(task, task.workloads, ["sm_90a"])
        assert compiled
        assert [kernel.spill_bytes for kernel in compiled] == [0] * len(compiled)
        for kernel in compiled:  # 16 bytes a thread: an alignment that the compiler does not see would split them
            assert 16 in {width for width, _ in kernel.code.loads}, (task.op, kernel.code.loads)


@pytest.mark.parametrize("template", ["triton-silu", "cuda-silu"])
def test_exports_of_a_template(checkout: Path, template: str) -> None:
    """The rest of the tests that the command in AGENTS.md names."""
    from_template(template, "my_silu")
    for tests in ("core/tools/tests", "core/judge/tests"):
        shutil.copytree(ROOT / tests, checkout / tests, ignore=IGNORED)
    words = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "core/tools/tests/test_export.py")
    assert "2 passed, 1 skipped" in run(checkout, *words, "-k", "my_silu")


def test_the_command_and_a_run_of_the_judge(checkout: Path) -> None:
    done = CliRunner().invoke(app, ["new", "--template", "triton-adaln", "my_ada"], catch_exceptions=False)
    assert done.output.startswith("diffusion/k04_my_ada: read prompt.md")
    said = run(
        checkout, "-m", "kda_tools", "bench", "my_ada", "--generations", "1", "--device", "cpu", "--rows", "*512*"
    )
    assert "CORRECT" in said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["new", "--template", "triton-gelu", "x"], "expected one of triton-silu, triton-rmsnorm"),
        (["new", "--template", "triton-silu", "qknorm_rope"], "op 'qknorm_rope' is taken by"),
        (["new", "--template", "triton-silu", "My-Op"], "expected family/kNN_op"),
        (["new", "--template", "triton-silu", "a", "b"], "expected the new op alone"),
        (["new", "qknorm_rope"], "expected the task to copy and the new op's name"),
    ],
)
def test_bad_words_are_named(checkout: Path, words: list[str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert len(find_tasks()) == 1
