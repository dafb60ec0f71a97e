"""`kda apply` on the files of both pinned releases: what is replaced, taken, handed back, refused, and counted.

The command of these tests is a Python script that imports upstream's real modules, extracted from the pinned wheel
into a temporary folder as pip would install them, with the judge's stand-ins around. Kernels are interpreted by Triton.
"""

import os
import shutil
import subprocess
import sys
import textwrap
import zipfile

import pytest
from typer.testing import CliRunner

from core.tools.tests.every_task import TASKS, calls_of_chains
from kda_judge.arms.upstream import cache_folder, obtain, read_lock
from kda_judge.contract.errors import MissingRequirement, UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task, checkout_root
from kda_tools.cli.base import app
from kda_tools.models import apply_site
from kda_tools.models.apply_counts import Counted, Counts, gather
from kda_tools.models.apply_run import Report, demand_applied, found_command, lines, report

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("cutlass")

RELEASES = ("0.5.12.post1", "0.5.23")
PRELUDE = """
import importlib, sys, types
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch
import torch
from kda_judge.arms.sglang_standins import Finder
from kda_judge.arms.triton_interpreter import convert_as_a_gpu_does
convert_as_a_gpu_does()
TREE, VERSION, *ARGS = sys.argv[1:]
sys.meta_path.insert(1, Finder(Path(TREE), VERSION))
OLD = VERSION == "0.5.12.post1"
def load(old, new):
    # Some modules choose their path at import, and ask the device for its properties: without a GPU one is feigned.
    feigned = {"is_available": lambda: True, "current_device": lambda: 0,
               "get_device_properties": lambda *_: types.SimpleNamespace(warp_size=32)}
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            for name, value in feigned.items():
                stack.enter_context(patch.object(torch.cuda, name, value))
            stack.enter_context(patch.object(torch.version, "cuda", "13.0"))
            stack.enter_context(patch.object(torch, "get_device_module", lambda *_: torch.cuda))
        return importlib.import_module("sglang." + (old if OLD else new))
NORM = ("jit_kernel.diffusion.triton.norm", "kernels.ops.diffusion.norm.norm_triton")
"""


@pytest.fixture(scope="session", params=RELEASES)
def installed(request, tmp_path_factory):
    """A folder as pip leaves it, with every file of this release that a task has locked, and the release's name."""
    version = request.param
    if sys.version_info < (3, 11) and version == RELEASES[1]:
        pytest.skip("this release needs Python 3.11")
    return install(tmp_path_factory.mktemp("installed"), version), version


def install(folder, version):
    pins = [(p, task.path / p.files) for task in TASKS for p in task.config.upstream.values() if p.version == version]
    try:
        wheel = obtain(pins[0][0], cache_folder(checkout_root()), offline=True)
    except MissingRequirement as absent:
        pytest.skip(str(absent))
    names = {name for _, lock in pins for name in read_lock(lock)}
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [*names, f"sglang-{version}.dist-info/METADATA"])
    (folder / "sglang" / "__init__.py").touch()  # upstream's own imports a server's packages
    return folder


def apply(folder, version, code, *options, interpret=True, release=None):
    """Run `kda apply OPTIONS -- python SCRIPT`; what it printed, and its report."""
    script, file = folder / "command.py", folder / "report.json"
    script.write_text(PRELUDE + textwrap.dedent(code))
    file.unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), import_path()]), "COLUMNS": "200"}
    env |= {"TRITON_INTERPRET": "1"} if interpret else {}
    command = [sys.executable, "-m", "kda_tools", "apply", "--json", str(file), *options, "--"]
    command += [sys.executable, str(script), str(folder), version]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return ran, Report.model_validate_json(file.read_text()) if file.exists() else None


def succeed(installed, code, *options, **more):
    """`apply` with a command that ends well."""
    ran, done = apply(*installed, code, *options, **more)
    assert ran.returncode == 0, ran.stderr
    return ran, done


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def of(done, function):
    return next(calls for calls in done.functions if calls.function == function)


