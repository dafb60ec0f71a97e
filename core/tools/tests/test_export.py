"""`kda export`: what it writes works without this repository, names its origin, and gives the solution's bits."""

import hashlib
import inspect
import itertools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch

from core.tools.tests.every_task import ROOT, TASKS, every_task
from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_judge.evidence.ledger import read
from kda_judge.evidence.provenance import content_hash
from kda_runtime import tuned_table
from kda_tools.project.export import plain_table
from kda_tools.project.export.compare import compare
from kda_tools.project.export.sources import collect
from kda_tools.project.export.write import export, next_steps, write_arm
from kda_tools.publish.report import published

NORM = Task(ROOT / "diffusion" / "k01_norm_infer")
WITHOUT_KDA = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ImportError(name + " is not here")
sys.meta_path.insert(0, Absent())
"""
CALL = """
import torch
import {name}
x, w = torch.randn(3, 128), torch.randn(128)
y = {name}.triton_one_pass_rms_norm(x, w)
torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (128,), w, 1e-6))
"""

BINDS = """
import torch
from exported import dsl
from exported._kda import cubin
from exported._kda.launch import Chain
from exported._kda.plans import plain_entry
from exported.cluster import ClusterLaunch
from exported.plans import Config
loaded, checked, launched = [], [], []
cubin._loaded = lambda *given: loaded.append(given) or 7
cubin._call = lambda name, *given: name == "cuLaunchKernelEx" and launched.append(1)
dsl.code = lambda *_: b""
torch.cuda.current_device = lambda: 0
torch.cuda.get_device_capability = lambda *_: (9, 0)
torch._C._cuda_getCurrentRawStream = lambda _: 5
cubin.CubinLaunch._check_params = lambda *_: checked.append(1)
x, weight = torch.zeros(2, 8, 4, 16, dtype=torch.float16), torch.zeros(8, dtype=torch.float16)
config = Config("cluster", 8, 1, blocks=8)
launch = ClusterLaunch((torch.float16,) * 3, (16, 8, 8, 4, 2), 0.5, config, Chain((), ()))
entry = plain_entry(Chain((launch,), ((0, 1, 2, 3),), (0,)), (x, weight, weight), ())
for _ in range(3):
    entry(x, weight, weight)
