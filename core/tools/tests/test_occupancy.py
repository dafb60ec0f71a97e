"""Resident blocks: known cases, and NVIDIA's own header as the oracle."""

import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import triton

from kda_tools.lab.inspect.occupancy import MULTIPROCESSORS, Occupancy, Resource, multiprocessor, occupancy

HEADER = Path(triton.__file__).parent / "backends" / "nvidia" / "include" / "cuda_occupancy.h"
HOPPER = MULTIPROCESSORS["9.0"]
PROGRAM = r"""
#include <stdio.h>
#include <cuda_occupancy.h>

int main(void) {
  int major, threads, registers, shared;
  while (scanf("%d %d %d %d", &major, &threads, &registers, &shared) == 4) {
    cudaOccDeviceProp gpu = {0};
    gpu.computeMajor = major;
    gpu.warpSize = 32;
    gpu.numSms = 1;
    gpu.maxThreadsPerBlock = 1024;
    gpu.maxThreadsPerMultiprocessor = 2048;
    gpu.regsPerBlock = gpu.regsPerMultiprocessor = 65536;
    gpu.sharedMemPerBlock = 48 * 1024;
    gpu.sharedMemPerBlockOptin = 227 * 1024;
    gpu.sharedMemPerMultiprocessor = 228 * 1024;
    gpu.reservedSharedMemPerBlock = 1024;
    cudaOccFuncAttributes kernel = {0};
    kernel.maxThreadsPerBlock = 1024;
    kernel.numRegs = registers;
    kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
    kernel.maxDynamicSharedSizeBytes = shared;
    cudaOccDeviceState state = {0};
    state.carveoutConfig = SHAREDMEM_CARVEOUT_DEFAULT;
    cudaOccResult result;
    if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &gpu, &kernel, &state, threads, shared)) return 1;
    printf("%d %u\n", result.activeBlocksPerMultiprocessor, result.limitingFactors);
  }
}
"""
BITS = {Resource.WARPS: 1, Resource.REGISTERS: 2, Resource.SHARED: 4, Resource.BLOCKS: 8}


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "blocks", "warps", "limit"),
    [
        (256, 32, 0, 8, 64, Resource.REGISTERS),  # 64 warps of 32 x 32 registers are the whole file: full, and no more
        (256, 33, 0, 6, 48, Resource.REGISTERS),  # 33 count as 40: 12 warps in a partition's 16384 registers
        (1024, 64, 0, 1, 32, Resource.REGISTERS),
        (1024, 65, 0, 0, 0, Resource.REGISTERS),  # cannot be launched
        (128, 255, 0, 2, 8, Resource.REGISTERS),
        (1024, 16, 0, 2, 64, Resource.WARPS),
        (32, 16, 0, 32, 32, Resource.BLOCKS),
        (96, 16, 0, 21, 63, Resource.WARPS),
        (128, 32, 113 * 1024, 2, 8, Resource.SHARED),  # with the 1 KB that every block gives up: 2 x 114 KB
        (128, 32, 113 * 1024 + 1, 1, 4, Resource.SHARED),
        (128, 32, 227 * 1024, 1, 4, Resource.SHARED),
        (128, 32, 227 * 1024 + 1, 0, 0, Resource.SHARED),
    ],
)
def test_known_cases(threads: int, registers: int, shared: int, blocks: int, warps: int, limit: Resource) -> None:
    assert occupancy(HOPPER, threads, registers, shared) == Occupancy(blocks, warps, limit)


@pytest.mark.skipif(shutil.which("cc") is None or not HEADER.is_file(), reason="needs cc and triton's CUDA headers")
def test_nvidias_header_says_the_same(tmp_path: Path) -> None:
    (tmp_path / "oracle.c").write_text(PROGRAM)
    subprocess.run(["cc", "-I", HEADER.parent, "oracle.c", "-o", "oracle"], cwd=tmp_path, check=True)
    threads = (32, 96, 128, 160, 224, 256, 288, 320, 384, 512, 544, 640, 768, 800, 1024)
    shared = (0, 16, 1000, 8 * 1024, 20000, 49 * 1024, 76000, 113 * 1024, 227 * 1024)
    cases = list(product((9, 10), threads, range(1, 256), shared))
    lines = "\n".join(" ".join(map(str, case)) for case in cases)
    answers = subprocess.run([tmp_path / "oracle"], input=lines, capture_output=True, text=True, check=True).stdout
    for case, answer in zip(cases, answers.splitlines(), strict=True):
        blocks, limits = map(int, answer.split())
        found = occupancy(MULTIPROCESSORS[f"{case[0]}.0"], *case[1:])
        assert (found.blocks, found.blocks * -(-case[1] // 32)) == (blocks, found.warps), case
        assert limits & BITS[found.limit], case


@pytest.mark.parametrize(
    ("target", "known"), [("sm_90a", "9.0"), ("sm_90", "9.0"), ("sm_100a", "10.0"), ("sm_80", None), ("sm_120a", None)]
)
def test_targets(target: str, known: str | None) -> None:
    assert multiprocessor(target) is (MULTIPROCESSORS[known] if known else None)
