import gc
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import weakref
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kda_core import launch
from kda_core.launch import Launch, Plans, guard, is_tracing


def tensors():
    return [torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(6), torch.arange(4)]


@pytest.fixture(params=["guards", "fallback"])
def either_guard(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")


@pytest.mark.usefixtures("either_guard")
class TestGuard:
    def test_same_signature_other_tensors(self):
        assert guard(tensors())(*tensors())

    @pytest.mark.parametrize(
        ("position", "other"),
        [
            (0, torch.zeros(4, 6)),
            (0, torch.zeros(5, 6, dtype=torch.bfloat16)),
            (0, torch.zeros(6, 4, dtype=torch.bfloat16).t()),
            (0, torch.zeros(4, 6, dtype=torch.bfloat16, device="meta")),
            (1, torch.zeros(6, requires_grad=True)),
            (1, torch.nn.Parameter(torch.zeros(6))),
            (2, torch.arange(4, dtype=torch.int32)),
        ],
    )
    def test_any_difference_is_seen(self, position, other):
        given = tensors()
        check = guard(given)
        given[position] = other
        assert not check(*given)

    def test_recording_gradients_is_seen(self):
        given = [torch.nn.Parameter(torch.zeros(6))]
        check = guard(given)
        assert check(*given)
        with torch.no_grad():
            assert not check(*given)

    def test_none_and_scalars(self):
        x = torch.zeros(3)
        check = guard([x, None, 2])
        assert check(x, None, 2)
        assert not check(x, x, 2)
        assert not check(x, None, 3)
        assert not check(x, None, 2.0)

    def test_dispatch_modes_are_seen(self):
        given = tensors()
        check = guard(given)
        with FlopCounterMode(display=False):
            assert not check(*given)

    def test_keeps_no_tensor_alive(self):
        given = tensors()
        check = guard(given)
        ref = weakref.ref(given[0])
        del given
        gc.collect()
        assert ref() is None
        assert check(*tensors())


def test_tracing_is_seen():
    x = torch.zeros(3)
    assert not is_tracing(x, torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert is_tracing(x)
    assert is_tracing(mode.from_tensor(x))
    seen = []
    torch.func.vmap(lambda row: (seen.append(is_tracing(row)), row)[1])(x[None])
    assert seen == [True]


def test_plans_are_found_again_and_bounded():
    plans = Plans(hot=2, total=3)
    sizes = [[torch.zeros(n)] for n in range(1, 5)]
    for n, given in enumerate(sizes):
        plans.add(given, (n,), lambda n=n: n)
    assert [entry() for entry in plans.hot] == [3, 2]
    assert plans.find(sizes[0], (0,)) is None, "the oldest went"
    assert plans.find(sizes[1], (9,)) is None, "scalars are part of the key"
    assert plans.find(sizes[1], (1,))() == 1
    assert [entry() for entry in plans.hot] == [1, 3], "found plans are hot again"
    plans.clear()
    assert plans.hot == ()
    assert plans.find(sizes[1], (1,)) is None


# The driver library as far as Triton's launcher needs it: prints what it is asked to launch.
STUB_DRIVER = r"""
#include <cuda.h>
#include <stdio.h>
static int queries;
#define OK CUDA_SUCCESS
CUresult cuGetErrorString(CUresult e, const char **s) { *s = "stub"; return OK; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return OK; }
CUresult cuCtxSetCurrent(CUcontext c) { return OK; }
CUresult cuCtxSetLimit(CUlimit l, size_t s) { return OK; }
CUresult cuCtxGetLimit(size_t *s, CUlimit l) { *s = 0; return OK; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return OK; }
CUresult cuDeviceGetAttribute(int *v, CUdevice_attribute a, CUdevice d) { *v = 232448; return OK; }
CUresult cuDriverGetVersion(int *v) { *v = 13000; return OK; }
CUresult cuModuleLoadData(CUmodule *m, const void *i) { *m = (CUmodule)2; return OK; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n) { *f = (CUfunction)0x77; return OK; }
CUresult cuFuncGetAttribute(int *v, CUfunction_attribute a, CUfunction f) { *v = 1024; return OK; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int v) { return OK; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return OK; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c) { *n = 1; return OK; }
CUresult cuPointerGetAttribute(void *d, CUpointer_attribute a, CUdeviceptr p) {
  *(CUdeviceptr *)d = p; queries++; return OK;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **p, void **e) {
  printf("grid %u %u block %u stream %p function %p attributes %u queries %d", c->gridDimX, c->gridDimY, c->blockDimX,
         (void *)c->hStream, (void *)f, c->numAttrs, queries);
  if (c->blockDimX != 32)  // the kernel with arguments
    printf(" args %llx %d %llx %d %g", *(unsigned long long *)p[0], *(int *)p[1], *(unsigned long long *)p[2],
           *(int *)p[3], *(float *)p[4]);
  printf("\n"); fflush(stdout); queries = 0; return OK;
}
"""

STUB_RUN = r"""
import contextlib
import torch
import triton
import triton.language as tl

devices = 1
torch.cuda.current_device = lambda: 0
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: devices
torch.cuda.get_device_capability = lambda device=0: (9, 0)
torch.cuda.set_device = lambda device: None
torch.cuda.device = lambda device: contextlib.nullcontext()
torch._C._cuda_getCurrentRawStream = lambda device: 0x5000
torch._C._cuda_getDevice = lambda: 1

from kda_core.launch import Launch, bind
from triton import knobs

@triton.jit
def kernel(y, y_stride, x, n, eps, BLOCK: tl.constexpr, SQUARE: tl.constexpr = True):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i * y_stride, tl.load(x + i, mask=i < n) + eps, mask=i < n)

@triton.jit
def empty():
    pass

def hook(metadata):
    print("hook", metadata.get()["name"], flush=True)

y, x = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
launch = Launch.make(kernel, (8,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2)
run = launch.bind()
Y, X = 0x7F0000001000, 0x7F0000002000
def say(what, run, *pointers):
    print(what, end=": ", flush=True)
    run(*pointers)
say("direct", run, Y, X)
say("misaligned", run, Y + 2, X)
knobs.runtime.launch_enter_hook.add(hook)
say("added", run, Y, X)
knobs.runtime.launch_enter_hook.remove(hook)
chain, knobs.runtime.launch_enter_hook = knobs.runtime.launch_enter_hook, hook
say("replaced", run, Y, X)
knobs.runtime.launch_enter_hook = chain
say("again", run, Y, X)
say("empty", bind(empty, (1,), num_warps=1))
say("pdl", bind(kernel, (8, 3), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2, launch_pdl=True), Y, X)

from kda_core.launch import MISS
entry = launch.entry([x, None], (1e-6, "rms"), outputs=[0])
results = []
say("entry", lambda *given: results.append(entry(*given)), x, None, 1e-6, "rms")
(out,) = results
assert out.shape == x.shape and out.dtype == x.dtype and out is not x
print(f"entry pointers: {out.data_ptr():x} {x.data_ptr():x}")
misses = [(x, x, 1e-6, "rms"), (x, None, 1e-5, "rms"), (x, None, 1e-6, "layer"), (x[1:], None, 1e-6, "rms")]
print("misses:", [entry(*given) is MISS for given in misses])
in_place = launch.entry([y, x])
say("in place", lambda *given: print("gives", in_place(*given)), y, x)

devices = 2
say("elsewhere", launch.bind(), Y, X)
devices = 1
triton.__version__ = "9.9.0"
say("unknown", launch.bind(), Y, X)
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What reaches the driver, by name of the case: Triton's own C launcher runs against a stub of libcuda."""
    compiler, header = shutil.which("cc"), Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None or not header.is_file():
        pytest.skip("Triton's launcher is compiled on first use: needs a C compiler and Python.h")
    spec = importlib.util.find_spec("triton")
    include = Path(spec.submodule_search_locations[0]) / "backends" / "nvidia" / "include"
    if not (include / "cuda.h").is_file():
        pytest.skip(f"needs the cuda.h that triton brings: {include}")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "stub.c").write_text(STUB_DRIVER)
    (folder / "run.py").write_text(STUB_RUN)
    library = folder / "libcuda.so.1"
    build = [
        compiler,
        "-shared",
        "-fPIC",
        "-w",
        f"-I{include}",
        "stub.c",
        "-o",
        str(library),
        "-Wl,-soname,libcuda.so.1",
    ]
    subprocess.run(build, cwd=folder, check=True)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "LD_LIBRARY_PATH": str(folder),
        "TRITON_LIBCUDA_PATH": str(folder),
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(Path(launch.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "run.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(
        line.split(": ", 1)
        for line in done.stdout.replace("hook kernel\n", "hook kernel, ").replace("\ngives", " gives").splitlines()
    )


GEOMETRY = "grid 8 1 block 64 stream 0x5000 function 0x77 attributes 0"
ARGUMENTS = "7f0000002000 1000 1e-05"


def test_direct_launch_passes_everything_without_pointer_queries(launched):
    assert launched["direct"] == f"{GEOMETRY} queries 0 args 7f0000001000 2 {ARGUMENTS}"
    assert launched["again"] == launched["direct"]


def test_empty_kernel(launched):
    assert launched["empty"] == "grid 1 1 block 32 stream 0x5000 function 0x77 attributes 0 queries 0"


def test_dependent_launch_and_second_grid_dimension(launched):
    assert launched["pdl"].startswith("grid 8 3 block 64 stream 0x5000 function 0x77 attributes 1 queries 0 args")


def test_entry_allocates_launches_and_returns_the_output(launched):
    out, given = launched["entry pointers"].split()
    assert launched["entry"] == f"{GEOMETRY} queries 0 args {out} 2 {given} 1000 1e-05"
    assert launched["in place"].startswith(GEOMETRY)
    assert launched["in place"].endswith("gives None")


def test_entry_misses_on_every_other_signature(launched):
    assert launched["misses"] == "[True, True, True, True]"


@pytest.mark.parametrize("case", ["elsewhere", "unknown"])
def test_other_device_and_unknown_release_take_the_normal_launcher(launched, case):
    # The normal launcher asks the driver about each of the two pointers.
    assert launched[case] == f"{GEOMETRY} queries 2 args 7f0000001000 2 {ARGUMENTS}"


def test_misaligned_pointer_takes_its_own_variant(launched):
    assert launched["misaligned"] == f"{GEOMETRY} queries 2 args 7f0000001002 2 {ARGUMENTS}"


@pytest.mark.parametrize("case", ["added", "replaced"])
def test_launch_hooks_are_called(launched, case):
    assert launched[case] == f"hook kernel, {GEOMETRY} queries 2 args 7f0000001000 2 {ARGUMENTS}"


def test_variant_names_what_triton_specialises_on():
    class Kernel:
        arg_names = ("x", "n", "one", "eps", "BLOCK")
        __name__ = "kernel"

    described = Launch.make(Kernel(), (3,), torch.zeros(2), 48, 1, 0.5, BLOCK=8, num_warps=4)
    other_size = Launch.make(Kernel(), (9,), torch.zeros(7), 64, 1, 0.25, BLOCK=8, num_warps=4)
    assert described.variant == "x:float32 n:i32%16 one:1 eps:float BLOCK=8 num_warps=4"
    assert other_size.variant == described.variant
    assert described.grid == (3, 1, 1)
    assert Launch.make(Kernel(), (3,), torch.zeros(2), 2**31 + 1, 1, 0.5).variant.split()[1] == "n:i64"


def test_cute_compiles_for_hopper_without_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    # The DSL reads the source of its functions from a file.
    (tmp_path / "scale_on_cute.py").write_text(
        """
import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(mX: cute.Tensor, factor: cutlass.Float32):
    i, _, _ = cute.arch.thread_idx()
    if i < mX.shape[0]:
        mX[i] = mX[i] * factor


@cute.jit
def scale(mX: cute.Tensor, factor: cutlass.Float32, stream: driver.CUstream):
    kernel(mX, factor).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor
    from scale_on_cute import scale

    from kda_core.aot import resources

    x = make_fake_compact_tensor(cutlass.Float32, (cutlass.cute.sym_int(),))
    stream = launch.environment_stream()
    options = "--gpu-arch sm_90a --keep-cubin"
    compiled = launch.compile_cute(scale, x, cutlass.Float32(0.0), stream, options=options)
    registers, _, spilled = resources(compiled.artifacts.CUBIN)
    assert registers > 0
    assert spilled == 0
