"""LayerNorm or RMSNorm of every row: one Triton kernel for both public functions, launched directly.

    LayerNorm:  y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias        over a row, in float32
    RMSNorm:    y = x / sqrt(mean(x^2) + eps) * weight + bias

`weight` and `bias` may be left out of `norm_infer`; `triton_one_pass_rms_norm` has a weight and no bias. Rounding to
the output's dtype happens once, at the end.

Source of the semantics: SGLang 0.5.12.post1, `jit_kernel/diffusion/triton/norm.py` and `rmsnorm_onepass.py`
(Apache-2.0); the code is our own.

Idea: the op only streams, every byte of x is read once and every byte of y written once, so the kernel is built to
issue little besides 16-byte loads and stores. A program takes one or more whole rows and holds them in registers: all
loads of x are issued before the first use, the statistics are two passes over registers (mean, then centred squares),
and a row's weight and bias are loaded once for all rows of the program. A row that is no power of two is cut into
chunks of one 16-byte vector a thread, so that 5120 columns are 5 x 1024 without a mask, not 8192 with one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.compiler import is_dynamo_compiling

from kda_core.launch import MISS, Launch, Plans, is_interpreted, is_lazy, is_tracing

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_ROW_BYTES = 65536
"""Upstream's bound on a row of x; 16 warps hold such a row in 32 (float32) or 64 registers a thread."""
VECTOR_BYTES = 16
"""Size of the widest load or store of a thread."""


# --- configuration and selection


@dataclass(frozen=True)
class Config:
    """How the work is cut."""

    warps: int
    vectors: int
    """16-byte vectors of x that a thread shall have in flight: as many rows to a program, at least one."""
    early: bool = True
    """Load weight and bias before the statistics, at the price of registers."""
    pdl: bool = True
    """Programmatic dependent launch: the grid is set up while the kernel before it drains."""
    load: str = ""
    """Cache modifier of the loads of x."""
    store: str = ""
    """Cache modifier of the stores."""


@dataclass(frozen=True)
class Choice:
    """One line of the tuning table."""

    max_width: float
    """Largest number of columns that the line is for."""
    max_bytes: float
    """Largest x that the line is for."""
    config: Config
    reason: str


TUNED: Mapping[int, tuple[Choice, ...]] = {
    # Compute capability's major number -> lines; the first that fits is taken. NVIDIA H200, 2026-11-20, device us.
    9: (
        Choice(
            512,
            float("inf"),
            Config(warps=8, vectors=1),
            "648720 x 128: 78.8, against 99.2 with 4 warps, 80.0 with 4 warps, 4 vectors, .cs; 16384 x 128: 1.97, 2.90",
        ),
        Choice(8192, 2**24, Config(warps=8, vectors=1), "not measured: no production row"),
        Choice(
            8192,
            float("inf"),
            Config(warps=8, vectors=5),
            "8640 x 5120: 85.9, against 87.2 with 2 rows, 87.1 masked to 8192, 87.8 late without PDL; copy 83.7",
        ),
        Choice(float("inf"), float("inf"), Config(warps=16, vectors=1, early=False), "not measured: no production row"),
    ),
}
DEFAULT = 9
"""The line set used on devices without their own (B200, capability 10, is compiled but not measured)."""


def select(width: int, size: int, capability: int) -> Config:
    """The configuration for rows of `width` columns, `size` bytes in all, on a device of this compute capability."""
    lines = TUNED.get(capability, TUNED[DEFAULT])
    return next(line.config for line in lines if width <= line.max_width and size <= line.max_bytes)


