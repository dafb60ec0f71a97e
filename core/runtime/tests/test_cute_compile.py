"""Machine code of CuTe DSL kernels is compiled once per machine, and again when anything changes that decides it."""

import hashlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kda_runtime import cute_compile
from kda_runtime.cute_compile import compile_cute, environment_stream

cutlass = pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
driver = pytest.importorskip("cuda.bindings.driver")

KERNEL = """
import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from values import THREADS


@cute.kernel
def kernel(x: Int64, factor: Float32, times: cutlass.Constexpr):
    i, _, _ = cute.arch.thread_idx()
    mX = cute.make_tensor(cute.make_ptr(Float32, x, cutlass.AddressSpace.gmem), cute.make_layout(THREADS))
    for _ in cutlass.range_constexpr(times):
        mX[i] = mX[i] * factor


@cute.jit
def scale(x: Int64, factor: Float32, times: cutlass.Constexpr, stream: driver.CUstream):
    kernel(x, factor, times).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)
"""
PROCESS = """
import hashlib, sys
import cuda.bindings.driver as driver
from cutlass import Float32, Int64
from kda_runtime import cute_compile as cute
from scale_on_cute import scale

args = Int64(0), Float32(0.0), 2, driver.CUstream(0)
direct = cute._compile(scale, args, "sm_90a", "")
calls = []
real = cute._compile
cute._compile = lambda *given: calls.append(given) or real(*given)
cubin = cute.cute_cubin(scale, *args, target="sm_90a")
assert cubin == direct, "not what the compiler gives"
print(len(calls), hashlib.sha256(cubin).hexdigest())
"""


def write(folder: Path, threads: int = 128) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "scale_on_cute.py").write_text(KERNEL)
    (folder / "values.py").write_text(f"THREADS = {threads}\n")
    return folder


