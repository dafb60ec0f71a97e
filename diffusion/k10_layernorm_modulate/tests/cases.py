"""Inputs for this task's tests, and PyTorch's LayerNorm in its order of sums."""

import numpy as np
import torch

from ..bench import reference
from ..solution import fused_layernorm_modulate

OP = "fused_layernorm_modulate"
EPS = 1e-6
THREADS = 128


def make(batch=2, tokens=3, columns=1024, chunks=6, offset=0.0, spread=3.0, device="cpu", dtype=torch.bfloat16):
    """x as `offset` and `spread` say, and scale and shift as the first of `chunks` chunks of one tensor."""
    generator = torch.Generator().manual_seed(columns)
    x = spread * torch.randn(batch, tokens, columns, generator=generator) + offset
    wide = torch.randn(batch, max(chunks, 2) * columns, generator=generator).to(device, dtype)
    scale, shift = wide[:, :columns], wide[:, columns : 2 * columns]
    return [x.to(device, dtype), *((scale, shift) if chunks > 1 else (scale.contiguous(), shift.contiguous())), EPS]


def assert_right(x, scale, shift, eps, op=fused_layernorm_modulate):
    """Call `op` and compare value and form with the oracle, to the errors of four roundings."""
    (want,) = reference.fused_layernorm_modulate(x, scale, shift, eps)
    got = op(x, scale, shift, eps)
    assert (got.shape, got.dtype, got.device) == (x.shape, x.dtype, x.device)
    assert got.is_contiguous()
    step = torch.finfo(x.dtype).eps
    product = want if shift is None else want - shift.double()[:, None]
    error = (got.double() - want).abs()
    assert bool((error <= 2 * step * (product.abs() + want.abs()) + 4 * step).all())


def in_pytorchs_order(x, scale, shift, eps):
    """The op in PyTorch's order of sums, of NumPy alone: 128 threads a row, Welford, then merges in pairs."""
    rows = x.float().numpy().reshape(-1, x.shape[-1] // (4 * THREADS), THREADS, 4)
    mean = squares = np.zeros((len(rows), THREADS), np.float32)
    count = 0
    for step in range(rows.shape[1]):
        for value in np.moveaxis(rows[:, step], -1, 0):
            count += 1
            delta = value - mean
            mean = _fma(delta, np.float32(1) / np.float32(count), mean)
            squares = _fma(delta, value - mean, squares)
    mean, squares = mean.reshape(-1, 4, 32), squares.reshape(-1, 4, 32)  # [rows, warps, lanes]
    for apart in (16, 8, 4, 2, 1):
        low, high = slice(None, apart), slice(apart, 2 * apart)
        mean, squares = _merged(mean[..., low], squares[..., low], mean[..., high], squares[..., high], count)
        count *= 2
    mean, squares = mean[..., 0], squares[..., 0]
    for apart in (2, 1):
        low, high = slice(None, apart), slice(apart, 2 * apart)
        mean, squares = _merged(mean[:, low], squares[:, low], mean[:, high], squares[:, high], count)
        count *= 2
    variance = squares / np.float32(x.shape[-1]) + np.float32(eps)
    inverse = (1 / np.sqrt(variance.astype(np.float64))).astype(np.float32)
    normed = inverse * (x.float().numpy().reshape(len(rows), -1) - mean)
    y = torch.from_numpy(normed).to(x.dtype).reshape(x.shape) * (1 + scale[:, None])
    return y if shift is None else y + shift[:, None]


def _merged(mean, squares, other_mean, other_squares, count):
    share = np.float32(1) / np.float32(2 * count) * np.float32(count)
    delta = mean - other_mean
    merged = _fma(other_mean, share, share * mean)
    return merged, _fma(share, np.float32(count) * (delta * delta), other_squares + squares)


def _fma(a, b, c):
    """a * b + c with one rounding; extended precision holds the product of two float32."""
    return (a.astype(np.longdouble) * np.asarray(b, np.longdouble) + c).astype(np.float32)
