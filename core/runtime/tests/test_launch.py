"""Launches described: their variants, and calls that tracers have to see."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kda_runtime.launch import Launch, is_tracing


def test_tracing_is_seen():
    x = torch.zeros(3)
    assert not is_tracing(x, torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert is_tracing(x)
    assert is_tracing(mode.from_tensor(x))
    seen = []
    torch.func.vmap(lambda row: (seen.append(is_tracing(row)), row)[1])(x[None])
    assert seen == [True]


def test_a_mode_that_looks_on_is_no_tracer():
    """Else a launcher that records what a call allocates and launches sees an op, and nothing that it could replay."""

    class Watcher(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    x = torch.zeros(3)
    with Watcher():
        assert not is_tracing(x)
        assert make_fx(lambda y: y + is_tracing(y))(x)(x).tolist() == [1, 1, 1]
    assert not is_tracing(x)


def test_variant_names_what_triton_specialises_on():
    class Kernel:
        arg_names = ("x", "n", "one", "eps", "BLOCK")
        __name__ = "kernel"

    described = Launch.make(Kernel(), (3,), torch.zeros(2), 48, 1, 0.5, BLOCK=8, num_warps=4)
    other_size = Launch.make(Kernel(), (9,), torch.zeros(7), 64, 1, 0.25, BLOCK=8, num_warps=4)
    assert described.variant == "x:float32 n:i32%16 one:1 eps:float BLOCK=8 num_warps=4"
    assert other_size.variant == described.variant
    assert described.grid == (3, 1, 1)
    assert Launch.make(Kernel(), (3,), torch.zeros(2), 2**31 + 1, 1, 0.5).variant.split()[1] == "n:i64"


def test_variant_leaves_out_what_triton_was_told_not_to_look_at():
    import triton

    @triton.jit(do_not_specialize=["n"])
    def kernel(x, n, m):
        pass

    variants = {Launch.make(kernel, (1,), torch.zeros(2), n, 32).variant for n in (1, 16, 17)}
    assert variants == {"x:float32 n:i32 m:i32%16"}
    assert Launch.make(kernel, (1,), torch.zeros(2), 2**31, 1).variant == "x:float32 n:i64 m:1"
