"""Inputs for this task's tests, and the ops in PyTorch's order of sums."""

import os
from functools import cache, partial

import numpy as np
import torch

from ..bench import grid, reference

EPS = 1e-6
THREADS, VECTOR = 128, 4
FORMS = tuple(grid.FORMS)
"""What a call can be: an op, with and without gate and modulation."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def make(
    form="gate-modulate",
    batch=2,
    tokens=3,
    columns=512,
    layout="packed",
    dtype=torch.bfloat16,
    spread=1.0,
    device="cpu",
):
    """The op's name and its tensors by name, None for those that the form leaves out.

    `layout` of the operands: packed, each is a chunk of a tensor with six; apart, they have gaps of their own, that no
    vector divides; else contiguous. `spread`: the deviation of x and residual.
    """
    op, operands = grid.FORMS[form]
    generator = torch.Generator().manual_seed(columns + 7 * tokens + batch)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = {}
    if op != grid.SINGLE:
        tensors["residual"] = (spread * normal(batch, tokens, columns)).to(device, dtype)
    tensors["x"] = (spread * normal(batch, tokens, columns)).to(device, dtype)
    chunks = normal(batch, 1, 6 * columns).to(device, dtype).unflatten(-1, (6, columns)).unbind(-2)
    for number, name in enumerate(("gate", "scale", "shift", "other_scale", "other_shift")):
        if name not in operands:
            chunk = None
        elif layout == "packed":
            chunk = chunks[number]
        elif layout == "apart":
            chunk = torch.cat((chunks[number], chunks[number][..., : 2 * number + 1]), dim=-1)[..., :columns]
        else:
            chunk = chunks[number].contiguous()
        tensors[name] = chunk
    return op, {name: tensors[name] for name in NAMES[op]}


NAMES = {
    grid.SINGLE: ("x", "scale", "shift"),
    grid.RESIDUAL: ("residual", "x", "gate", "scale", "shift"),
    grid.TWO: ("residual", "x", "gate", "scale", "shift", "other_scale", "other_shift"),
}
"""Op -> its tensors, in order."""


def as_tuple(result):
    """The tensors that an op returned."""
    return result if isinstance(result, tuple) else (result,)


def assert_matches(module, op, tensors, eps=EPS):
    """Compare value and form of `module`'s op with the oracle: the norm may be rounded to its neighbour."""
    x = tensors["x"]
    got = as_tuple(getattr(module, op)(**tensors, eps=eps))
    wanted = getattr(reference, op)(**tensors, eps=eps)
    shifts = [tensors.get(name) for name in ("shift", "other_shift")[: len(got)]]
    step = torch.finfo(x.dtype).eps
    assert len(got) == len(wanted)
    for place, (one, want) in enumerate(zip(got, wanted, strict=True)):
        assert (one.shape, one.dtype, one.device, one.is_contiguous()) == (x.shape, x.dtype, x.device, True)
        last = place == len(got) - 1 and op != grid.SINGLE
        shift = None if last or place == 2 else shifts[place]
        # h has its last rounding alone; a product has those of the norm and of itself before the sum with shift.
        allowed = 0.51 * step * want.abs() if last else step * want.abs()
        if shift is not None:
            allowed = allowed + 2 * step * (want - shift.double()).abs()
        error = (one.double() - want).abs()
        assert bool((error <= (1 if last or step > 1e-6 else 8) * allowed + step**2).all()), (place, float(error.max()))


# --- PyTorch's bits, of NumPy


def pytorchs_sum(
    squares,
    threads=THREADS,
    vector=VECTOR,
    halves=(16, 8, 4, 2, 1),
    warps=(2, 1),
    places=range(VECTOR),
    chunk=1,
    apart=False,
):
    """The sum over each row, [rows], in the order of PyTorch's vectorised RMSNorm; the other arguments change it.

    A thread adds its elements one by one, `vector` neighbours of each chunk of `threads` vectors. Then those threads of
    a warp are added that are `halves` apart, level by level, then warps that are `warps` apart. `places`: the order in
    a vector; `chunk` of -1: a thread begins with its last vector; `apart`: it adds each vector for itself first.
    """
    parts = squares.reshape(len(squares), -1, threads, vector)[:, ::chunk]
    total = np.zeros((len(squares), threads), np.float32)
    for one in np.moveaxis(parts, 1, 0):
        if apart:
            total = total + one.cumsum(axis=-1)[..., -1]
            continue
        for place in places:
            total = total + one[..., place]
    lanes = total.reshape(len(squares), -1, 32)
    for half in halves:
        lanes = lanes + lanes[..., np.arange(32) ^ half]
    total = lanes[..., 0]
    for half in warps if threads == THREADS else (1,):
        total = total + total[:, np.arange(total.shape[1]) ^ half]
    return total[:, 0]


