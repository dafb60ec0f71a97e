"""A stand-in for libcuda that prints what it is asked to launch, so that launching can be tested without a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SOURCE = r"""
#include <cuda.h>
#include <stdio.h>
#include <string.h>
int stub_error, stub_quiet, stub_other_params, stub_unloaded, stub_capturing, stub_no_room;
CUstreamCaptureMode stub_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
static int queries;
#define OK CUDA_SUCCESS
#define KERNEL (CUfunction)0x77
#define THREE (CUfunction)0x79
#define CUBIN (CUfunction)0x7a
int stub_stream(int type, int device, void **stream) { *stream = (void *)(0x5000 + 256L * device); return 0; }
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "stub"; return OK; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return OK; }
CUresult cuCtxSetCurrent(CUcontext c) { return OK; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return OK; }
CUresult cuCtxSetLimit(CUlimit l, size_t s) { return OK; }
CUresult cuCtxGetLimit(size_t *s, CUlimit l) { *s = 0; return OK; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return OK; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 232448; return OK; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return OK; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *m) {
  CUstreamCaptureMode before = stub_mode; stub_mode = *m; *m = before; return OK;
}
CUresult cuModuleLoadData(CUmodule *m, const void *i) {
  if (stub_capturing && stub_mode != CU_STREAM_CAPTURE_MODE_RELAXED) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  *m = (CUmodule)2; return OK;
}
CUresult cuModuleUnload(CUmodule m) { stub_unloaded++; return OK; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *c) { *c = CU_STREAM_CAPTURE_STATUS_NONE; return OK; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) {
  *f = !strcmp(n, "empty") ? (CUfunction)0x78 : !strcmp(n, "three") || !strcmp(n, "_empty") ? THREE :
       !strcmp(n, "cubin$kernel_0") ? CUBIN : KERNEL;
  return OK;
}
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = 1024; return OK; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) {
  if (f == CUBIN) printf("sets %d=%d\n", a, v), fflush(stdout);
  return OK;
}
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return OK; }
CUresult cuFuncGetParamInfo(CUfunction f, size_t i, size_t *offset, size_t *size) {
  static const size_t sizes[] = {8, 4, 8, 4, 4, 8, 8};  // y, y_stride, x, n, eps; scratch and profile scratch
  if (f == CUBIN) return i >= 3 + stub_other_params ? CUDA_ERROR_INVALID_VALUE : (*size = sizes[i], OK);
  if (i >= (f == KERNEL ? 7 : f == THREE ? 5 : 2) + stub_other_params) return CUDA_ERROR_INVALID_VALUE;
  *size = f == KERNEL ? sizes[i] : 8; return OK;
}
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) {
  unsigned most = stub_no_room ? 8 : 16;
  for (unsigned i = 0; i < c->numAttrs; i++)
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION && c->attrs[i].value.clusterDim.x > most) most = 0;
  *n = most > 0; return OK;
}
CUresult cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)d = p; queries++; return OK;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  if (stub_error) { CUresult error = stub_error; stub_error = OK; return error; }
  if (stub_quiet) return OK;
  int n = f == KERNEL ? 5 : f == THREE || f == CUBIN ? 3 : 0;
  printf("grid %u %u %u block %u %u %u shared %u stream %p function %p", c->gridDimX, c->gridDimY, c->gridDimZ,
         c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, (void *)c->hStream, (void *)f);
  for (unsigned i = 0; i < c->numAttrs; i++) {
    printf(" attribute %d=%d", c->attrs[i].id, c->attrs[i].value.cooperative);
    if (c->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
      printf(",%u,%u", c->attrs[i].value.clusterDim.y, c->attrs[i].value.clusterDim.z);
  }
  if (f == CUBIN) {
    printf(" args %llx %d %llx\n", *(unsigned long long *)p[0], *(int *)p[1], *(unsigned long long *)p[2]);
    return fflush(stdout), OK;
  }
  if (n == 3) printf(" args %llx %llx %llx", *(unsigned long long *)p[0], *(unsigned long long *)p[1],
                     *(unsigned long long *)p[2]);
  if (n == 5) printf(" args %llx %d %llx %d %g", *(unsigned long long *)p[0], *(int *)p[1], *(unsigned long long *)p[2],
                *(int *)p[3], *(float *)p[4]);
  printf(" scratch %p %p queries %d\n", *(void **)p[n], *(void **)p[n + 1], queries);
  fflush(stdout); queries = 0; return OK;
}
"""

PREAMBLE = r"""
import contextlib
import ctypes
import torch
import triton
import triton.language as tl

