"""The chains of the upstream arm give the ops' results, with PyTorch in place of the kernels that they call."""

import importlib
import sys

import pytest
import torch

from kda_tools.lab.beside_upstream import stand_ins

from .cases import FORMS, assert_matches, make

called = []
"""What the arm called of upstream's, in order."""


def add(residual, update, gate):
    called.append("add")
    return residual + update * gate


def takes(x, scale, shift):
    return x.shape[-1] % 8 == 0 and all(one.dim() == 2 and one.is_contiguous() for one in (scale, shift))


def modulate(x, scale, shift):
    assert takes(x, scale, shift)
    called.append("modulate")
    return x * (1 + scale[:, None]) + shift[:, None]


MODULES = {
    "sglang.kernels.kda_kernels.residual_gate_add_jit": {"residual_gate_add": add},
    "sglang.kernels.ops.diffusion.modulate.modulate_scale_shift_jit": {
        "can_use_modulate_scale_shift_cuda": takes,
        "modulate_scale_shift_cuda": modulate,
    },
}


@pytest.fixture
def arm(monkeypatch):
    for name, module in stand_ins(MODULES).items():
        monkeypatch.setitem(sys.modules, name, module)
    package = f"{__package__.rpartition('.')[0]}.baseline.primary"
    monkeypatch.delitem(sys.modules, package, raising=False)
    called.clear()
    yield importlib.import_module(package)
    sys.modules.pop(package)


@pytest.mark.parametrize("layout", ["", "packed", "apart"])
@pytest.mark.parametrize("form", FORMS)
def test_the_chain_is_the_op(arm, form, layout):
    """With upstream's kernel for every sum that has a gate, and for every modulation."""
    op, tensors = make(form, layout=layout)
    before = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
    assert_matches(arm, op, tensors)
    wanted = {"gate": "add", "scale": "modulate", "other_scale": "modulate"}
    expected = [call for name, call in wanted.items() if tensors.get(name) is not None]
    assert called == expected
    assert all(tensors[name] is None or torch.equal(tensors[name], before[name]) for name in before)


def test_what_upstreams_kernel_refuses_is_modulated_by_pytorch(arm):
    op, tensors = make("gate-two", columns=100)
    assert_matches(arm, op, tensors)
    assert called == ["add"]