OTHER_ORDERS = {
    "the last element of a vector first": partial(pytorchs_sum, places=(3, 2, 1, 0)),
    "the middle elements of a vector exchanged": partial(pytorchs_sum, places=(0, 2, 1, 3)),
    "each vector for itself": partial(pytorchs_sum, apart=True),
    "the last vector first": partial(pytorchs_sum, chunk=-1),
    "columns in reverse": lambda squares: pytorchs_sum(squares[:, ::-1]),
    "near lanes first": partial(pytorchs_sum, halves=(1, 2, 4, 8, 16)),
    "near warps first": partial(pytorchs_sum, warps=(1, 2)),
    "vectors of eight": partial(pytorchs_sum, threads=64, vector=8, places=range(8)),
    "one after another": lambda squares: squares.cumsum(axis=-1)[:, -1],
}
"""Orders that a kernel could have by mistake."""


def in_pytorchs_order(
    x,
    scale=None,
    shift=None,
    other_scale=None,
    other_shift=None,
    residual=None,
    gate=None,
    eps=EPS,
    order=pytorchs_sum,
):
    """An op's results as a tuple: NumPy's sums, and PyTorch's operators where each element is computed alone."""
    h = x if residual is None else residual + (x if gate is None else x * gate)
    n = _normed(h, eps, order)
    pairs = [(scale, shift)] + [(other_scale, other_shift)] * (other_scale is not None)
    y = tuple(n if one is None else n * (1 + one) + two for one, two in pairs)
    return y if residual is None else (*y, h)


def _normed(h, eps, order):
    rows = h.cpu().float().numpy().reshape(-1, h.shape[-1])
    mean = order(rows * rows) / np.float32(rows.shape[-1])
    return torch.from_numpy(inverse_root(mean + np.float32(eps))[:, None] * rows).to(h.device, h.dtype).reshape(h.shape)


def inverse_root(x):
    """1 / sqrt(x), rounded to float32 once; twice in Triton's interpreter, whose rsqrt does so.

    Its last bit decides some bits of the norm. A GPU's rsqrt is off by up to two of them: there the tests ask PyTorch.
    """
    return 1 / np.sqrt(x) if INTERPRETED else (1 / np.sqrt(x.astype(np.float64))).astype(np.float32)


def unmodulated(h):
    """Tensors of `rounded_rmsnorm_modulate` for which y is the norm: scale and shift are zeros."""
    zeros = torch.zeros(len(h), 1, h.shape[-1], dtype=h.dtype, device=h.device)
    return {"x": h, "scale": zeros, "shift": zeros.clone()}


@cache
def order_shows(columns, dtype=torch.bfloat16):
    """[1, rows, columns] whose norm has other bits in any of `OTHER_ORDERS`: up to three rows for each.

    Another order changes a sum in its last bits alone, the more so if a few squares are much larger than the rest. The
    norm then changes only where it is next to the middle of two numbers. So many rows are drawn, those nearest to a
    middle are shuffled many times, and those are kept in which the order shows.
    """
    generator = torch.Generator().manual_seed(columns)
    count = 8_000_000 // columns
    large = torch.rand(count, columns, generator=generator) < 4 / columns
    drawn = (torch.where(large, 64.0, 1.0) * torch.randn(count, columns, generator=generator)).to(dtype)
    x = drawn[_from_a_middle(drawn).argsort()[:12]].repeat_interleave(4_000_000 // (12 * columns), dim=0)
    x = x.gather(-1, torch.rand(x.shape, generator=generator).argsort(dim=-1))[None]
    right = _normed(x, EPS, pytorchs_sum)
    kept = []
    for name, order in OTHER_ORDERS.items():
        if shows_at_all(name, columns):
            found = (_normed(x, EPS, order) != right).any(dim=-1)[0].nonzero()[:3, 0].tolist()
            assert found, f"no row of {x.shape[1]} shows this order: {name}"
            kept += found
    return x[:, sorted(set(kept))].contiguous()


def shows_at_all(name, columns):
    """Whether it is another order: those of vectors are not, if there is a single vector for each thread."""
    return name not in ("the last vector first", "each vector for itself") or columns > THREADS * VECTOR


def _from_a_middle(rows):
    """How far the norm of each row is from the middle of two numbers at least, beside its size."""
    digits = {torch.bfloat16: 8, torch.float16: 11}[rows.dtype]
    wide = rows.double()
    units = (wide / (wide.square().mean(dim=-1, keepdim=True) + EPS).sqrt()).frexp().mantissa.abs() * 2**digits
    return ((units.frac() - 0.5).abs() / units.clamp(min=1)).amin(dim=-1)