def test_the_plan_has_every_function_of_both_releases() -> None:
    plan = apply_site.replacements(TASKS)
    functions = {version: {one.function for one in plan if one.version == version} for version in RELEASES}
    assert {"norm_infer", "fused_inplace_qknorm_rope", "apply_group_norm_silu"} <= functions[RELEASES[1]]
    for task in TASKS:
        stand = {name: arm.upstream for name, arm in task.config.arms.items() if arm.upstream}
        arms = {task.config.upstream[pin].version: name for name, pin in stand.items()}
        for version in RELEASES:
            # What upstream has as a chain of calls only, there is no function to replace for.
            arm = arms.get(version)
            one = set(task.config.ops_of(arm)) - set(calls_of_chains(task, arm)) if arm else set()
            assert set(task.config.ops) & functions[version] == one, (task.op, version)


def test_upstreams_bits_are_of_the_functions_that_can() -> None:
    plan = [*apply_site.replacements(TASKS), *apply_site.sites(TASKS)]
    exact = {one.function for one in apply_site.exact_only(TASKS, plan)}
    assert {"fuse_scale_shift_kernel", "apply_rotary_embedding", "fused_gelu_tanh_cat"} <= exact
    assert {name for name in exact if "norm" in name} == {
        *("fused_layernorm_modulate", "rounded_qknorm_rope", "rounded_rmsnorm_modulate"),
        *("rounded_residual_rmsnorm_modulate", "rounded_residual_rmsnorm_modulate2"),
    }
    blocks = {one.block for one in apply_site.exact_only(TASKS, plan)}
    assert {"ZImageAttention", "LTX2TransformerBlock", "MMSingleStreamBlock"} <= blocks
    assert "FluxTransformerBlock" not in blocks, "its lines round the gated sums once"
    done = CliRunner().invoke(app, ["apply", "--exact", "--ops", "k05", "--", sys.executable, "-c", "1"])
    assert "--exact: expected a task with an exact mode, got norm_scale_shift" in str(done.exception)


def test_calls_are_taken_and_nothing_is_written_to_the_installation(installed) -> None:
    folder, version = installed
    files = contents(folder / "sglang")
    code = """
    norm = load(*NORM)
    x = torch.randn(4, 64)
    y = norm.norm_infer(x, None, None, eps=1e-6)
    expected = torch.nn.functional.layer_norm(x, (64,), eps=1e-6)
    torch.testing.assert_close(y, expected)
    print(norm.norm_infer.__module__)
    """
    ran, done = succeed(installed, code)  # all tasks
    assert ran.stdout.strip() == "kda_applied.norm_infer.norm"
    assert contents(folder / "sglang") == files
    assert (of(done, "norm_infer").taken, of(done, "norm_infer").fell_back) == (1, {})
    assert not of(done, "triton_one_pass_rms_norm").replaced
    assert (done.releases, done.processes, done.exit_code) == ([version], 1, 0)
    assert "norm_infer: 1 calls taken, 0 fell back to upstream" in ran.stderr
    assert "triton_one_pass_rms_norm: its module was not imported" in ran.stderr


def test_a_call_that_the_kernels_do_not_take_is_upstreams_own(installed) -> None:
    code = """
    module = load("jit_kernel.diffusion.group_norm_silu", "kernels.ops.diffusion.norm.group_norm_silu")
    norm, act = torch.nn.GroupNorm(4, 8), torch.nn.SiLU()
    original = module.apply_group_norm_silu
    x = torch.randn(2, 8, 5, requires_grad=True)
    torch.testing.assert_close(module.apply_group_norm_silu(x, norm, act), act(norm(x)))
    with torch.no_grad():
        torch.testing.assert_close(module.apply_group_norm_silu(x.detach(), norm, act), act(norm(x)))
    """
    _, done = succeed(installed, code, "--ops", "group_norm_silu")
    calls = of(done, "apply_group_norm_silu")
    assert calls.taken + sum(calls.fell_back.values()) == 2
    assert any("grad" in reason for reason in calls.fell_back), calls