# --- kernel


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    y,  # [ROWS, N]; may be x itself
    x,  # [ROWS, N]
    weight,  # [N] or None
    bias,  # [N] or None
    rows,  # number of rows; None where every program is full, as the grid says the rest
    # Strides and eps are fixed per model: as constants they cost the host nothing at launch (20 ns an argument).
    X_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    N: tl.constexpr,
    RMS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a chunk
    ROWS: tl.constexpr,  # rows of a tile, which are reduced together
    TILES: tl.constexpr,
    REPEAT: tl.constexpr,  # load weight and bias for every row of a tile
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    """One program: ROWS * TILES whole rows, each in ceil(N / BLOCK) chunks."""
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    first = tl.program_id(0).to(tl.int64) * (ROWS * TILES)
    row = tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    # 64 bits reach every program's first row; from there 32 do, unless rows are very far apart.
    if ROWS * TILES * X_STRIDE >= 2**31 or ROWS * TILES * Y_STRIDE >= 2**31:
        row = row.to(tl.int64)
    x += first * X_STRIDE
    y += first * Y_STRIDE
    col = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    # Where rows lie side by side among the threads, weight and bias are loaded for each of them: every thread gets the
    # vector that it needs, where one row for all would be loaded value by value and spread through shared memory.
    affine = col + 0 * row if REPEAT else col

    # Nothing may be read before the kernel ahead has ended; the kernel behind may be set up from now on.
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    # Loads of all tiles first: a thread keeps them in flight.
    loaded = ()
    for tile in tl.static_range(TILES):
        at = tile * ROWS + row  # [ROWS, 1]
        loaded += (_load(x + at * X_STRIDE, first + at, col, rows, N, BLOCK, LOAD),)
    if EARLY:
        weights = _all_affine(weight, affine, N, BLOCK)
        biases = _all_affine(bias, affine, N, BLOCK)

    for tile in tl.static_range(TILES):
        at = tile * ROWS + row
        mean, scale = _statistics(loaded[tile], col, EPS, N, RMS, BLOCK)
        for chunk in tl.static_range(CHUNKS):
            value = loaded[tile][chunk].to(tl.float32)
            if not RMS:
                value -= mean
            value *= scale
            if weight is not None:
                value *= (weights[chunk] if EARLY else _affine(weight, affine, chunk, N, BLOCK)).to(tl.float32)
            if bias is not None:
                value += (biases[chunk] if EARLY else _affine(bias, affine, chunk, N, BLOCK)).to(tl.float32)
            place = y + at * Y_STRIDE + (chunk * BLOCK + col)
            value = value.to(y.dtype.element_ty)
            if rows is not None or (chunk + 1) * BLOCK > N:
                tl.store(place, value, mask=_inside(first + at, col, rows, chunk, N, BLOCK), cache_modifier=STORE)
            else:
                tl.store(place, value, cache_modifier=STORE)


@triton.jit
def _load(source, row, col, rows, N: tl.constexpr, BLOCK: tl.constexpr, LOAD: tl.constexpr):
    """Rows of x, `source` their starts [ROWS, 1]: a tuple of chunks [ROWS, BLOCK], 0 where nothing is."""
    chunks = ()
    for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
        place = source + (chunk * BLOCK + col)
        if rows is not None or (chunk + 1) * BLOCK > N:
            inside = _inside(row, col, rows, chunk, N, BLOCK)
            chunks += (tl.load(place, mask=inside, other=0.0, cache_modifier=LOAD),)
        else:
            chunks += (tl.load(place, cache_modifier=LOAD),)
    return chunks


@triton.jit
def _statistics(chunks, col, EPS: tl.constexpr, N: tl.constexpr, RMS: tl.constexpr, BLOCK: tl.constexpr):
    """Mean (0 for RMSNorm) and 1 / sqrt(mean square of what is centred + eps) of every row, [ROWS, 1] float32."""
    # Chunks are added element by element first: one reduction across threads a statistic, and short sums.
    CHUNKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    mean = 0.0
    if not RMS:
        total = chunks[0].to(tl.float32)  # [ROWS, BLOCK]
        for chunk in tl.static_range(1, CHUNKS):
            total += chunks[chunk].to(tl.float32)
        # Corrected by its remainder: where a mean is large beside the deviation, its last digit is the result's error.
        # A correctly rounded division does the same, with a branch and a call.
        total = tl.sum(total, axis=1, keep_dims=True)
        mean = total * (1.0 / N)
        mean = tl.fma(tl.fma(mean, -1.0 * N, total), 1.0 / N, mean)
    squares = tl.zeros_like(chunks[0].to(tl.float32))
    for chunk in tl.static_range(CHUNKS):
        centred = chunks[chunk].to(tl.float32)
        if not RMS:
            centred -= mean
            if (chunk + 1) * BLOCK > N:
                centred = tl.where(chunk * BLOCK + col < N, centred, 0.0)
        squares += centred * centred
    return mean, tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) * (1.0 / N) + EPS)


