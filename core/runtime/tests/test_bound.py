"""Bound launches and entries, as C objects and through Triton's own launcher: what reaches the driver."""

import pytest
import triton

CASES = r"""
import gc
import warnings

def hook(metadata):
    print("hook", metadata.get()["name"], flush=True)

say("how", lambda: print(bound.how()))
y, x = torch.empty(1000, dtype=torch.bfloat16), torch.empty(1000)
launch = Launch.make(kernel, (8,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2)
run = bind(launch)
say("direct", run, Y, X)
say("misaligned", run, Y + 2, X)
knobs.runtime.launch_enter_hook.add(hook)
say("added", run, Y, X)
knobs.runtime.launch_enter_hook.remove(hook)
chain, knobs.runtime.launch_enter_hook = knobs.runtime.launch_enter_hook, hook
say("replaced", run, Y, X)
knobs.runtime.launch_enter_hook = chain
say("again", run, Y, X)
say("empty", bind(Launch.make(empty, (1,), num_warps=1)))
capturing.value = 1
say("captured", bind(Launch.make(kernel, (5,), y, 2, x, 1000, 1e-5, BLOCK=64, num_warps=2)), Y, X)
capturing.value = 0
say("pdl", bind(Launch.make(kernel, (8, 3, 2), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2, launch_pdl=True)), Y, X)
cooperative = Launch.make(kernel, (8,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2, launch_cooperative_grid=True)
say("cooperative", bind(cooperative), Y, X)
bind(Launch.make(kernel, (0,), y, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2))(Y, X)  # prints nothing

entry = entry_of(launch, [x, None], (1e-6, "rms"), outputs=[0])
out = say("entry", entry, x, None, 1e-6, "rms")
assert out.shape == x.shape and out.dtype == x.dtype and out is not x
print(f"entry pointers: {out.data_ptr():x} {x.data_ptr():x}")
misses = [(x, x, 1e-6, "rms"), (x, None, 1e-5, "rms"), (x, None, 1e-6, "layer"), (x[1:], None, 1e-6, "rms")]
print("misses:", [entry(*given) is MISS for given in misses])
in_place = entry_of(launch, [y, x])
say("in place", lambda *given: print("gives", in_place(*given)), y, x)
nan = float("nan")
not_a_number = entry_of(launch, [y, x], (nan,))
say("nan", lambda: print("gives", not_a_number(y, x, nan)))

# First into scratch, then from there into the output.
between, wide = torch.empty(500, device="meta"), torch.empty(3, 5, dtype=torch.int16, device="meta")
chain = Chain((launch, launch), ((2, 3), (0, 2)), (0, wide), (between,))
chained = entry_of(chain, [x, None], (1e-6,))
first, second = say("chain", chained, x, None, 1e-6)
print(f"chain pointers: {first.data_ptr():x} {x.data_ptr():x}")
print("chain gives:", first.shape == x.shape, second.shape, second.dtype, second.device)
print("chain misses:", chained(x, x, 1e-6) is MISS, chained(x[1:], None, 1e-6) is MISS, chained(x, None, 1e-5) is MISS)

devices = 2
say("elsewhere", bind(launch), Y, X)
say("chain elsewhere", entry_of(chain, [x, None], (1e-6,)), x, None, 1e-6)
devices = 1

# What holds a kernel keeps it on the GPU; from Triton 3.8 on it is unloaded with its last reference.
holder, unloaded, counts = bind(Launch.make(empty, (1,), num_warps=1)), ctypes.c_int.in_dll(stub, "stub_unloaded"), []
for drop in (empty.device_caches.clear, lambda: globals().pop("holder")):
    before = unloaded.value
    drop()
    gc.collect()
    counts.append(unloaded.value - before)
print("unloaded:", counts)

def told(what):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        say(what, bind(launch), Y, X)
        bind(launch)
    print(f"{what} says:", [str(one.message) for one in caught])

describe = native.describe
native.describe = lambda compiled, *given: compiled.renamed
told("changed")
native.describe = describe
triton.__version__ = "9.9.0"
told("unknown")
print("unknown how:", bound.how())
"""


@pytest.fixture(scope="module", params=["native", "triton"])
def launched(stub, request):
    """What reaches the driver, by name of the case: both ways of launching run against a stub of libcuda."""
    lines = stub.run(CASES, KDA_LAUNCH=request.param)
    assert lines["how"] == {"native": "native", "triton": "triton (KDA_LAUNCH=triton)"}[request.param]
    # The normal launcher asks the driver about each of the two pointers.
    return lines | {"asked": {"native": "queries 0", "triton": "queries 2"}[request.param]}


