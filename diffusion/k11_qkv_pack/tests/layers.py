"""Small layers in the place of upstream's, and what tests do with a block of upstream's on the CPU."""

import torch

from kda_tools.models import deferred_lines

from .. import solution

STEP = torch.finfo(torch.bfloat16).eps


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape).to(dtype)


class RMSNorm(torch.nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = torch.nn.Parameter(normal(size) * 0.3 + 1)
        self.variance_epsilon, self.variance_size_override = eps, None


class LayerNormScaleShift(torch.nn.Module):
    def __init__(self, size, eps=1e-6, elementwise_affine=False, dtype=None):
        super().__init__()
        assert not elementwise_affine
        self.eps = eps

    def forward(self, x, shift, scale):
        y = torch.nn.functional.layer_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (y * (1 + scale[:, None]) + shift[:, None]).to(x.dtype)


class Linear(torch.nn.Module):
    """Of one rank, in its weights' dtype, as under autocast. Those that split their output get a list of widths."""

    ranks = 1

    def __init__(self, wide, widths, input_is_parallel=False, **_):
        super().__init__()
        parts = [width // self.ranks for width in widths] if isinstance(widths, list) else [widths]
        wide = wide // self.ranks if input_is_parallel else wide
        self.weight = torch.nn.Parameter(normal(sum(parts), wide) / wide**0.5)

    def forward(self, x):
        return x.to(self.weight.dtype) @ self.weight.T, None


class MLP(torch.nn.Module):
    def __init__(self, input_dim, *_, **__):
        super().__init__()
        self.layer = Linear(input_dim, input_dim)

    def forward(self, x):
        return self.layer(x)[0].tanh()


class Attention(torch.nn.Module):
    """It keeps what it is given."""

    def __init__(self, **_):
        super().__init__()
        self.given = []

    def forward(self, q, k, v, **others):
        self.given.append((q, k, v, others))
        heads = (x.float().transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).to(q.dtype)


def normed_and_rotated(*, q, k, q_norm, k_norm, head_dim, cos_sin_cache=None, freqs_complex=None, **others):
    """Upstream's kernels: all in float32, rounded once. Neighbours turn as one complex number."""
    assert not others.get("is_neox")
    assert others["allow_inplace"]
    made = []
    for x, norm in ((q, q_norm), (k, k_norm)):
        y = torch.nn.functional.rms_norm(x.float(), (head_dim,), norm.weight.float(), norm.variance_epsilon)
        if cos_sin_cache is not None:
            turns = torch.complex(*cos_sin_cache.chunk(2, dim=-1)) if freqs_complex is None else freqs_complex
            pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous())
            y = torch.view_as_real(pairs * turns[: x.shape[1], None]).flatten(-2)
        made.append(y.to(x.dtype))
    return made


class Lines:
    """A block, and the calls of the op in its lines. Subclasses have `module`, `site`, `block`, `calls` and `run`."""

    def put(self, refused=()):
        """Put the lines there. `refused`: numbers of calls that the op does not take."""

        def op(*given):
            self.calls.append(given)
            refuses = len(self.calls) - 1 in refused
            return (deferred_lines.refuse if refuses else solution.qkv_norm_rope_pack)(*given)

        deferred_lines.put(self.module, self.site.ported, (self.block,), self.site.op, op)

    def outcome(self):
        """The block's output, or what it raises."""
        try:
            return self.run()[0]
        except (ValueError, RuntimeError, TypeError, AttributeError, UnboundLocalError) as error:
            return repr(error)


def assert_equal(got, want):
    assert type(got) is type(want)
    if isinstance(got, tuple):
        assert all(map(torch.equal, got, want))
    else:
        assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want