@triton.jit
def _inside(row, col, rows, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of a chunk that is partly outside: below the last row, or right of the last column."""
    if rows is None:
        return chunk * BLOCK + col < N
    elif (chunk + 1) * BLOCK > N:
        return (chunk * BLOCK + col < N) & (row < rows)
    else:
        return row < rows


@triton.jit
def _all_affine(source, col, N: tl.constexpr, BLOCK: tl.constexpr):
    """Weight or bias as a tuple of chunks; no chunks where it was left out."""
    chunks = ()
    if source is not None:
        for chunk in tl.static_range((N + BLOCK - 1) // BLOCK):
            chunks += (_affine(source, col, chunk, N, BLOCK),)
    return chunks


@triton.jit
def _affine(source, col, chunk: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    """One chunk of weight or bias."""
    if (chunk + 1) * BLOCK > N:
        return tl.load(source + (chunk * BLOCK + col), mask=chunk * BLOCK + col < N, other=0.0)
    else:
        return tl.load(source + (chunk * BLOCK + col))


# --- launcher


class Call(NamedTuple):
    """The arguments of one call: those of `norm_infer`, in the kernel's order."""

    out: torch.Tensor | None
    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    is_rms_norm: bool

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor arguments by name, in order, without those left out."""
        return {name: value for name, value in zip(self._fields[:4], self[:4], strict=True) if value is not None}


def plan(call: Call) -> Launch:
    """The launch for a call that the kernel covers; its tensors may be on any device, meta included."""
    x, out = call.x, call.out
    width = x.shape[-1]
    rows = x.numel() // width
    major = torch.cuda.get_device_capability(x.device)[0] if x.is_cuda else DEFAULT
    config = select(width, x.numel() * x.itemsize, major)
    vector = config.warps * 32 * VECTOR_BYTES // x.itemsize  # elements that the threads hold in one vector each
    block = min(triton.next_power_of_2(width), vector)
    # Rows narrower than a vector of all threads lie side by side in it, and are few or many such tiles.
    tile, tiles = vector // block, config.vectors
    if block == vector:
        tile, tiles = _power_of_two_below(max(config.vectors * vector // width, 1)), 1
    pdl = config.pdl and major >= 9 and not is_interpreted(norm_kernel)
    return Launch.make(
        norm_kernel,
        (-(-rows // (tile * tiles)),),
        x if out is None else out,
        x,
        call.weight,
        call.bias,
        rows if rows % (tile * tiles) else None,
        X_STRIDE=_row_stride(x),
        Y_STRIDE=width if out is None else _row_stride(out),
        EPS=float(call.eps),
        N=width,
        RMS=bool(call.is_rms_norm),
        BLOCK=block,
        ROWS=tile,
        TILES=tiles,
        REPEAT=block < vector,
        EARLY=config.early,
        PDL=pdl,
        LOAD=config.load,
        STORE=config.store,
        num_warps=config.warps,
        launch_pdl=pdl,
    )


def launches(op: str, inputs: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> list[Launch]:
    """What the op would launch for these inputs: the hook through which the kernels are compiled ahead of time."""
    call = _call(op, **inputs, **scalars)
    _check(op, call)
    return [] if _uncovered(call) else [plan(_ready(call))]


def _power_of_two_below(number: int) -> int:
    """The largest power of two up to `number`."""
    return 1 << (number.bit_length() - 1)


def _row_stride(x: torch.Tensor) -> int | None:
    """Elements from one row of x [..., columns] to the next, None where there is no one such number."""
    outer = [(size, step) for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if not outer:
        return x.shape[-1]
    if any(step != inner[0] * inner[1] for (_, step), inner in pairwise(outer)):
        return None
    return outer[-1][1]


def _ready(call: Call) -> Call:
    """The call with an x that the kernel reads: itself where its rows are evenly spaced, else a copy, as upstream's.

    Also a copy where x has gaps and `out` is given: `out` may overlap x in any way then, and upstream allows it.
    """
    x = call.x
    if x.is_contiguous():
        return call
    fits = call.out is None and (x.stride(-1) == 1 or x.shape[-1] == 1) and _row_stride(x) is not None
    # The output is `empty_like` x, which keeps the order of x's strides: it has to be upstream's layout.
    skeleton = torch.empty_strided(x.shape, x.stride(), device="meta")
    if fits and torch.empty_like(skeleton).stride() == torch.empty_like(skeleton.contiguous()).stride():
        return call
    return call._replace(x=x.contiguous())


# --- what is wrong with a call, what the kernel covers, and the path for the rest


NORM_INFER = "norm_infer"
ONE_PASS = "triton_one_pass_rms_norm"


def _norm_infer_call(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 0.0,
    is_rms_norm: bool = False,
    out: torch.Tensor | None = None,
) -> Call:
    return Call(out, x, weight, bias, eps, is_rms_norm)


def _one_pass_call(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> Call:
    return Call(None, x, w, None, eps, True)


_CALLS = {NORM_INFER: _norm_infer_call, ONE_PASS: _one_pass_call}


def _call(op: str, *args: Any, **kwargs: Any) -> Call:
    """The call of a public function with these arguments."""
    return _CALLS[op](*args, **kwargs)


def _check(op: str, call: Call) -> None:
    """Raise ValueError for arguments that the op has no meaning for."""

    def expect(fits: bool, argument: str, expected: str, got: object) -> None:
        if not fits:
            raise ValueError(f"{op}: {argument}: expected {expected}, got {got}")

    x, out, weight, bias = call.x, call.out, call.weight, call.bias
    shape = list(x.shape)
    weight_name = "w" if op == ONE_PASS else "weight"
    if op == ONE_PASS:
        expect(x.dim() > 0, "x", "one dimension or more [..., columns]", shape)
        expect(weight is not None and weight.numel() == shape[-1], "w", f"{shape[-1]} elements", _shape(weight))
    else:
        expect(x.dim() == 2, "x", "two dimensions [rows, columns]", shape)
        expect(weight is None or list(weight.shape) == shape[-1:], "weight", f"shape {shape[-1:]}", _shape(weight))
        expect(bias is None or list(bias.shape) == shape[-1:], "bias", f"shape {shape[-1:]}", _shape(bias))
        expect(out is None or list(out.shape) == shape, "out", f"shape {shape}, as x", _shape(out))
    for name, tensor in call.tensors.items():
        argument = weight_name if name == "weight" else name
        expect(tensor.device == x.device, argument, f"device {x.device}, as x", tensor.device)
        expect(tensor.is_floating_point(), argument, "a floating-point dtype", tensor.dtype)


def _shape(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else list(tensor.shape)


def _uncovered(call: Call) -> str | None:
    """Why the kernel cannot take this call on any device, or None."""
    x, out = call.x, call.out
    if x.shape[-1] * x.itemsize > MAX_ROW_BYTES:
        return f"a row has {x.shape[-1] * x.itemsize} bytes; the kernel takes up to {MAX_ROW_BYTES}"
    for name, tensor in call.tensors.items():
        if tensor.dtype not in DTYPES:
            return f"{name} has dtype {tensor.dtype}; the kernel takes float16, bfloat16 and float32"
        if name in ("weight", "bias") and not tensor.is_contiguous():
            return f"{name} has gaps; the kernel loads vectors along it"
        if is_lazy(tensor):
            return f"{name} is a negated or conjugated view or a zero tensor: its memory does not hold its values"
        if tensor.requires_grad and torch.is_grad_enabled():
            return f"{name} requires gradients, which are being recorded; the kernel has no backward pass"
    if out is not None and not out.is_contiguous():
        rows, width = out.shape
        if width > 1 and out.stride(1) != 1:
            return f"out has stride {out.stride(1)} in its last dimension; the kernel stores vectors along it"
        if rows > 1 and out.stride(0) < width:
            return f"out has stride {out.stride(0)} between rows of {width}: several of its elements share memory"
    return None


def why_not(op: str, *args: Any, **kwargs: Any) -> str | None:
    """Why a call of `op` with these arguments takes the plain PyTorch path instead of the kernel; None if it does not.

    Raises the same ValueError as the call for arguments that the op has no meaning for.
    """
    call = _call(op, *args, **kwargs)
    _check(op, call)
    return _why_not(call)


def _why_not(call: Call) -> str | None:
    device = call.x.device.type
    if device == "cuda" or (device == "cpu" and is_interpreted(norm_kernel)):
        return _uncovered(call)
    return f"x is on {device}; the kernel runs on CUDA devices, and on the CPU when TRITON_INTERPRET=1"


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernel does not cover."""
    x, out = call.x.contiguous(), call.out
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if not call.is_rms_norm:
        y = y - y.mean(dim=-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + call.eps)
    if call.weight is not None:
        y = y * call.weight.reshape(-1).to(wide)
    if call.bias is not None:
        y = y + call.bias.to(wide)
    return y.to(x.dtype) if out is None else out.copy_(y)


_PLANS = {NORM_INFER: Plans(), ONE_PASS: Plans()}
_NORM_INFER_PLANS, _ONE_PASS_PLANS = _PLANS.values()


def _run(op: str, call: Call) -> torch.Tensor:
    """Everything that a call with a hot entry skips: find or make its entry, or take another path."""
    one_pass = op == ONE_PASS
    # What the public function passes to its entries.
    tensors: Sequence[torch.Tensor | None] = (call.x, call.weight) if one_pass else call[:4]
    scalars = (call.eps,) if one_pass else (call.eps, call.is_rms_norm)
    y = _PLANS[op].recall(tensors, scalars)
    if y is MISS:
        _check(op, call)
        if _why_not(call) is not None or call.x.numel() == 0:
            return _plain(call)
        ready = _ready(call)
        if ready is not call:
            return _run(op, ready)
        outputs = [0 if one_pass else 1] if call.out is None else []  # like x
        y = _PLANS[op].launch(plan(call), tensors, scalars, outputs)
    y = call.out if y is None else y
    assert isinstance(y, torch.Tensor)
    return y


# --- custom ops and fakes: what torch.compile and other tracers see

# The namespace is this module's name, so that a copy of this task registers ops of its own.
_NAMESPACE = __name__.replace(".", "_")
_SCHEMAS = {
    NORM_INFER: "(Tensor x, Tensor? weight, Tensor? bias, float eps, bool is_rms_norm=False) -> Tensor",
    # Not called `out`: Dynamo takes such an argument for that of PyTorch's own ops, and refuses it where it has gaps.
    "norm_infer_into": (
        "(Tensor(a!) target, Tensor x, Tensor? weight, Tensor? bias, float eps, bool is_rms_norm) -> ()"
    ),
    ONE_PASS: "(Tensor x, Tensor w, float eps=1e-06) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"{_NAMESPACE}::{_name}", _schema)
_ops = getattr(torch.ops, _NAMESPACE)


@torch.library.impl(f"{_NAMESPACE}::{NORM_INFER}", ("CPU", "CUDA"))
def _norm_infer_impl(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _run(NORM_INFER, _norm_infer_call(*args, **kwargs))


@torch.library.impl(f"{_NAMESPACE}::norm_infer_into", ("CPU", "CUDA"))
def _norm_infer_into_impl(*args: Any) -> None:
    _run(NORM_INFER, Call(*args))


@torch.library.impl(f"{_NAMESPACE}::{ONE_PASS}", ("CPU", "CUDA"))
def _one_pass_impl(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _run(ONE_PASS, _one_pass_call(*args, **kwargs))


@torch.library.register_fake(f"{_NAMESPACE}::{ONE_PASS}")
@torch.library.register_fake(f"{_NAMESPACE}::{NORM_INFER}")
def _fake(x: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    """A contiguous tensor like x."""
    return torch.empty_like(x.contiguous())


@torch.library.register_fake(f"{_NAMESPACE}::norm_infer_into")
def _fake_into(*_args: Any, **_kwargs: Any) -> None:
    """Returns nothing, and leaves shape, dtype and strides of `target` as they are."""


# --- public functions


def norm_infer(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    is_rms_norm: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm or RMSNorm of every row.

    Args:
        x: [rows, columns], float16, bfloat16 or float32; a row has at most 64 KiB, rows may be apart from each other.
        weight: [columns], or None for 1.
        bias: [columns], or None for 0.
        eps: added to the variance or the mean square.
        is_rms_norm: RMSNorm instead of LayerNorm.
        out: what to write into, of x's shape; x itself is allowed. Its dtype may differ from x's.

    Returns:
        `out` where it is given, else a new contiguous tensor like x.

    Other dtypes and wider rows, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _NORM_INFER_PLANS.hot:
            result = entry(out, x, weight, bias, eps, is_rms_norm)
            if result is not MISS:
                return out if result is None else result
    call = Call(out, x, weight, bias, eps, is_rms_norm)
    if not (is_dynamo_compiling() or is_tracing(*call.tensors.values())):
        return _run(NORM_INFER, call)
    if out is None:
        return _ops.norm_infer(x, weight, bias, eps, is_rms_norm)
    _ops.norm_infer_into(*call)
    return out


def triton_one_pass_rms_norm(x: torch.Tensor, w: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [..., columns], float16, bfloat16 or float32.
        w: the weight, as many elements as columns.
        eps: added to the mean square.

    Returns:
        A new contiguous tensor like x.

    Other dtypes, rows above 64 KiB, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    if not is_dynamo_compiling():
        for entry in _ONE_PASS_PLANS.hot:
            result = entry(x, w, eps)
            if result is not MISS:
                return result
    call = _one_pass_call(x, w, eps)
    if is_dynamo_compiling() or is_tracing(*call.tensors.values()):
        return _ops.triton_one_pass_rms_norm(x, w, eps)
    return _run(ONE_PASS, call)
