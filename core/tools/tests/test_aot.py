import os
import re
import subprocess
import sys

import pytest
import triton

from core.tools.tests.every_task import TASKS, every_task
from kda_judge.contract.errors import ExitCode, MissingRequirement, UsageError
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_judge.contract.tensor_spec import TensorSpec
from kda_judge.contract.workloads import Workload
from kda_judge.judge.oracle import load_reference
from kda_tools.lab.inspect import aot
from kda_tools.lab.inspect.aot import compile_task, meta_tensors
from kda_tools.lab.inspect.occupancy import Occupancy, Resource
from kda_tools.lab.inspect.sass import contents

SOLUTION = """
import triton
import triton.language as tl

from kda_runtime.launch import Launch


@triton.jit
def double(y, x, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)


def launches(op, inputs, scalars):
    assert op == "double"
    x = inputs["x"]
    assert x.device.type == "meta"
    if scalars["plain"]:
        return []
    return [Launch.make(double, (triton.cdiv(x.numel(), 128),), x, x, x.numel(), BLOCK=128, num_warps=4)]
"""


def row(name, size, dtype="float32", plain=False):
    spec = TensorSpec(shape=(size, 2), stride=(2, 1), dtype=dtype)
    return Workload(id=name, op="double", inputs={"x": spec}, scalars={"plain": plain})


@pytest.fixture
def fake(tmp_path):
    """A task of a solution alone."""
    folder = tmp_path / "k90_fake" / "solution"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(SOLUTION)
    return Task(folder.parent)


SPILLED = {
    release: {("norm_scale_shift_kernel", "sm_90a", 8), ("layernorm_modulate_kernel", "sm_100a", 48)}
    for release in ("3.6.0", "3.7.1")
}
"""By version of Triton: kernels of frozen rows that spill, for what, and how many bytes. Of k05 docs/dispatch.md says
which rows they are. k10's configuration was chosen on an H100, where it does not spill."""


@every_task
def test_every_task_compiles_for_all_of_its_targets(task: Task) -> None:
    """No GPU of the second kind has run them: that they compile for it is all that is said."""
    targets = set(task.config.capabilities)
    load_reference(task)  # makes the task importable
    kernels = compile_task(task, task.workloads, sorted(targets))
    if not kernels or not targets:
        pytest.skip("no kernels, or nothing to compile them for")
    rows = {target: {row for one in kernels if one.target == target for row in one.rows} for target in targets}
    assert len(set(map(frozenset, rows.values()))) == 1
    spilled = {(one.name, one.target, one.spill_bytes) for one in kernels if one.spill_bytes}
    assert spilled <= SPILLED.get(triton.__version__, set())


def exact_of(task: Task) -> list[tuple[Task, str]]:
    """The task's ops whose exact mode is a plan of its own."""
    solution = task.load("solution")
    ops = {name: getattr(getattr(solution, name), "kda_op", None) for name in task.config.ops}
    return [(task, name) for name, op in ops.items() if op and op.exact and op.exact[0] is not op.own[0]]


@pytest.mark.parametrize(("task", "name"), [one for task in TASKS for one in exact_of(task)])
def test_upstreams_bits_cost_no_instruction(task: Task, name: str) -> None:
    solution = task.load("solution")
    op = getattr(solution, name).kda_op
    rows = [row for row in task.workloads if row.op == name and row.production]
    for row in (rows[0], rows[-1]):
        for target in task.config.targets.values():
            counts, launches = [], []
            for exact in (False, True):
                op.set_exact(exact)
                (launch,) = solution.launches(name, meta_tensors(row), row.scalars)
                launches.append(launch)
                counts.append(contents(launch.compile(target.capability).cubin).code.instructions)
            op.set_exact(False)
            assert launches[0].variant != launches[1].variant
            assert counts[0] >= counts[1], row.id


