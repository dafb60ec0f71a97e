"""Compiles CuTe DSL kernels to machine code once per machine: the DSL does not cache what it compiles ahead of time.

A cache entry is the code's sha256 and then the code, so that a truncated entry is noticed and compiled again. Entries
lie in Triton's cache, whose manager lets several processes write at once. The key is a sha256 of all that decides the
code:

- the Python files in the folder of the function's module, and those of `kda_runtime`: a solution imports no others;
- the function's name, and the plain values among its module's names, which a program may have changed since the import;
- the arguments (of a stream only that it is one), the target and the options;
- the versions of the DSL, of the CUDA toolkit in it, and of Python.

No path of the machine is part of it. Nothing is cached where that list may be incomplete: an argument is of another
type, the function is a closure or not a function, a file is newer than the import of this module, or one of the DSL's
own environment variables is set, since these change the code or make the DSL write files.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

VARIABLES = "CUTE_DSL_"
"""How the names of the DSL's environment variables begin."""
ENTRY = "kernel.cubin"
_LOADED = time.time()
"""Time of this import, in seconds. Solutions import this module before they define a kernel, so of files older than
this Python and the DSL have read the same text."""
_COMPILING = Lock()
"""Lock of the DSL's compiler: two threads in it at a time lose each other's results."""


def cute_cubin(function: Callable[..., Any], *args: Any, target: str, options: str = "") -> bytes:
    """Machine code of a `@cute.jit` function's one kernel, for a target such as `sm_90a`, on any machine.

    `args` are what `cute.compile` takes; the code does not contain a launch's grid or stream. `options` are passed on.
    """
    from triton.runtime.cache import get_cache_manager

    with _COMPILING:
        key = _key(function, args, target, options)
        if key is None:
            return _compile(function, args, target, options)
        cache = get_cache_manager(key)
        path = cache.get_file(ENTRY)
        cubin = _checked(Path(path).read_bytes()) if path else None
        if cubin is None:
            cubin = _compile(function, args, target, options)
            cache.put(hashlib.sha256(cubin).digest() + cubin, ENTRY)
        return cubin


def _compile(function: Callable[..., Any], args: tuple[Any, ...], target: str, options: str) -> bytes:
    import cutlass.cute as cute

    with TemporaryDirectory() as folder:  # the DSL keeps the machine code only if it also dumps a file
        options = f"--gpu-arch {target} --keep-cubin --dump-dir {folder} {options}"
        cubin: bytes = cute.compile(function, *args, options=options).artifacts.CUBIN
    return cubin


def _checked(entry: bytes) -> bytes | None:
    """The code in a cache entry; None where the entry is broken."""
    size = hashlib.sha256().digest_size
    digest, cubin = entry[:size], entry[size:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _key(function: Callable[..., Any], args: tuple[Any, ...], target: str, options: str) -> str | None:
    """The cache key: sha256, in hex, of all that decides the code; None where that cannot be listed completely."""
    import cutlass

    original = inspect.unwrap(function)
    stated = [_stated(arg) for arg in args]
    if not inspect.isfunction(original) or original.__closure__ or None in stated:
        return None
    sources = _sources(Path(original.__code__.co_filename))
    if sources is None or any(name.startswith(VARIABLES) for name in os.environ):
        return None
    names = {name: _stated(value) for name, value in original.__globals__.items() if not name.startswith("__")}
    parts = (
        sources,
        f"{original.__module__}.{original.__qualname__}",
        sorted((name, value) for name, value in names.items() if value is not None),
        stated,
        target,
        options,
        [str(vars(cutlass)[name]) for name in ("__version__", "CUDA_VERSION")],
        platform.python_version(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _stated(value: Any) -> str | None:
    """Unambiguous text for a plain value, a type, a number of the DSL or a stream; None for anything else."""
    import cutlass
    from cuda.bindings.driver import CUstream

    if isinstance(value, type):
        return None if "<" in value.__qualname__ else f"{value.__module__}.{value.__qualname__}"
    if value is None or type(value) in (bool, int, float, str):
        return repr(value)
    if type(value) is tuple:
        parts = [_stated(part) for part in value]
        return None if None in parts else repr(parts)
    if isinstance(value, CUstream):
        return "stream"
    if isinstance(value, cutlass.Numeric) and (number := _stated(value.value)) is not None:
        return f"{_stated(type(value))}({number})"
    return None


def _sources(file: Path) -> list[tuple[str, str]] | None:
    """Relative path and sha256 of each Python file; None where one may have changed since it was imported."""
    found = []
    for folder in (file.parent, Path(__file__).parent):
        for path in sorted(folder.glob("**/*.py")):
            if path.stat().st_mtime >= _LOADED:
                return None
            found.append((path.relative_to(folder).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()))
    return found


def compile_cute(function: Callable[..., Any], *args: Any, options: str = "") -> Callable[..., Any]:
    """Compile a `@cute.jit` function for calls with PyTorch tensors, on PyTorch's current stream.

    `args` are what `cute.compile` takes: fake tensors (`cute.runtime.make_fake_compact_tensor`), constexprs, and
    `environment_stream()` in the stream's place. The result is called with tensors and scalars only, through tvm-ffi:
    4.9 us per call on an H200 host, against 10.7 with a stream object (2026-11-20).
    `options` are passed on, for example `--gpu-arch sm_90a` to compile without a GPU.
    """
    import cutlass.cute as cute

    compiled: Callable[..., Any] = cute.compile(function, *args, options=f"--enable-tvm-ffi {options}".strip())
    return compiled


def environment_stream() -> Any:
    """The stream argument of a `@cute.jit` function that shall run on PyTorch's current stream."""
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)
