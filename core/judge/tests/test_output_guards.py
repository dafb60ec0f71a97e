"""Guards around what a verified call allocates see each stray byte, and change nothing else."""

import ctypes

import pytest
import torch

from kda_judge.arms.output_guards import MAKERS, guarded
from kda_judge.arms.protocol import ArmSpec, Place

X = torch.arange(24.0).reshape(4, 6)
HOW = {
    "empty": lambda: torch.empty(4, 6),
    "empty_like": lambda: torch.empty_like(X),
    "empty_strided": lambda: torch.empty_strided((4, 6), (1, 4)),
    "zeros": lambda: torch.zeros(4, 6),
    "zeros_like": lambda: torch.zeros_like(X),
    "full": lambda: torch.full((4, 6), 2.0),
    "full_like": lambda: torch.full_like(X, 2.0),
    "new_empty": lambda: X.new_empty(4, 6),
    "new_empty_strided": lambda: X.new_empty_strided((4, 6), (6, 1)),
    "new_zeros": lambda: X.new_zeros(4, 6),
    "new_full": lambda: X.new_full((4, 6), 2.0),
}


def arm(device="cpu", compiled=False):
    return ArmSpec(name="arm", folder="", module="", device=device, compiled=compiled)


def place(*shape, dtype="float32"):
    return Place(offset=0, shape=shape, stride=torch.empty(shape, device="meta").stride(), dtype=dtype)


@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("offset", [None, -1, 96, 96 + 511])
def test_on_a_cpu_a_stray_byte_shows(name, offset):
    plain = HOW[name]()
    with guarded(arm(), [place(4, 6)]) as guards:
        made = HOW[name]()
        if offset is not None:
            ctypes.memset(made.data_ptr() + offset, 0, 1)
    assert guards.broken() is (offset is not None)
    assert (type(made), made.shape, made.stride(), made.dtype) == (torch.Tensor, (4, 6), plain.stride(), torch.float32)
    assert made.data_ptr() % 64 == 0
    assert name.endswith("empty") or "empty" in name or torch.equal(made, plain)


def test_every_function_is_tried_and_put_back():
    assert {name for _, name in MAKERS} == set(HOW)
    before = [getattr(owner, name) for owner, name in MAKERS]
    with guarded(arm(), []):
        assert all(getattr(owner, name) is not own for (owner, name), own in zip(MAKERS, before, strict=True))
    assert [getattr(owner, name) for owner, name in MAKERS] == before


def test_what_is_not_plain_memory_of_the_cpu_stays_as_it_is():
    with guarded(arm(), []) as guards:
        given = torch.zeros(3)
        inside = len(guards.kept)
        assert torch.empty(0).numel() == 0
        assert torch.empty(3, device="meta").is_meta
        assert torch.empty(3, out=given) is given
        assert isinstance(torch.empty_like(torch.nn.Parameter(X)), torch.Tensor)
    assert inside == 2
    assert not guards.broken()


def test_what_torch_compile_makes_has_none():
    make = torch.empty
    with guarded(arm(compiled=True), [place(4, 6)]) as guards:
        assert torch.empty is make
    assert not guards.broken()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("size", [512, 4096, 3 << 20, 40 << 20])
@pytest.mark.parametrize("offset", [None, -1, 0])
def test_on_a_gpu_a_stray_byte_shows(size, offset):
    """Sizes of both kinds of blocks that the caching allocator has; another tensor of the same size comes first."""

    class Memory:
        def __init__(self, address):
            self.__cuda_array_interface__ = {"shape": (1,), "typestr": "|u1", "data": (address, False), "version": 3}

    before = torch.cuda.memory_allocated()
    x = torch.ones(size // 4, device="cuda:0")
    with guarded(arm("cuda:0"), [place(size // 4)]) as guards:
        unwritten = torch.empty_like(x)
        out = torch.add(x, unwritten)
        if offset is not None:
            address = out.data_ptr() + (offset if offset < 0 else size + offset)
            torch.as_tensor(Memory(address), device="cuda:0").zero_()
        torch.cuda.synchronize()
    assert bool(unwritten.isnan().all())
    assert guards.broken() is (offset is not None)
    del unwritten, out
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() - before <= 2 * size + 1024