def test_upstream_is_called_with_the_same_arguments_and_the_reason_is_kept(installed) -> None:
    code = """
    norm = load(*NORM)
    seen = []
    for name, value in list(vars(norm).items()):  # upstream's own, behind what took its place
        if name == "norm_infer":
            cells = dict(zip(value.__code__.co_freevars, value.__closure__))
            cells["original"].cell_contents = lambda *args, **kwargs: seen.append((args, kwargs)) or "upstream's"
    x = torch.randn(4, 64, dtype=torch.float64)
    assert norm.norm_infer(x, None, None, eps=1e-6) == "upstream's"
    assert norm.norm_infer(x[0], None, None, eps=1e-6) == "upstream's"
    assert seen[0][0][0] is x and seen[0][1] == {"eps": 1e-6} and len(seen) == 2
    """
    ran, done = succeed(installed, code, "--ops", "norm_infer")
    calls = of(done, "norm_infer")
    assert calls.taken == 0
    assert len(calls.fell_back) == 2, calls
    assert any("float64" in reason for reason in calls.fell_back)
    assert "0 calls taken, 2 fell back to upstream" in ran.stderr


def test_a_name_that_was_bound_before_is_replaced_too(installed) -> None:
    # A module that upstream's imports while it is being executed, as in a circle, and that has the function by then.
    code = """
    import builtins
    name = "sglang." + NORM[not OLD]
    early = types.ModuleType("sglang.early")
    sys.modules["sglang.early"] = early
    spec_of = importlib.util.find_spec(name)
    inner = type(spec_of.loader).exec_module
    def execute(self, module):
        inner(self, module)
        if module.__name__ == name:
            early.bound_before = module.norm_infer
    type(spec_of.loader).exec_module = execute
    norm = load(*NORM)
    assert early.bound_before is norm.norm_infer, early.bound_before
    assert early.bound_before.__module__.startswith("kda_applied")
    """
    succeed(installed, code, "--ops", "k01")


def test_torch_compile_takes_the_solution_without_a_break(installed) -> None:
    code = """
    norm = load(*NORM)
    def step(x):
        return norm.norm_infer(x, None, None, 1e-6) * 2
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(4, 64)
        torch.testing.assert_close(compiled(x), torch.nn.functional.layer_norm(x, (64,), eps=1e-6) * 2)
    compiled(torch.randn(4, 64, dtype=torch.float64))
    """
    ran, done = succeed(installed, code, "--ops", "k01")
    calls = of(done, "norm_infer")
    assert (calls.taken, calls.compiled, list(calls.plain.values())) == (0, 3, [1])
    assert "0 calls taken and 3 in compiled graphs" in ran.stderr


def test_ops_in_place_are_written_once(installed) -> None:
    code = """
    module = load("jit_kernel.diffusion.qknorm_rope", "kernels.ops.diffusion.rope.qknorm_rope_jit")
    q = torch.randn(3, 2, 64, dtype=torch.bfloat16)
    k, w = q.clone(), torch.ones(64, dtype=torch.bfloat16)
    before, cache = q.clone(), torch.cat((torch.ones(3, 32), torch.zeros(3, 32)), -1)
    assert module.fused_inplace_qknorm_rope(q, k, w, w, cache, torch.arange(3), is_neox=True, rope_dim=64) is None
    wide = before.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(q.float(), expected, atol=0.05, rtol=0.02)
    """
    _, done = succeed(installed, code, "--ops", "k03")
    assert of(done, "fused_inplace_qknorm_rope").taken == 1


def test_both_forms_in_children_that_are_killed(installed) -> None:
    """Workers inherit the hook, and what they counted outlives them; so do exit code and output of the command."""
    folder, version = installed
    form = dict(zip(RELEASES, ("portable", "runtime"), strict=True))[version]
    code = """
    import os, signal, subprocess
    if ARGS == ["worker"]:
        norm = load(*NORM)
        for _ in range(5):
            norm.norm_infer(torch.randn(4, 64), None, None, 1e-6)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        subprocess.run([sys.executable, __file__, TREE, VERSION, "worker"])
    print("said")
    sys.exit(7)
    """
    ran, done = apply(folder, version, code, "--ops", "k01", "--form", form)
    assert (ran.returncode, ran.stdout) == (7, "said\n"), ran.stderr
    assert (of(done, "norm_infer").taken, done.processes, done.form) == (10, 2, form)