def test_another_process_and_another_folder_find_the_code(tmp_path):
    def run(folder):
        path = os.pathsep.join([str(folder), *sys.path])
        kept = {name: value for name, value in os.environ.items() if not name.startswith(cute_compile.VARIABLES)}
        environment = {**kept, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
        done = subprocess.run([sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    one = write(tmp_path / "one")
    first, again, other = run(one), run(one), run(shutil.copytree(one, tmp_path / "other"))
    assert [first[0], again[0], other[0]] == ["1", "0", "0"]
    assert first[1] == again[1] == other[1]
    changed = run(write(one, threads=64))
    assert changed[0] == "1"
    assert changed[1] != first[1]


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """What reaches the compiler, whose code is the number of the compilation."""
    seen = []

    def compile_one(*given):
        seen.append(given)
        return f"code {len(seen)}".encode()

    for name in [name for name in os.environ if name.startswith(cute_compile.VARIABLES)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cute_compile, "_compile", compile_one)
    monkeypatch.setattr(cute_compile, "_LOADED", math.inf)
    return seen


@pytest.fixture
def module(tmp_path):
    """A file of a solution; to the key it does not matter that there is no kernel in it."""
    return load(write_plain(tmp_path / "solution"))


def write_plain(folder, body="return x"):
    folder.mkdir(exist_ok=True)
    (folder / "plain.py").write_text(f"TILES = 4\n\n\ndef op(x):\n    {body}\n\n\ndef other(x):\n    return x\n")
    return folder / "plain.py"


def load(path):
    spec = importlib.util.spec_from_file_location("plain", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def code(function, *args, target="sm_90a", options=""):
    return cute_compile.cute_cubin(function, *args, target=target, options=options)


ARGUMENTS = (cutlass.Int64(0), cutlass.Float16, 8, True, ("a", None, 0.5), driver.CUstream(0))


def test_equal_calls_compile_once(compilations, module):
    assert [code(module.op, *ARGUMENTS) for _ in range(3)] == [b"code 1"] * 3
    assert code(load(Path(module.__file__)).op, *ARGUMENTS) == b"code 1"
    assert compilations == [(module.op, ARGUMENTS, "sm_90a", "")]


@pytest.mark.parametrize(
    "arguments",
    [
        (cutlass.Int32(0), *ARGUMENTS[1:]),
        (cutlass.Int64(1), *ARGUMENTS[1:]),
        (0, *ARGUMENTS[1:]),
        (ARGUMENTS[0], cutlass.BFloat16, *ARGUMENTS[2:]),
        (*ARGUMENTS[:2], 16, *ARGUMENTS[3:]),
        (*ARGUMENTS[:2], 8.0, *ARGUMENTS[3:]),
        (*ARGUMENTS[:3], 1, *ARGUMENTS[4:]),
        (*ARGUMENTS[:4], ("a", None, 0.25), ARGUMENTS[5]),
        ARGUMENTS[:5],
    ],
)
def test_other_arguments_compile_anew(compilations, module, arguments):
    assert code(module.op, *ARGUMENTS) == b"code 1"
    assert code(module.op, *arguments) == b"code 2"
    assert code(module.op, *ARGUMENTS) == b"code 1"


def test_other_targets_options_functions_and_versions_compile_anew(compilations, module, monkeypatch):
    assert code(module.op) == b"code 1"
    assert code(module.op, target="sm_100a") == b"code 2"
    assert code(module.op, options="--opt-level 2") == b"code 3"
    assert code(module.other) == b"code 4"
    module.TILES = 5
    assert code(module.op) == b"code 5"
    module.TILES = 4
    for place, name, value in (
        (cutlass, "__version__", "5"),
        (cutlass, "CUDA_VERSION", "99"),
        (cute_compile.platform, "python_version", lambda: "3"),
    ):
        count = len(compilations)
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            code(module.op)
        assert len(compilations) == count + 1
    assert code(module.op) == b"code 1"


def test_a_changed_or_new_file_compiles_anew(compilations, module):
    folder = Path(module.__file__).parent
    assert code(module.op) == b"code 1"
    write_plain(folder, "return -x")
    assert code(module.op) == b"code 2"
    (folder / "helpers").mkdir()
    (folder / "helpers" / "more.py").write_text("")
    assert code(module.op) == b"code 3"
    (folder / "tuned.toml").write_text("")
    assert code(module.op) == b"code 3"


@pytest.mark.parametrize("broken", [lambda entry: entry[:-1], lambda entry: entry[:7], lambda entry: b""])
def test_broken_entry_is_compiled_again(compilations, module, tmp_path, broken):
    assert code(module.op) == b"code 1"
    (entry,) = tmp_path.glob(f"cache/*/{cute_compile.ENTRY}")
    entry.write_bytes(broken(entry.read_bytes()))
    assert [code(module.op) for _ in range(2)] == [b"code 2"] * 2
    assert entry.read_bytes() == hashlib.sha256(b"code 2").digest() + b"code 2"


def test_nothing_is_kept_where_the_key_may_be_incomplete(compilations, module, monkeypatch, tmp_path):
    class Local:
        pass

    def closure(x):
        return module.op(x)

    for function, *arguments in (
        (module.op, object()),
        (module.op, (1, [2])),
        (module.op, Local),
        (closure,),
        (Local(),),
    ):
        code(function, *arguments)
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_DSL_LINEINFO", "1")
        code(module.op)
    # Of a file that is written while a process runs, that process has read another text, or may have.
    monkeypatch.setattr(cute_compile, "_LOADED", Path(module.__file__).stat().st_mtime)
    code(module.op)
    assert len(compilations) == 7
    assert not list(tmp_path.glob(f"cache/*/{cute_compile.ENTRY}"))


def test_one_thread_compiles_at_a_time(compilations, module, monkeypatch):
    inside, most = [], []

    def slow(*given):
        inside.append(given)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return b"code"

    monkeypatch.setattr(cute_compile, "_compile", slow)
    threads = [threading.Thread(target=code, args=(module.op, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4


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

    from kda_tools.lab.inspect.aot import resources

    x = make_fake_compact_tensor(cutlass.Float32, (cutlass.cute.sym_int(),))
    stream = environment_stream()
    options = f"--gpu-arch sm_90a --keep-cubin --dump-dir {tmp_path}"
    compiled = compile_cute(scale, x, cutlass.Float32(0.0), stream, options=options)
    registers, _, spilled = resources(compiled.artifacts.CUBIN)
    assert registers > 0
    assert spilled == 0