print(len(loaded), len(checked), len(launched))
"""


def python(script, folder):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)


@every_task
def test_gives_the_bits_of_the_solution(task, tmp_path):
    said = compare(task, export(task, tmp_path / "exported", "plain", runtime=False))
    calls, kernels = map(int, re.match(r"(\d+) calls .* (\d+) of them by the kernels", said).groups())
    # Nothing interprets CUDA C++: without a GPU all its calls take the plain path.
    solution = task.load("solution")
    interpreted = any(getattr(solution, op).kda_op.kernel for op in task.config.ops)
    assert calls >= kernels
    assert kernels > 0 or not (interpreted or torch.cuda.is_available())


def test_an_exact_export_gives_the_bits_of_the_exact_solution(tmp_path):
    (task,) = (task for task in TASKS if task.op == "fuse_scale_shift")
    package = export(task, tmp_path / "exported", "plain", runtime=False, exact=True)
    assert "upstream's bits, in `fuse_scale_shift_kernel`: " in (package / "README.md").read_text(encoding="utf-8")
    assert "def set_exact" in (package / "_kda" / "op.py").read_text(encoding="utf-8")
    assert compare(task, package, exact=True)
    with pytest.raises(UsageError, match=r"row '.*', output 'y': \d+ of \d+ elements have other bits"):
        compare(task, package)
    with pytest.raises(UsageError, match="--exact: k01_norm_infer: no op of it has an exact mode"):
        export(NORM, tmp_path / "other", "plain", runtime=False, exact=True)
    assert not (tmp_path / "other").exists()


def test_other_bits_are_refused(tmp_path):
    package = export(NORM, tmp_path / "exported", "plain", runtime=False)
    kernels = package / "_kda" / "triton_rows.py"
    text = kernels.read_text(encoding="utf-8")
    changed = text.replace("tl.rsqrt(", "1.001 * tl.rsqrt(", 1)
    assert changed != text
    kernels.write_text(changed, encoding="utf-8")
    with pytest.raises(UsageError, match=r"row '.*', output '.*': \d+ of \d+ elements have other bits"):
        compare(NORM, package)


@pytest.mark.parametrize(
    ("runtime", "absent"), [(False, "kda_runtime kda_judge kda_tools"), (True, "kda_judge kda_tools")]
)
def test_imports_nothing_else(runtime, absent, tmp_path):
    export(NORM, tmp_path / "exported", "plain", runtime)
    folders = [tmp_path, *([ROOT / "core" / "runtime" / "src"] if runtime else [])]
    done = python(WITHOUT_KDA.format(names=absent.split()) + CALL.format(name="exported"), ":".join(map(str, folders)))
    assert done.returncode == 0, done.stderr


def test_binds_a_kernel_of_the_dsl_once(tmp_path):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (task,) = (task for task in TASKS if task.op == "group_norm_silu")
    export(task, tmp_path / "exported", "plain", runtime=False)
    done = python(WITHOUT_KDA.format(names=["kda_runtime"]) + BINDS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 1 3\n", "loaded, parameters checked, launched"


def test_with_the_runtime_it_carries_no_copy(tmp_path):
    package = export(NORM, tmp_path / "exported", "plain", runtime=True)
    assert not (package / "_kda").exists()
    done = python(WITHOUT_KDA.format(names=["kda_runtime"]) + CALL.format(name="exported"), tmp_path)
    assert "kda_runtime is not here" in done.stderr


def test_the_package_kernels_loads_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kernels = pytest.importorskip("kernels", reason="needs the package kernels")
    export(NORM, tmp_path / "hub", "hf", runtime=False)
    assert [path.name for path in (tmp_path / "hub" / "build").iterdir()] == ["torch-cuda"], "a CPU may have no Triton"
    cuda = kernels.backends.CUDA(version=kernels.variants.Version("13.0"))
    monkeypatch.setattr(kernels.variants, "_select_backend", lambda _: cuda)
    loaded = kernels.get_local_kernel(tmp_path / "hub")
    assert set(NORM.config.ops) <= set(vars(loaded))
    assert loaded.__file__ == str(tmp_path / "hub" / "build" / "torch-cuda" / "__init__.py")
    for path in (tmp_path / "hub" / "build").rglob("*.py"):  # the Hub's rule: imports within the kernel are relative
        assert "import kda_" not in path.read_text(encoding="utf-8")
        assert "from kda_" not in path.read_text(encoding="utf-8")
    steps = next_steps(NORM, tmp_path / "hub")
    assert "hf upload ORGANISATION/kda_norm_infer hub --repo-type kernel --revision v1\n" in steps
    assert steps in (tmp_path / "hub" / "README.md").read_text(encoding="utf-8")


@every_task
def test_the_table_without_toml_chooses_the_same(task, tmp_path):
    """Around every bound of every line, for capabilities with lines and without."""
    if not (task.path / "solution" / tuned_table.FILE).is_file():
        pytest.skip(f"no {tuned_table.FILE}: nothing to choose")
    package = export(task, tmp_path / "exported", "plain", runtime=False)
    solution, compared = task.load("solution"), 0
    for module in {inspect.getmodule(getattr(solution, op).kda_op.plan) for op in task.config.ops}:
        table = module.TUNED
        small = plain_table.Table(str(package / "norm.py"), table.name, table.config)
        assert small.configs == table.configs
        bounds = {}
        for line, _ in table.lines:
            for name, bound in line.at_most.items():
                bounds.setdefault(name, {0, 1 << 60}).update((bound - 1, bound, bound + 1))
        for capability, *values in itertools.product((8, 9, 10, 12), *bounds.values()):
            features = dict(zip(bounds, values, strict=True))
            try:
                wanted = table.select(capability, **features)
            except tuned_table.TableError:
                with pytest.raises(ValueError, match="expected a line of capability 9"):
                    small.select(capability, **features)
            else:
                assert small.select(capability, **features) == wanted, (capability, features)
            compared += 1
    assert compared >= 4


def test_an_export_needs_no_toml(tmp_path):
    package = export(NORM, tmp_path / "exported", "plain", runtime=False)
    assert not list(package.rglob("*.toml"))
    lines = json.loads((package / "tuned.json").read_text(encoding="utf-8"))["norm"]
    read_ones = tuned_table.read(NORM.path / "solution" / "tuned.toml")["norm"]
    assert [line["measured"] for line in lines] == [f"{line.device}, {line.date}" for line in read_ones]
    assert len((package / "tuned.json").read_text(encoding="utf-8").splitlines()) == len(lines) + 4
    absent = ["kda_runtime", "kda_judge", "kda_tools", "tomllib", "tomli"]
    done = python(WITHOUT_KDA.format(names=absent) + CALL.format(name="exported"), tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_line_that_was_not_measured_says_so(tmp_path):
    (task,) = (task for task in TASKS if task.op == "temperature_softmax")
    copy = tmp_path / "llm" / task.folder
    shutil.copytree(task.path, copy, ignore=shutil.ignore_patterns("*.jsonl"))
    table = copy / "solution" / "tuned.toml"
    guess = re.sub(r'device = ".*"', 'device = "none"', table.read_text(encoding="utf-8"))
    table.write_text(re.sub(r'reason = ".*"', 'reason = "not measured: a guess"', guess), encoding="utf-8")
    package = export(Task(copy), tmp_path / "exported", "plain", runtime=False)
    for lines in json.loads((package / "tuned.json").read_text(encoding="utf-8")).values():
        assert all(line["measured"].startswith("not measured") for line in lines)
    assert "Not measured yet." in (package / "README.md").read_text(encoding="utf-8")


def test_what_a_record_hashes_of_an_export_is_the_same_once_a_run_is_published(tmp_path, monkeypatch):
    measured, unmeasured = (tmp_path / name / "exported" for name in ("measured", "unmeasured"))
    for folder in (measured, unmeasured):
        export(NORM, folder, "plain", runtime=False)
        monkeypatch.setattr("kda_tools.project.export.readme.published_runs", lambda *_: {})
    assert (measured / "README.md").read_text() != (unmeasured / "README.md").read_text()
    arm = write_arm(NORM, tmp_path / "arm")
    assert not (arm / "README.md").exists()
    folders = (measured, unmeasured, arm)
    assert len({content_hash(one, ["**/*"], without=["README.md", "provenance.json"]) for one in folders}) == 1


@every_task
def test_an_export_has_no_name_that_is_not_there(task, tmp_path):
    """Ruff's F, of what was left out of the modules."""
    package = export(task, tmp_path / "exported", "plain", runtime=False)
    solution = {path.relative_to(task.path / "solution") for path in (task.path / "solution").rglob("*.py")}
    ours = [str(path) for path in package.rglob("*.py") if path.relative_to(package) not in solution]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", *ours]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    whole = sum(len(text.splitlines()) for name, text in collect(task, False).items() if "_kda/" in name)
    left = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in (package / "_kda").rglob("*.py"))
    assert left < 0.8 * whole