def test_a_forked_child_counts_for_itself(tmp_path) -> None:
    counts, counted = Counts(tmp_path), Counted("f", "taken")
    slot = counts.slot(counted)
    counts.view[slot] += 3
    if (child := os.fork()) == 0:
        counts.view[slot] += 4
        counts.add(Counted("f", "fell_back", "why"))
        os._exit(0)
    os.waitpid(child, 0)
    counts.view[slot] += 1
    found = gather(tmp_path)
    assert found.calls == {counted: 8, Counted("f", "fell_back", "why"): 1}
    assert found.processes == 2


def test_a_line_that_was_cut_short_and_too_many_reasons(tmp_path) -> None:
    counts = Counts(tmp_path)
    for number in range(5000):
        counts.add(Counted("f", "fell_back", f"shape {number}"))
    counts.add(Counted("g", "taken"))
    (log,) = tmp_path.glob("*.jsonl")
    with log.open("a") as file:
        file.write('{"event": "repl')
    calls = gather(tmp_path).calls
    assert calls.total() == 5001
    assert calls[Counted("g", "taken")] == 1, "reasons leave counters to functions"


def test_a_changed_file_of_the_release_is_left_alone(tmp_path) -> None:
    folder = install(tmp_path, RELEASES[0])
    changed = folder / "sglang/jit_kernel/diffusion/triton/norm.py"
    changed.write_text(changed.read_text() + "\n# changed here\n")
    code = """
    norm = load(*NORM)
    print(norm.norm_infer.__module__)
    """
    ran, done = apply(folder, RELEASES[0], code, "--ops", "k01")
    assert ran.stdout.startswith("sglang."), ran.stderr
    assert "not replaced: ValueError" in ran.stderr
    assert "expected the release's file, sha256" in of(done, "norm_infer").left[0]


def test_an_unknown_release_is_refused_before_and_inside_the_command(tmp_path) -> None:
    metadata = tmp_path / "sglang-0.9.9.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.9.9\n")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    ran, _ = apply(tmp_path, "0.9.9", "", "--ops", "k01")
    assert ran.returncode == 3
    assert f"expected sglang {' or '.join(RELEASES)}, got 0.9.9" in ran.stderr
    # A program whose first line names no Python can only be refused from inside.
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c 'import sglang'\n")
    program.chmod(0o755)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), import_path()])}
    command = [sys.executable, "-m", "kda_tools", "apply", "--ops", "k01", "--", str(program)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert "kda apply: sglang 0.9.9 is not known here" in ran.stderr
    assert "got 0.9.9" not in ran.stderr


def test_a_command_that_never_imports_sglang(tmp_path) -> None:
    program = tmp_path / "program"
    looks = "import importlib.util; assert importlib.util.find_spec('sglang')"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{looks}"\n')
    program.chmod(0o755)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), import_path()])}
    command = [sys.executable, "-m", "kda_tools", "apply", "--ops", "k01", "--", str(program)]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 3
    assert "no process of the command imported sglang with the hook" in ran.stderr


def test_a_sitecustomize_of_the_user_still_runs(tmp_path) -> None:
    folder = install(tmp_path, RELEASES[0])
    (folder / "sitecustomize.py").write_text("print('theirs')\n")
    ran, done = apply(folder, RELEASES[0], "load(*NORM)", "--ops", "k01")
    assert "theirs" in ran.stdout.splitlines()
    assert of(done, "norm_infer").replaced


def test_the_report_is_about_the_releases_that_were_imported(tmp_path) -> None:
    functions = {"1": ["f", "gone"], "2": ["f", "g"]}
    assert report(gather(tmp_path), ["x"], 0, functions, "portable").functions == []
    counts = Counts(tmp_path)
    counts.log_event("began", version="2", command=[])
    counts.log_event("left", function="f", reason="ImportError: no triton")
    said = lines(report(gather(tmp_path), ["x"], 0, functions, "portable"))
    assert said == [
        "kda apply: sglang 2, portable form, 1 process",
        "  no call was taken: this run is SGLang's own",
        "  f: 0 calls taken, 0 fell back to upstream",
        "    not replaced: ImportError: no triton",
        "  g: its module was not imported",
    ]


