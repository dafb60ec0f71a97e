import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from kda_core import launch
from kda_core.launch import Launch, Plans, guard, is_lazy, is_tracing


def tensors():
    return [torch.zeros(4, 6, dtype=torch.bfloat16), torch.zeros(6), torch.arange(4)]


@pytest.fixture(params=["guards", "fallback"])
def either_guard(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.delattr("torch._C._dynamo.guards.TensorGuards")


@pytest.mark.usefixtures("either_guard")
class TestGuard:
    def test_same_signature_other_tensors(self):
        assert guard(tensors())(*tensors())

    @pytest.mark.parametrize(
        ("position", "other"),
        [
            (0, torch.zeros(4, 6)),
            (0, torch.zeros(5, 6, dtype=torch.bfloat16)),
            (0, torch.zeros(6, 4, dtype=torch.bfloat16).t()),
            (0, torch.zeros(4, 6, dtype=torch.bfloat16, device="meta")),
            (1, torch.zeros(6, requires_grad=True)),
            (1, torch.nn.Parameter(torch.zeros(6))),
            (2, torch.arange(4, dtype=torch.int32)),
        ],
    )
    def test_any_difference_is_seen(self, position, other):
        given = tensors()
        check = guard(given)
        given[position] = other
        assert not check(*given)

    def test_recording_gradients_is_seen(self):
        given = [torch.nn.Parameter(torch.zeros(6))]
        check = guard(given)
        assert check(*given)
        with torch.no_grad():
            assert not check(*given)

    def test_none_and_scalars(self):
        x = torch.zeros(3)
        check = guard([x, None, 2])
        assert check(x, None, 2)
        assert not check(x, x, 2)
        assert not check(x, None, 3)
        assert not check(x, None, 2.0)

    def test_dispatch_modes_are_seen(self):
        given = tensors()
        check = guard(given)
        with FlopCounterMode(display=False):
            assert not check(*given)

    def test_keeps_no_tensor_alive(self):
        given = tensors()
        check = guard(given)
        ref = weakref.ref(given[0])
        del given
        gc.collect()
        assert ref() is None
        assert check(*tensors())


def test_tracing_is_seen():
    x = torch.zeros(3)
    assert not is_tracing(x, torch.nn.Parameter(x))
    with FakeTensorMode() as mode:
        assert is_tracing(x)
    assert is_tracing(mode.from_tensor(x))
    seen = []
    torch.func.vmap(lambda row: (seen.append(is_tracing(row)), row)[1])(x[None])
    assert seen == [True]


def test_lazy_tensors_are_seen():
    x = torch.zeros(3, dtype=torch.complex64)
    assert not is_lazy(x)
    assert [is_lazy(lazy) for lazy in (x.conj(), x.conj().imag, torch._efficientzerotensor(3))] == [True] * 3


@pytest.mark.parametrize("state", [torch.inference_mode, lambda: torch.autocast("cpu"), torch.enable_grad])
def test_plans_tell_apart_what_entries_miss_on(state):
    # An entry that was found must not miss: its caller would think that it had launched.
    given = [torch.zeros(3, requires_grad=True)]
    plans = Plans()
    with torch.no_grad():
        check = guard(given)
        plans.add(given, (), check)
        assert plans.find(given, ()) is check
        with state():
            assert not check(*given)
            assert plans.find(given, ()) is None
    assert plans.find([torch._neg_view(given[0].detach())], ()) is None


def test_plans_are_found_again_and_bounded():
    plans = Plans(hot=2, total=3)
    sizes = [[torch.zeros(n)] for n in range(1, 5)]
    for n, given in enumerate(sizes):
        plans.add(given, (n,), lambda n=n: n)
    assert [entry() for entry in plans.hot] == [3, 2]
    assert plans.find(sizes[0], (0,)) is None, "the oldest went"
    assert plans.find(sizes[1], (9,)) is None, "scalars are part of the key"
    assert plans.find(sizes[1], (1,))() == 1
    assert [entry() for entry in plans.hot] == [1, 3], "found plans are hot again"
    plans.clear()
    assert plans.hot == ()
    assert plans.find(sizes[1], (1,)) is None


CASES = r"""
def hook(metadata):
    print("hook", metadata.get()["name"], flush=True)

say("how", lambda: print(kda_launch.how()))
y, x = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
launch = Launch.make(kernel, (8,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2)
run = launch.bind()
say("direct", run, Y, X)
say("misaligned", run, Y + 2, X)
knobs.runtime.launch_enter_hook.add(hook)
say("added", run, Y, X)
knobs.runtime.launch_enter_hook.remove(hook)
chain, knobs.runtime.launch_enter_hook = knobs.runtime.launch_enter_hook, hook
say("replaced", run, Y, X)
knobs.runtime.launch_enter_hook = chain
say("again", run, Y, X)
say("empty", bind(empty, (1,), num_warps=1))
say("pdl", bind(kernel, (8, 3, 2), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2, launch_pdl=True), Y, X)
cooperative = Launch.make(kernel, (8,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2, launch_cooperative_grid=True)
say("cooperative", cooperative.bind(), Y, X)
bind(kernel, (0,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2)(Y, X)  # prints nothing

entry = launch.entry([x, None], (1e-6, "rms"), outputs=[0])
out = say("entry", entry, x, None, 1e-6, "rms")
assert out.shape == x.shape and out.dtype == x.dtype and out is not x
print(f"entry pointers: {out.data_ptr():x} {x.data_ptr():x}")
misses = [(x, x, 1e-6, "rms"), (x, None, 1e-5, "rms"), (x, None, 1e-6, "layer"), (x[1:], None, 1e-6, "rms")]
print("misses:", [entry(*given) is MISS for given in misses])
in_place = launch.entry([y, x])
say("in place", lambda *given: print("gives", in_place(*given)), y, x)
nan = float("nan")
not_a_number = launch.entry([y, x], (nan,))
say("nan", lambda: print("gives", not_a_number(y, x, nan)))

# First into scratch, then from there into the output.
between, wide = torch.empty(500, device="meta"), torch.empty(3, 5, dtype=torch.int16, device="meta")
chain = Chain((launch, launch), ((2, 3), (0, 2)), (0, wide), (between,))
chained = chain.entry([x, None], (1e-6,))
first, second = say("chain", chained, x, None, 1e-6)
print(f"chain pointers: {first.data_ptr():x} {x.data_ptr():x}")
print("chain gives:", first.shape == x.shape, second.shape, second.dtype, second.device)
print("chain misses:", chained(x, x, 1e-6) is MISS, chained(x[1:], None, 1e-6) is MISS, chained(x, None, 1e-5) is MISS)
without = Chain((Launch.make(empty, (1,), num_warps=1),), ((),), (torch.empty(3, 5),)).entry([])
print("no arguments:", say("launched without", without).shape)

devices = 2
say("elsewhere", launch.bind(), Y, X)
say("chain elsewhere", chain.entry([x, None], (1e-6,)), x, None, 1e-6)
devices = 1
triton.__version__ = "9.9.0"
say("unknown", launch.bind(), Y, X)
"""


@pytest.fixture(scope="module", params=["native", "python"])
def launched(stub, request):
    """What reaches the driver, by name of the case: both makes of launches run against a stub of libcuda."""
    lines = stub.run(CASES, KDA_LAUNCH=request.param)
    assert lines["how"] == {"native": "native", "python": "python (KDA_LAUNCH=python)"}[request.param]
    return lines


GEOMETRY = "grid 8 1 1 block 64 1 1 shared 256 stream 0x5000 function 0x77"
ARGUMENTS = "7f0000002000 1000 1e-05 scratch (nil) (nil)"


def test_direct_launch_passes_everything_without_pointer_queries(launched):
    assert launched["direct"] == f"{GEOMETRY} args 7f0000001000 2 {ARGUMENTS} queries 0"
    assert launched["again"] == launched["direct"]


def test_empty_kernel(launched):
    assert launched["empty"] == (
        "grid 1 1 1 block 32 1 1 shared 0 stream 0x5000 function 0x78 scratch (nil) (nil) queries 0"
    )


def test_launch_attributes_and_all_grid_dimensions(launched):
    other_grid = GEOMETRY.replace("grid 8 1 1", "grid 8 3 2")
    assert launched["pdl"] == f"{other_grid} attribute 6=1 args 7f0000001000 2 {ARGUMENTS} queries 0"
    assert launched["cooperative"] == f"{GEOMETRY} attribute 2=1 args 7f0000001000 2 {ARGUMENTS} queries 0"


def test_entry_allocates_launches_and_returns_the_output(launched):
    out, given = launched["entry pointers"].split()
    assert launched["entry"] == f"{GEOMETRY} args {out} 2 {given} 1000 1e-05 scratch (nil) (nil) queries 0"
    assert launched["in place"].startswith(GEOMETRY)
    assert launched["in place"].endswith("gives None")


def test_chain_launches_in_order_through_one_table(launched):
    out, given = launched["chain pointers"].split()
    first, second = launched["chain"].split(", ")
    between = first.split(" args ")[1].split()[0]
    assert first == f"{GEOMETRY} args {between} 2 {given} 1000 1e-05 scratch (nil) (nil) queries 0"
    assert second == f"{GEOMETRY} args {out} 2 {between} 1000 1e-05 scratch (nil) (nil) queries 0"
    assert len({out, given, between}) == 3
    assert launched["chain gives"] == "True torch.Size([3, 5]) torch.int16 cpu"
    assert launched["chain misses"] == "True True True"


def test_chain_without_arguments_allocates_and_launches(launched):
    assert launched["launched without"].startswith("grid 1 1 1 block 32 1 1")
    assert launched["no arguments"] == "torch.Size([3, 5])"


def test_chain_on_another_device_takes_the_normal_launchers(launched):
    assert [line[-9:] for line in launched["chain elsewhere"].split(", ")] == ["queries 2", "queries 2"]


def test_entry_of_a_nan_is_hit_by_the_same_object(launched):
    assert launched["nan"].startswith(GEOMETRY)


def test_entry_misses_on_every_other_signature(launched):
    assert launched["misses"] == "[True, True, True, True]"


@pytest.mark.parametrize("case", ["elsewhere", "unknown"])
def test_other_device_and_unknown_release_take_the_normal_launcher(launched, case):
    # The normal launcher asks the driver about each of the two pointers.
    assert launched[case] == f"{GEOMETRY} args 7f0000001000 2 {ARGUMENTS} queries 2"


def test_misaligned_pointer_takes_its_own_variant(launched):
    assert launched["misaligned"] == f"{GEOMETRY} args 7f0000001002 2 {ARGUMENTS} queries 2"


@pytest.mark.parametrize("case", ["added", "replaced"])
def test_launch_hooks_are_called(launched, case):
    assert launched[case] == f"hook kernel, {GEOMETRY} args 7f0000001000 2 {ARGUMENTS} queries 2"


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


def test_cute_compiles_for_hopper_without_a_gpu(tmp_path, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    # The DSL reads the source of its functions from a file.
    (tmp_path / "scale_on_cute.py").write_text(
        """
import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute


@cute.kernel
def kernel(mX: cute.Tensor, factor: cutlass.Float32):
    i, _, _ = cute.arch.thread_idx()
    if i < mX.shape[0]:
        mX[i] = mX[i] * factor


@cute.jit
def scale(mX: cute.Tensor, factor: cutlass.Float32, stream: driver.CUstream):
    kernel(mX, factor).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    import cutlass
    from cutlass.cute.runtime import make_fake_compact_tensor
    from scale_on_cute import scale

    from kda_core.aot import resources

    x = make_fake_compact_tensor(cutlass.Float32, (cutlass.cute.sym_int(),))
    stream = launch.environment_stream()
    options = f"--gpu-arch sm_90a --keep-cubin --dump-dir {tmp_path}"
    compiled = launch.compile_cute(scale, x, cutlass.Float32(0.0), stream, options=options)
    registers, _, spilled = resources(compiled.artifacts.CUBIN)
    assert registers > 0
    assert spilled == 0