devices = 1
torch.cuda.current_device = lambda: 0
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: devices
torch.cuda.is_current_stream_capturing = lambda: bool(capturing.value)
torch.cuda.get_device_capability = lambda device=0: (9, 0)
torch.cuda.set_device = lambda device: None
torch.cuda.device = lambda device: contextlib.nullcontext()
torch._C._cuda_getCurrentRawStream = lambda device: 0x5000
torch._C._cuda_getDevice = lambda: devices - 1

# PyTorch's exchange interface, but for the current stream: this PyTorch knows no CUDA.
stub = ctypes.CDLL("libcuda.so.1")
capturing = ctypes.c_int.in_dll(stub, "stub_capturing")
new, get = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
NAME = b"dlpack_exchange_api"
exchange = (ctypes.c_uint64 * 7).from_buffer_copy((ctypes.c_uint64 * 7).from_address(
    get(torch.Tensor.__dlpack_c_exchange_api__, NAME)))
exchange[6] = ctypes.cast(stub.stub_stream, ctypes.c_void_p).value
torch.Tensor.__dlpack_c_exchange_api__ = new(ctypes.addressof(exchange), NAME, None)

from kda_runtime import bound, native
from kda_runtime.bound import bind
from kda_runtime.launch import MISS, Chain, Launch
from triton import knobs

@triton.jit
def kernel(y, y_stride, x, n, eps, BLOCK: tl.constexpr, SQUARE: tl.constexpr = True):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i * y_stride, tl.load(x + i, mask=i < n) + eps, mask=i < n)

@triton.jit
def empty():
    pass

Y, X = 0x7F0000001000, 0x7F0000002000

def entry_of(launch, arguments, scalars=(), outputs=()):
    tensors = sum(argument is not None for argument in arguments)
    chain = launch if isinstance(launch, Chain) else launch.chain(tensors, outputs)
    return bound.entry(chain, tuple(arguments), tuple(scalars))

def say(what, run, *given, **named):
    print(what, end=": ", flush=True)
    return run(*given, **named)
"""


class Stub:
    """The built library, and how to run a script with it."""

    def __init__(self, folder: Path) -> None:
        compiler, header = shutil.which("cc"), Path(sysconfig.get_paths()["include"]) / "Python.h"
        if compiler is None or not header.is_file():
            pytest.skip("Triton's launcher is compiled on first use: needs a C compiler and Python.h")
        spec = importlib.util.find_spec("triton")
        include = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "include"
        if not (include / "cuda.h").is_file():
            pytest.skip(f"needs the cuda.h that triton brings: {include}")
        self.folder = folder
        (folder / "stub.c").write_text(SOURCE)
        build = [compiler, "-shared", "-fPIC", "-w", f"-I{include}", "stub.c", "-o", str(folder / "libcuda.so.1")]
        subprocess.run([*build, "-Wl,-soname,libcuda.so.1"], cwd=folder, check=True)

    def start(self, script: str, **environment: str) -> "subprocess.Popen[str]":
        """Run a script behind PREAMBLE; environment variables are added, or taken out where empty."""
        path = self.folder / f"run{len(list(self.folder.glob('run*.py')))}.py"
        path.write_text(PREAMBLE + script)
        full = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "KDA_LAUNCH")}
        full |= {
            "LD_LIBRARY_PATH": str(self.folder),
            "TRITON_LIBCUDA_PATH": str(self.folder),
            "TRITON_CACHE_DIR": str(self.folder / "cache"),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        return subprocess.Popen(
            [sys.executable, path.name],
            cwd=self.folder,
            env=full | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, **environment: str) -> dict[str, str]:
        """What the script printed, as `name: text` lines."""
        out, err = (process := self.start(script, **environment)).communicate(timeout=300)
        assert process.returncode == 0, err
        out = re.sub(r"(hook kernel|sets .*)\n", r"\1, ", out).replace("\ngives", " gives").replace("\ngrid", ", grid")
        return dict(line.split(": ", 1) for line in out.splitlines())
