"""The design in CUDA C++: compiled ahead of time on any machine with nvcc, run on a GPU."""

import shutil
from pathlib import Path

import pytest
import torch

from kda_judge.contract.tasks import Task
from kda_tools.lab.inspect.aot import compile_task

from ..lab import cuda_cpp
from .cases import assert_one_pass, normal

pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TASK = Task(Path(__file__).parents[1])


@needs_nvcc
@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
def test_compiles_without_spills_with_whole_vectors(target):
    rows = [row for row in TASK.workloads if row.op == "triton_one_pass_rms_norm"][:1]
    (kernel,) = compile_task(TASK, rows, [target], "cuda_cpp")
    assert kernel.name == "rms_norm_kernel"
    assert kernel.spill_bytes == 0
    assert 0 < kernel.registers <= 128
    assert {width for width, _ in kernel.code.loads} == {16}


def test_what_the_kernel_does_not_take_goes_to_the_plain_path():
    x, w = normal(3, 128), normal(128)
    assert cuda_cpp.uncovered(cuda_cpp.Call(x, w, 1e-6)) is None
    for reason, arguments in {
        "dtypes": (x, w.float()),
        "bytes": (normal(3, 130), normal(130)),
        "not contiguous": (normal(3, 256)[:, :128], w),
    }.items():
        assert reason in cuda_cpp.uncovered(cuda_cpp.Call(*arguments, 1e-6))
        assert_one_pass(*arguments, op=cuda_cpp.triton_one_pass_rms_norm)


def test_it_runs_on_a_gpu_alone():
    on_the_cpu = cuda_cpp.why_not("triton_one_pass_rms_norm", normal(3, 128), normal(128))
    assert on_the_cpu == "x is on cpu; the kernel runs on CUDA devices"


@needs_gpu
@needs_nvcc
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 128), (33, 1536), (7, 5120), (2, 16384)])
def test_right_on_a_gpu(rows, width, dtype):
    x, w = normal(rows, width, dtype=dtype, device="cuda"), normal(width, dtype=dtype, device="cuda")
    assert cuda_cpp.why_not("triton_one_pass_rms_norm", x, w) is None
    assert_one_pass(x, w, op=cuda_cpp.triton_one_pass_rms_norm)
