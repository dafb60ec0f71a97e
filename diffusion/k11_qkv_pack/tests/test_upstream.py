"""The chains of the upstream arms give the op's result, with PyTorch in place of the kernels that they call."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from kda_tools.lab.beside_upstream import stand_ins

from ..bench import reference
from .cases import make


def normed(x, weight, eps):
    return torch.nn.functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def rotated(x, cos, sin):
    a, b = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack((a * cos[:, None] - b * sin[:, None], b * cos[:, None] + a * sin[:, None]), -1).flatten(-2).to(x)


def in_place(q, k, q_weight, k_weight, cache, positions, *, is_neox, eps):
    assert not is_neox
    cos, sin = cache[positions].chunk(2, dim=-1)
    for x, weight in ((q, q_weight), (k, k_weight)):
        x.copy_(rotated(normed(x, weight, eps), cos, sin))


def pack(clip_q, clip_k, clip_v, text_q, text_k, text_v, cos, sin):
    turned = [rotated(x, cos, sin) for x in (clip_q, clip_k)]
    pairs = zip((*turned, clip_v), (text_q, text_k, text_v), strict=True)
    return torch.stack([torch.cat(pair, dim=1) for pair in pairs]).unbind(0)


SWITCH = SimpleNamespace(mark=lambda _: None, is_enabled=lambda _: False, mount=lambda _: True)
JIT, OPS = "sglang.jit_kernel.diffusion", "sglang.kernels.ops.diffusion"
MODULES = {
    "primary": {
        f"{JIT}.qknorm_rope": {"fused_inplace_qknorm_rope": in_place},
        f"{JIT}.triton.rmsnorm_onepass": {"triton_one_pass_rms_norm": normed},
        f"{JIT}.triton.rotary": {"apply_rotary_embedding": rotated},
    },
    "latest": {
        f"{OPS}.rope.hunyuan_qkv_pack_triton": {"hunyuan_qkv_rope_pack": pack},
        f"{OPS}.rope.qknorm_rope_jit": {"fused_inplace_qknorm_rope": in_place},
        f"{OPS}.sites.hunyuan_qknorm_site": {
            "HUNYUAN_QKNORM": SWITCH,
            "try_hunyuan_qknorm": lambda _, q, k, *weights: (normed(q, weights[0], 1e-6), normed(k, weights[1], 1e-6)),
        },
    },
}


@pytest.fixture(params=list(MODULES))
def arm(request, monkeypatch):
    for name, module in stand_ins(MODULES[request.param]).items():
        monkeypatch.setitem(sys.modules, name, module)
    package = f"{__package__.rpartition('.')[0]}.baseline.{request.param}"
    monkeypatch.delitem(sys.modules, package, raising=False)
    yield importlib.import_module(package).qkv_norm_rope_pack
    sys.modules.pop(package)


@pytest.mark.parametrize("shape", [{}, {"rows": 3}, {"form": "none"}, {"form": "cache"}], ids=str)
@pytest.mark.parametrize(("batch", "layout"), [(1, "mlp"), (2, "")])
@pytest.mark.parametrize("into", [False, True])
def test_the_chain_is_the_op(arm, shape, batch, layout, into):
    tensors = make(batch=batch, layout=layout, **shape)
    before = {name: tensor.clone() for name, tensor in tensors.items() if tensor is not None}
    (want,) = reference.qkv_norm_rope_pack(**tensors)
    joint = torch.zeros(3, batch, 8, *want.shape[3:], dtype=torch.bfloat16)
    out = {"out": joint[:, :, :5]} if into else {}
    got = arm(**tensors, **out)
    assert not into or got.data_ptr() == joint.data_ptr()
    assert not joint[:, :, 5:].any()
    torch.testing.assert_close(got.double(), want, atol=1e-2, rtol=1e-2)  # rounded twice
    assert torch.equal(got[2], tensors["v"])
    assert all(torch.equal(tensors[name], tensor) for name, tensor in before.items())