def test_says_where_it_comes_from(tmp_path):
    package = export(NORM, tmp_path / "exported", "plain", runtime=False)
    origin = json.loads((package / "provenance.json").read_text(encoding="utf-8"))
    assert (origin["task"], origin["op"]) == (NORM.folder, NORM.op)
    assert set(origin["files"]) == {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and path.name not in ("README.md", "provenance.json")
    }
    for name, digest in origin["files"].items():
        assert hashlib.sha256((package / name).read_bytes()).hexdigest() == digest, name
    runs = {record.run_id for record in published(NORM, read(NORM.ledger)).values()}
    assert {run["run_id"] for run in origin["published_runs"].values()} == runs


def test_the_readme_is_made_of_the_record(tmp_path):
    text = (export(NORM, tmp_path / "exported", "plain", runtime=False) / "README.md").read_text(encoding="utf-8")
    assert "from exported import norm_infer" in text
    assert "y = x / sqrt(mean(x^2) + eps)" in text
    for record in published(NORM, read(NORM.ledger)).values():
        assert record.run_id in text
        for row in record.rows:
            if row.production:
                assert f"| {row.id} | {row.arms['solution'].summary['device'].median:.2f}"[:-1] in text


@pytest.mark.parametrize(
    ("folder", "form", "runtime", "why"),
    [
        ("full", "plain", False, "expected a new or an empty folder"),
        ("not-a-name", "plain", False, "expected a folder whose name Python can import"),
        ("class", "plain", False, "expected a folder whose name Python can import"),
        ("new", "hf", True, "--runtime: a Hub kernel may depend on"),
    ],
)
def test_refuses(folder, form, runtime, why, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("", encoding="utf-8")
    with pytest.raises(UsageError, match=why):
        export(NORM, tmp_path / folder, form, runtime)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]