def test_equal_variants_are_compiled_once_per_target(fake):
    rows = [row("a", 64), row("b", 640), row("half", 64, "float16"), row("odd", 3), row("plain", 64, plain=True)]
    kernels = compile_task(fake, rows, ["sm_90a", "sm_100a"])
    assert [(k.target, k.rows) for k in kernels] == [
        (target, rows) for target in ("sm_90a", "sm_100a") for rows in (("a", "b"), ("half",), ("odd",))
    ]
    for kernel in kernels:
        assert kernel.name == "double"
        assert 8 <= kernel.registers <= 64
        assert kernel.shared_bytes == 0
        assert kernel.spill_bytes == 0
        assert kernel.seconds > 0
        assert kernel.threads == 128
        assert kernel.code.stores
    whole, half, odd = kernels[:3]
    assert (whole.code.loads, half.code.loads, odd.code.loads) == (((4, 1),), ((2, 1),), ((4, 1),))
    assert whole.occupancy == Occupancy(16, 64, Resource.WARPS)
    assert (whole.in_flight, half.in_flight) == (2048 * 4, 2048 * 2)
    assert kernels[0].variant == "y:float32 x:float32 n:i32%16 BLOCK=128 num_warps=4"
    assert kernels[2].variant == "y:float32 x:float32 n:i32 BLOCK=128 num_warps=4"


def test_plain_pytorch_needs_no_hook(fake):
    (fake.path / "solution" / "__init__.py").write_text("import torch\n")
    assert compile_task(fake, [row("a", 4)], ["sm_90a"]) is None


def test_kernels_without_the_hook_are_named(fake):
    init = fake.path / "solution" / "__init__.py"
    init.write_text(SOLUTION.replace("def launches", "def forgotten"))
    with pytest.raises(
        UsageError, match=rf"^{init}: has kernels \(triton, cutlass or CUDA C\+\+\) and exports no launches\(op, "
    ):
        compile_task(fake, [row("a", 4)], ["sm_90a"])


def test_interpreted_kernels_are_refused(fake):
    script = (
        "from pathlib import Path\n"
        "from kda_judge.contract.tasks import Task\n"
        "from kda_tools.lab.inspect.aot import compile_task\n"
        "from kda_judge.contract.errors import MissingRequirement\n"
        f"try: compile_task(Task(Path({str(fake.path)!r})), [], ['sm_90a'])\n"
        "except MissingRequirement as error: print(error)\n"
    )
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("TRITON_INTERPRET=1 is set")


def test_meta_tensors_have_the_rows_strides():
    view = TensorSpec(shape=(3, 4), dtype="bfloat16", stride=(40, 1))
    tensor = meta_tensors(Workload(id="v", op="o", inputs={"x": view}))["x"]
    assert (tensor.shape, tensor.stride()) == ((3, 4), (40, 1))
    assert (str(tensor.dtype), tensor.device.type) == ("torch.bfloat16", "meta")


def test_unreadable_cubin_is_an_error():
    with pytest.raises(MissingRequirement, match="cuobjdump cannot read"):
        aot.resources(b"not a cubin")


def test_the_command_takes_rows(toy, kda):
    every_op = SOLUTION.replace('assert op == "double"', "").replace('scalars["plain"]', "op == 'axpy_'")
    (toy.path / "solution" / "__init__.py").write_text(every_op)
    said = kda("compile", "axpy", "--rows", "out*")
    assert said.code == ExitCode.OK, said.err
    assert "\n  out-64x16\n" in said.out
    assert re.findall(r"^    (sm_\w+)", said.out, re.MULTILINE) == ["sm_90a"]
    said = kda("compile", "axpy", "--rows", "inplace*")
    assert said.code == ExitCode.OK, said.err
    assert "no kernel: these rows take the plain path" in said.out
    said = kda("compile", "axpy", "--rows", "none*")
    assert said.code == ExitCode.USAGE
    assert "--rows 'none*': no such row" in said.err


def test_the_command_says_that_plain_pytorch_has_nothing_to_compile(toy, kda):
    solution = toy.path / "solution" / "__init__.py"
    solution.write_text(solution.read_text().partition("def launches")[0])
    expected = "no kernels to compile: solution has no launches(op, inputs, scalars)\n"
    assert kda("compile", "axpy")[:2] == (ExitCode.OK, expected)
