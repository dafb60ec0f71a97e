"""Inputs for this task's tests, and the op in upstream's order of sums and with its fused multiply-adds."""

import numpy as np
import torch

from ..bench import reference

OP = "rounded_qknorm_rope"
EPS = 1e-5
NAMES = ("q", "k", "q_weight", "k_weight", "cos_sin")
TIES = {"tokens": 16, "heads": 8, "ties": True}
"""Heads whose mean is rounded up or down as the order of the sum decides, see `_heads_at_a_tie`."""


def make(
    tokens=5,
    heads=6,
    dim=128,
    batch=1,
    own=False,
    dtype=torch.bfloat16,
    layout="",
    spread=1.0,
    ties=False,
    device="cpu",
):
    """The op's tensors by name. `own`: each batch has rows of cos_sin of its own; `spread`: the deviation of q and k.

    `layout`: packed, q and k are views of one tensor with v; apart, they have gaps that differ. `ties`: heads for which
    the order of the sum decides; then `spread` and `layout` are not used.
    """
    generator = torch.Generator().manual_seed(tokens * dim + heads)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    if ties:
        q, k = (_heads_at_a_tie((batch, tokens, heads), dtype, generator).to(device) for _ in range(2))
    elif layout == "packed":
        wide = (spread * normal(batch, tokens, 3 * heads * dim)).to(device, dtype)
        q, k, _ = wide.unflatten(-1, (3, heads, dim)).unbind(2)
    else:
        more = (1, 8) if layout == "apart" else (0, 0)
        wide = [(spread * normal(batch, tokens + i, heads + i, dim + n)).to(device, dtype) for i, n in enumerate(more)]
        q, k = (x[:, :tokens, :heads, :dim] for x in wide)
    weights = [(1 + 0.3 * normal(dim)).to(device, dtype) for _ in range(2)]
    angles = torch.rand((batch if own else 1) * tokens, dim // 2, generator=generator) * 6
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1).to(device)
    return dict(zip(NAMES, (q, k, *weights, tables), strict=True))


def _heads_at_a_tie(shape, dtype, generator):
    """[*shape, 128]: two large squares, and as much as leads to the middle between their sum and the next number.

    Then up to five squares so small that one alone gets lost beside a large one, while several, added to each other
    before, do not. The mean is rounded up if any is left. Places and signs are drawn for each head.
    """
    x = torch.zeros(*shape, 128)
    x[..., :2] = 64.0
    if dtype == torch.bfloat16:  # 8192 and the next number are 64 apart
        x[..., 2:4] = 4.0
    else:  # 8
        x[..., 2] = 2.0
    number = torch.randint(1, 6, (*shape, 1), generator=generator)
    x[..., 4:] = torch.where(torch.arange(124) < number, 2.0**-6, 0.0)
    x = x.gather(-1, torch.rand(*shape, 128, generator=generator).argsort(dim=-1))
    return (x * (1 - 2 * torch.randint(0, 2, x.shape, generator=generator))).to(dtype)


def cancelling(dtype=torch.bfloat16, device="cpu"):
    """Tensors whose normed pairs are the weights, and angles for which the products of a pair nearly cancel.

    What is left is the error of the rounded product, so that every other use of fused multiply-adds shows. The even
    elements cancel for the first half of the tokens, the odd ones for the second half.
    """
    tensors = make(tokens=16, heads=2, dtype=dtype)
    ones = torch.ones_like(tensors["q"])
    ones[:, 8:, :, 0::2] = -1
    weight = tensors["q_weight"]
    even, odd = weight.float().view(-1, 2).unbind(-1)
    scale = torch.rand(8, len(even), generator=torch.Generator().manual_seed(1)) + 0.5
    tables = torch.cat((torch.cat((odd * scale, even * scale), -1), torch.cat((even * scale, odd * scale), -1)))
    tensors |= {"q": ones, "k": ones.clone(), "k_weight": weight.clone(), "cos_sin": tables}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def unrotated(tensors):
    """The same tensors with an angle of zero everywhere."""
    tables = torch.zeros_like(tensors["cos_sin"])
    tables[:, : tables.shape[1] // 2] = 1
    return tensors | {"cos_sin": tables}


def assert_matches(op, tensors, eps=EPS, steps=3.0):
    """Compare `op` with the oracle: a mean rounded to its neighbour moves a pair by a few steps of the dtype."""
    got = op(**tensors, eps=eps)
    wanted = reference.rounded_qknorm_rope(**tensors, eps=eps)
    assert len(got) == 2
    for one, want in zip(got, wanted, strict=True):
        assert (one.shape, one.dtype, one.is_contiguous()) == (want.shape, tensors["q"].dtype, True)
        size = want.unflatten(-1, (-1, 2)).norm(dim=-1).repeat_interleave(2, dim=-1)  # of the pair
        error = (one.double() - want).abs()
        assert bool((error <= steps * torch.finfo(one.dtype).eps * size + 1e-30).all()), float((error / size).max())


def in_upstreams_order(q, k, q_weight, k_weight, cos_sin, eps=EPS, halves=(8, 4, 2, 1), rotated=None):
    """The op's bits, of NumPy and of PyTorch's conversions alone: [q_out, k_out].

    `halves`: how far apart the lanes are that are added, level by level. `rotated`: functions of a pair, its cosine and
    its sine, in place of `rotated_even` and `rotated_odd`.
    """
    dtype = q.dtype
    first, second = rotated or (rotated_even, rotated_odd)

    def rounded(x):
        return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).float().numpy()

    cos, sin = np.split(cos_sin.cpu().numpy().reshape(-1, q.shape[1], 1, q.shape[3]), 2, axis=-1)
    results = []
    for tensor, weight in ((q, q_weight), (k, k_weight)):
        x, w = tensor.cpu().float().numpy(), weight.cpu().float().numpy()
        squares = rounded(x * x).reshape(*x.shape[:-1], 16, 8)
        lanes = squares[..., 0]
        for place in range(1, 8):
            lanes = lanes + squares[..., place]
        for half in halves:
            lanes = lanes + lanes[..., np.arange(16) ^ half]
        mean = rounded(lanes[..., :1] / np.float32(x.shape[-1]))
        shifted = rounded(mean + np.float32(eps))
        factor = rounded((1 / np.sqrt(shifted.astype(np.float64))).astype(np.float32))
        n = rounded(rounded(x * factor) * w)
        y = np.empty_like(n)
        y[..., 0::2] = first(n[..., 0::2], n[..., 1::2], cos, sin)
        y[..., 1::2] = second(n[..., 0::2], n[..., 1::2], cos, sin)
        results.append(torch.from_numpy(y).to(dtype).to(q.device))
    return results


def rotated_even(even, odd, cos, sin):
    """The first element of rotated pairs, as the kernel's function of this name."""
    return _fma(even, cos, -(odd * sin))


def rotated_odd(even, odd, cos, sin):
    """The second element of rotated pairs, as the kernel's function of this name."""
    return _fma(odd, cos, even * sin)


def _fma(a, b, c):
    """a * b + c with one rounding; extended precision holds the product of two float32."""
    return (a.astype(np.longdouble) * np.asarray(b, np.longdouble) + c).astype(np.float32)
