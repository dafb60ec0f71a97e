"""The chain of the upstream arm gives the op's result, with PyTorch in place of the kernels that it calls."""

import importlib
import sys

import pytest
import torch

from kda_tools.lab.beside_upstream import stand_ins

from .cases import EPS, assert_matches, make


def normed(x, weight, eps):
    factor = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * factor * weight).contiguous()


def rotate(positions, query, key, head_size, cos_sin_cache, is_neox):
    assert not is_neox
    assert positions.dtype == torch.int64
    cos, sin = cos_sin_cache[positions, None].chunk(2, dim=-1)
    for flat in (query, key):
        x = flat.view(len(positions), -1, head_size)
        a, b = x[..., 0::2].float(), x[..., 1::2].float()
        x.copy_(torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2))


NORM = "sglang.kernels.ops.diffusion.norm.zimage_qk_rmsnorm_triton"
MODULES = {
    NORM: {"zimage_qk_rmsnorm_native": normed},
    "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": rotate},
}


@pytest.fixture
def arm(monkeypatch):
    for name, module in stand_ins(MODULES).items():
        monkeypatch.setitem(sys.modules, name, module)
    package = f"{__package__.rpartition('.')[0]}.baseline.primary"
    monkeypatch.delitem(sys.modules, package, raising=False)
    yield importlib.import_module(package).rounded_qknorm_rope
    sys.modules.pop(package)


@pytest.mark.parametrize(("batch", "own"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("layout", ["", "packed", "apart"])
def test_the_chain_is_the_op(arm, layout, batch, own):
    tensors = make(batch=batch, own=own, layout=layout)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    assert_matches(arm, tensors)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())


def test_positions_are_made_once(arm):
    """But anew for another number of tokens."""
    made = sys.modules[arm.__module__].POSITIONS
    for tokens in (5, 5, 7):
        assert_matches(arm, make(tokens))
    assert [len(numbers) for numbers in made.values()] == [5, 7]


def test_a_missing_flashinfer_is_named(arm, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer.rope", None)
    with pytest.raises(ImportError, match="expected flashinfer-python"):
        arm(**make(), eps=EPS)


def test_a_call_that_upstreams_kernel_refuses_is_normed_by_pytorch(arm, monkeypatch):
    monkeypatch.setattr(sys.modules[arm.__module__], "zimage_qk_rmsnorm_native", lambda *_: None)
    assert_matches(arm, make(dtype=torch.float16, layout="apart"))
