"""Kernels in CUDA C++: built and called through tvm-ffi, compiled ahead of time by nvcc.

A `.cu` file holds one `__global__` function, and a host function that launches it on the current stream of its tensors,
exported with `TVM_FFI_DLL_EXPORT_TYPED_FUNC`. Compile-time constants are macros: each set of macros is a library of its
own. A machine that makes calls needs tvm-ffi, nvcc and ninja; `TVM_FFI_CACHE_DIR` says where libraries are kept. A
library has no fast entry (`bound`): its host function takes tensors, and a call costs what a tvm-ffi call costs.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kda_runtime.launch import Binary, Chain, Run

FLAGS = ("-std=c++17", "-O2")
"""Flags of nvcc where it makes machine code alone; tvm-ffi passes it the same for libraries."""
LINES = "-lineinfo"
"""Flag of nvcc that lets profilers and sanitizers name source lines."""
CAPABILITIES = "TVM_FFI_CUDA_ARCH_LIST"
"""The environment variable through which tvm-ffi learns what to build for."""
Defines = tuple[tuple[str, int | str], ...]
"""Macros and their values, in order."""


class BuildError(RuntimeError):
    """A source does not compile, or nothing can compile it here."""


@dataclass(frozen=True)
class CudaLaunch:
    """One launch of the kernel in a `.cu` file: the counterpart of `launch.Launch`."""

    source: Path
    kernel: str
    """Name of the `__global__` function."""
    function: str
    """Exported name of the host function; it takes the outputs, then the op's tensors, then `scalars`."""
    scalars: tuple[int | float | bool, ...] = ()
    defines: Defines = ()

    @property
    def name(self) -> str:
        """The kernel's function name."""
        return self.kernel

    @property
    def variant(self) -> str:
        """The macros: they tell this compilation from others of the same source."""
        return " ".join([self.source.name, *(f"{name}={value}" for name, value in self.defines)])

    def run(self, *tensors: torch.Tensor) -> None:
        """Launch on the current stream of the tensors' device."""
        major, minor = torch.cuda.get_device_capability(tensors[0].device)
        target = f"{major}.{minor}{'a' if major >= 9 else ''}"
        load(self.source, self.defines, target)[self.function](*tensors, *self.scalars)

    def run_at(self, *addresses: int) -> None:  # noqa: ARG002
        """The host function takes tensors, which addresses cannot replace."""
        raise TypeError(f"{self.source.name}: {self.function} takes tensors, not their addresses")

    def bind(self, device: int) -> Run:  # noqa: ARG002
        """Return `run_at`, which is no C object: so chains with this launch take the plain entry, which calls `run`."""
        return self.run_at

    def chain(self, tensors: int, outputs: Sequence[int | torch.Tensor] = ()) -> Chain:
        """This launch alone as a chain, for a call with so many tensors."""
        return Chain((self,), (tuple(range(len(outputs) + tensors)),), tuple(outputs))

    def compile(self, target: str) -> Binary:
        """Machine code for a target such as `sm_90a`, on any machine that has nvcc.

        Raises:
            BuildError: nvcc is missing, or rejects the source.
        """
        from tvm_ffi import libinfo

        includes = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        with TemporaryDirectory() as folder:
            out = Path(folder) / "kernel.cubin"
            words = [_nvcc(), "-cubin", f"-arch={target}", *FLAGS, LINES, *_macros(self.defines), "-o", str(out)]
            words += [*(f"-I{include}" for include in includes), str(self.source)]
            ran = subprocess.run(words, capture_output=True, text=True, check=False)
            if ran.returncode:
                raise BuildError(f"{self.source}: nvcc -arch={target} failed:\n{(ran.stderr or ran.stdout).strip()}")
            return Binary(out.read_bytes(), dynamic_shared_bytes=0)


@cache
def load(source: Path, defines: Defines, capability: str) -> Any:
    """The library of a source: built for a capability such as `9.0a` once per machine, and loaded once per process.

    Raises:
        BuildError: it cannot be built here.
    """
    from tvm_ffi import cpp

    before = {name: os.environ.get(name) for name in (CAPABILITIES, "PATH")}
    # ninja may be installed beside this Python, in a folder that is not on the path.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    os.environ[CAPABILITIES] = capability
    try:
        return cpp.load(source.stem, cuda_files=[str(source)], extra_cuda_cflags=[LINES, *_macros(defines)])
    except (RuntimeError, OSError) as error:
        raise BuildError(f"{source}: no library for capability {capability}: {error}") from error
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _macros(defines: Defines) -> list[str]:
    return [f"-D{name}={value}" for name, value in defines]


def _nvcc() -> str:
    folders = [os.environ.get("PATH", os.defpath), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    found = shutil.which("nvcc", path=os.pathsep.join(folders))
    if found is None:
        raise BuildError(f"nvcc: not found in {os.pathsep.join(folders)}; install the CUDA toolkit or set CUDA_HOME")
    return found