def test_a_solution_that_does_not_import_leaves_upstreams(tmp_path) -> None:
    folder = install(tmp_path, RELEASES[0])
    code = """
    import importlib.abc
    class Refuse(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "kda_applied.norm_infer._kda.op":
                raise ImportError("no such thing here")
    sys.meta_path.insert(0, Refuse())
    norm = load(*NORM)
    x = torch.randn(4, 64)
    torch.testing.assert_close(norm.norm_infer(x, None, None, 1e-6), torch.nn.functional.layer_norm(x, (64,), eps=1e-6))
    """
    _, done = succeed((folder, RELEASES[0]), code, "--ops", "k01")
    assert of(done, "norm_infer").left == ["ImportError: no such thing here"]


def test_bad_inputs(tmp_path) -> None:
    with pytest.raises(UsageError, match="expected a command after `--`"):
        found_command([])
    with pytest.raises(UsageError, match="no-such-program: expected a program"):
        found_command(["no-such-program"])
    with pytest.raises(UsageError, match=r"--ops k99: expected a task, nearest: .*k0"):
        apply_site.chosen_tasks(TASKS, ["k03,k99"])
    with pytest.raises(UsageError, match=r"--ops '': expected a task"):
        apply_site.chosen_tasks(TASKS, [""])
    chosen = apply_site.chosen_tasks(TASKS, ["k03, norm_infer", "k05_norm_scale_shift"])
    assert [task.op for task in chosen] == ["norm_infer", "qknorm_rope", "norm_scale_shift"], "in the tasks' order"
    unmeasured = Task(tmp_path / "k97_qknorm_rope")
    shutil.copytree(chosen[0].path, unmeasured.path, ignore=shutil.ignore_patterns("docs"))
    assert apply_site.chosen_tasks([*chosen, unmeasured], []) == chosen
    assert apply_site.chosen_tasks([*chosen, unmeasured], ["k97"]) == [unmeasured]
    done = Report(command=[], exit_code=0, form="portable", releases=[], refused=["1.0"], processes=1, functions=[])
    with pytest.raises(MissingRequirement, match=r"sglang 1\.0: expected 0\.5"):
        demand_applied(done, RELEASES)


def test_bad_options_are_refused_before_the_command_runs(tmp_path) -> None:
    touched = tmp_path / "touched"
    for options, error, message in (
        (["--form", "fast"], UsageError, "--form: expected portable or runtime, got 'fast'"),
        (["--json", str(tmp_path / "no" / "file")], UsageError, "expected a file in a folder that exists"),
        (["--ops", "k99"], UsageError, "--ops k99: expected a task"),
    ):
        done = CliRunner().invoke(app, ["apply", *options, "--", "touch", str(touched)])
        assert isinstance(done.exception, error), done.output
        assert message in str(done.exception)
    assert not touched.exists()


def test_two_tasks_that_replace_one_function(tmp_path) -> None:
    from kda_judge.contract.tasks import Task

    task = next(task for task in TASKS if task.op == "norm_infer")
    copy = tmp_path / "k98_norm_infer_again"
    shutil.copytree(task.path, copy, ignore=shutil.ignore_patterns("docs", "__pycache__"))
    config = copy / "config.toml"
    config.write_text(config.read_text().replace('op = "norm_infer"', 'op = "norm_infer_again"', 1))
    with pytest.raises(UsageError, match="norm_infer_again and norm_infer both replace norm_infer"):
        apply_site.replacements([task, Task(copy)])


@pytest.mark.gpu
def test_inside_a_cuda_graph(installed) -> None:
    code = """
    norm = load(*NORM)
    x = torch.randn(64, 1024, device="cuda")
    norm.norm_infer(x, None, None, 1e-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = norm.norm_infer(x, None, None, 1e-6)
    x.normal_()
    graph.replay()
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (1024,), eps=1e-6))
    """
    _, done = succeed(installed, code, "--ops", "k01", interpret=False)
    assert of(done, "norm_infer").taken == 2
