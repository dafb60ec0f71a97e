"""Kernels in CUDA C++: macros make variants, and what does not compile is said with nvcc's own words."""

import shutil

import pytest

from kda_runtime.cuda_cpp import BuildError, CudaLaunch

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
KERNEL = """__global__ void scale(float* y, const float* x) { y[threadIdx.x] = FACTOR * x[threadIdx.x]; }"""


@pytest.fixture
def source(tmp_path):
    pytest.importorskip("tvm_ffi", reason="needs apache-tvm-ffi")
    path = tmp_path / "scale.cu"
    path.write_text(KERNEL)
    return path


def test_a_variant_is_named_by_its_macros(tmp_path):
    launch = CudaLaunch(tmp_path / "scale.cu", "scale", "run", (), (("FACTOR", 2), ("WIDE", "float4")))
    assert (launch.name, launch.variant) == ("scale", "scale.cu FACTOR=2 WIDE=float4")


@needs_nvcc
def test_macros_reach_the_machine_code(source):
    two, three = (
        CudaLaunch(source, "scale", "run", (), (("FACTOR", factor),)).compile("sm_90a").cubin
        for factor in ("2.f", "3.f")
    )
    assert two[:4] == b"\x7fELF"
    assert two != three


@needs_nvcc
def test_what_does_not_compile_names_the_file_and_the_line(source):
    with pytest.raises(BuildError, match=r"scale\.cu: nvcc -arch=sm_90a failed:\n.*scale\.cu\(1\).*FACTOR"):
        CudaLaunch(source, "scale", "run").compile("sm_90a")


def test_without_nvcc_it_is_said_where_it_was_looked_for(source, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    with pytest.raises(BuildError, match=rf"nvcc: not found in {tmp_path}:{tmp_path}/cuda/bin; install"):
        CudaLaunch(source, "scale", "run").compile("sm_90a")


def test_addresses_are_refused(source):
    with pytest.raises(TypeError, match="run takes tensors, not their addresses"):
        CudaLaunch(source, "scale", "run").run_at(0, 0)