def assert_launched(launched, line, expected):
    """Exactly, as a C object; Triton's launcher may take another variant, but the same arguments."""
    if launched["how"] != "native":
        line, expected = (text.split(" args ")[1].split(" scratch")[0] for text in (line, expected))
    assert line == expected


GEOMETRY = "grid 8 1 1 block 64 1 1 shared 256 stream 0x5000 function 0x77"
ARGUMENTS = "7f0000002000 1000 1e-05 scratch (nil) (nil)"


def test_a_kernel_is_loaded_while_a_graph_is_captured(launched):
    assert launched["captured"].startswith("grid 5 1 1 block 64 1 1")


def test_direct_launch_passes_everything_without_pointer_queries(launched):
    assert launched["direct"] == f"{GEOMETRY} args 7f0000001000 2 {ARGUMENTS} {launched['asked']}"
    assert launched["again"] == launched["direct"]


def test_empty_kernel(launched):
    assert launched["empty"] == (
        "grid 1 1 1 block 32 1 1 shared 0 stream 0x5000 function 0x78 scratch (nil) (nil) queries 0"
    )


def test_launch_attributes_and_all_grid_dimensions(launched):
    other_grid = GEOMETRY.replace("grid 8 1 1", "grid 8 3 2")
    assert launched["pdl"] == f"{other_grid} attribute 6=1 args 7f0000001000 2 {ARGUMENTS} {launched['asked']}"
    assert launched["cooperative"] == f"{GEOMETRY} attribute 2=1 args 7f0000001000 2 {ARGUMENTS} {launched['asked']}"


def test_entry_allocates_launches_and_returns_the_output(launched):
    out, given = launched["entry pointers"].split()
    assert_launched(
        launched,
        launched["entry"],
        f"{GEOMETRY} args {out} 2 {given} 1000 1e-05 scratch (nil) (nil) {launched['asked']}",
    )
    assert launched["in place"].startswith(GEOMETRY)
    assert launched["in place"].endswith("gives None")


def test_chain_launches_in_order_through_one_table(launched):
    out, given = launched["chain pointers"].split()
    first, second = launched["chain"].split(", ")
    between = first.split(" args ")[1].split()[0]
    assert_launched(
        launched, first, f"{GEOMETRY} args {between} 2 {given} 1000 1e-05 scratch (nil) (nil) {launched['asked']}"
    )
    assert_launched(
        launched, second, f"{GEOMETRY} args {out} 2 {between} 1000 1e-05 scratch (nil) (nil) {launched['asked']}"
    )
    assert len({out, given, between}) == 3
    assert launched["chain gives"] == "True torch.Size([3, 5]) torch.int16 cpu"
    assert launched["chain misses"] == "True True True"


def test_chain_on_another_device_takes_the_normal_launchers(launched):
    assert [line[-9:] for line in launched["chain elsewhere"].split(", ")] == ["queries 2", "queries 2"]


def test_entry_of_a_nan_is_hit_by_the_same_object(launched):
    assert launched["nan"].startswith(GEOMETRY)


def test_entry_misses_on_every_other_signature(launched):
    assert launched["misses"] == "[True, True, True, True]"


@pytest.mark.parametrize("case", ["elsewhere", "changed", "unknown"])
def test_other_device_and_unknown_interfaces_take_the_normal_launcher(launched, case):
    # The normal launcher asks the driver about each of the two pointers.
    assert launched[case] == f"{GEOMETRY} args 7f0000001000 2 {ARGUMENTS} queries 2"


def test_unknown_interfaces_are_named_once(launched):
    changed, unknown = launched["changed says"], launched["unknown says"]
    if launched["how"] != "native":  # as it was asked for
        assert changed == unknown == "[]"
        return
    assert changed.count("kernels are launched by Triton's own launcher") == 1
    assert "kernel kernel: AttributeError: 'CompiledKernel' object has no attribute 'renamed'" in changed
    assert unknown.count("triton 9.9.0 is not known here") == 1
    assert launched["unknown how"] == "triton (triton 9.9.0 is not known here)"


def test_bound_kernel_stays_loaded(launched):
    unloads = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
    assert launched["unloaded"] == f"[0, {int(unloads)}]"


def test_misaligned_pointer_takes_its_own_variant(launched):
    assert launched["misaligned"] == f"{GEOMETRY} args 7f0000001002 2 {ARGUMENTS} queries 2"


@pytest.mark.parametrize("case", ["added", "replaced"])
def test_launch_hooks_are_called(launched, case):
    assert launched[case] == f"hook kernel, {GEOMETRY} args 7f0000001000 2 {ARGUMENTS} queries 2"
