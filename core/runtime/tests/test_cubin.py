"""Launches of kernels that come as machine code: both makes run against a stub of libcuda."""

import pytest

SCRIPT = r"""
import gc
import threading
import weakref
from collections import defaultdict
from dataclasses import replace
from struct import pack
from kda_runtime import cubin
from kda_runtime.cubin import Address, CubinLaunch
from kda_runtime.plans import plain_entry

CUBIN = b"\x7fELF\0.nv.info.cubin$kernel_0\0.text.cubin$kernel_0\0.rela.text.cubin$kernel_0\0"
error = ctypes.c_int.in_dll(stub, "stub_error")
other_params = ctypes.c_int.in_dll(stub, "stub_other_params")
params = (Address.ALIGNED, pack("<i", -7), Address.ANY)
plain = CubinLaunch("one", CUBIN, (6, 1, 1), 96, params)
wide = replace(plain, grid=(32, 1, 1), cluster=16, dynamic_shared_bytes=60_000, dependent=True)

def raises(kind, function, *given):
    try:
        function(*given)
    except kind as raised:
        return str(raised)
    raise AssertionError("nothing was raised")

run = plain.bind()
say("how", lambda: print(type(run).__name__))
say("plain", run, Y, X + 2)
knobs.runtime.launch_enter_hook.add(print)
say("hooked", run, Y, X + 2)
knobs.runtime.launch_enter_hook.remove(print)
say("wide", lambda: (wide.bind()(Y, X), wide.bind()(Y, X)))
say("small cluster", replace(wide, cluster=8, dynamic_shared_bytes=49_152).bind(), Y, X)
other = replace(plain, otherwise=lambda *given: print("otherwise", *map(hex, given)))
say("misaligned", other.bind(), Y + 2, X)
print("misaligned alone:", raises(ValueError, run, Y + 2, X))
no_room = ctypes.c_int.in_dll(stub, "stub_no_room")
no_room.value = 1
left = replace(wide, otherwise=other.otherwise)
say("no room", left.bind(), Y, X)
say("room for eight", lambda: replace(left, cluster=8).bind()(Y, X))
no_room.value = 0
say("room", left.bind(), Y, X)
error.value = 201
if type(run).__name__ == "Launch":
    say("no context", run, Y, X)
error.value = 700
print("driver error:", raises(RuntimeError, run, Y, X))
other_params.value = 1
print("other parameters:", raises(ValueError, plain.bind))
other_params.value = 0
print("no kernel:", raises(ValueError, replace(plain, cubin=b"\0.text.a\0.text.b\0").bind))
capturing.value = 1
say("captured", replace(plain, cubin=CUBIN + b"\0").bind(), Y, X)
capturing.value = 0
print("mode behind it:", ctypes.c_int.in_dll(stub, "stub_mode").value)
say("empty grid", lambda: (replace(plain, grid=(0, 1, 1)).bind()(Y, X), print("nothing")))

x = torch.zeros(1000)
chain = Chain((plain,), ((0, 1),), (0,))
entry = entry_of(chain, [x], (0.5,))
say("entry is", lambda: print(type(entry).__name__))
y = say("entry", entry, x, 0.5)
print(f"entry gives: args {y.data_ptr():x} -7 {x.data_ptr():x}")
print("entry misses:", entry(x, 0.25) is MISS, entry(x[1:], 0.5) is MISS)
devices = 2
say("elsewhere", plain.bind(), Y, X)

# The plain entry binds at its first call, and nothing that it leaves behind keeps the launch.
devices, binds, bind = 1, [], CubinLaunch.bind
CubinLaunch.bind = lambda self, device=None: (binds.append(device), bind(self, device))[1]
launch = replace(plain)
entry = plain_entry(Chain((launch,), ((0, 1),), (0,)), [x], ())
y, z = say("plain entry", lambda: (entry(x), entry(x)))
print(f"plain entry gives: args {y.data_ptr():x} -7 {x.data_ptr():x}, args {z.data_ptr():x} -7 {x.data_ptr():x}")
print("binds:", len(binds))
say("addresses", lambda: [launch.run_at(Y, X) for _ in range(2)])
torch.cuda.current_device = lambda: 1
say("addresses elsewhere", lambda: [launch.run_at(Y, X) for _ in range(2)])
torch.cuda.current_device = lambda: 0
print("binds of devices:", binds)
CubinLaunch.bind, seen = bind, weakref.ref(launch)
del launch, entry
gc.collect()
print("launch is gone:", seen() is None)

@triton.jit
def three(a, b, c):
    tl.store(a, tl.load(c))

# What takes the place of a launch for addresses: through scratch of its own, into outputs that are there.
devices = 1
real = torch.empty_like
torch.empty_like = lambda like, device=None: real(like, device="cpu")
step = Launch.make(three, (1,), x, x, x, num_warps=1)
say("at addresses", Chain((step,), ((0, 1, 2),), (0,), (torch.empty(8, device="meta"),)).run_at, Y, X)

# The launch from Python, by what it asks of the driver.
slow, calls, both = plain._slow(0x7a, 0), defaultdict(list), threading.Barrier(2, timeout=60)
contexts = {"cuCtxGetCurrent": 1}

def fake(name, *given):
    mine = calls[threading.current_thread().name]
    if name == "cuLaunchKernelEx":
        config, kernel, params, _ = given
        both.wait()  # both threads have put their addresses in
        values = [ctypes.c_uint64.from_address(param).value for param in params]
        mine.append((config._obj.stream, *map(hex, values)))
        both.wait()
    elif name == "cuCtxGetCurrent":
        given[0]._obj.value = contexts[name]
    else:
        mine.append(name)

class Switch:
    def __init__(self, device):
        self.device = device

    def __enter__(self):
        calls[threading.current_thread().name].append(f"to {self.device}")

    def __exit__(self, *raised):
        pass

def two(what, **streams):
    calls.clear()
    threads = [
        threading.Thread(target=slow, args=(Y + 16 * i, X + i), name=name) for i, name in enumerate(streams)
    ]
    torch._C._cuda_getCurrentRawStream = lambda device: streams[threading.current_thread().name]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{what}:", *(calls[name] for name in streams))

cubin._call, torch.cuda.device = fake, Switch
two("two threads", one=1, two=2)
contexts["cuCtxGetCurrent"], torch.cuda.current_device = None, lambda: 1
two("two threads elsewhere without a context", one=3, two=3)
print("one address too few:", raises(ValueError, slow, Y))
"""


@pytest.fixture(scope="module", params=["native", "triton"])
def launched(stub, request):
    lines = stub.run(SCRIPT, KDA_LAUNCH=request.param)
    makes = {"native": ("Launch", "Entry"), "triton": ("function", "function")}
    assert (lines["how"], lines["entry is"]) == makes[request.param]
    return lines


GEOMETRY = "grid 6 1 1 block 96 1 1 shared 0 stream 0x5000 function 0x7a"


def test_parameters_reach_the_driver_in_order(launched):
    assert launched["plain"] == f"{GEOMETRY} args 7f0000001000 -7 7f0000002002"
    assert launched["elsewhere"] == f"{GEOMETRY} args 7f0000001000 -7 7f0000002000"


def test_hooks_of_triton_are_not_for_it(launched):
    assert launched["hooked"] == launched["plain"]


def test_clusters_dependent_launch_and_shared_memory(launched):
    one = (
        "grid 32 1 1 block 96 1 1 shared 60000 stream 0x5000 function 0x7a attribute 6=1 attribute 4=16,1,1"
        " args 7f0000001000 -7 7f0000002000"
    )
    # More than 8 blocks, and more than 48 KB, have to be allowed once.
    assert launched["wide"] == f"sets 14=1, sets 8=60000, {one}, {one}"
    assert "attribute 4=8,1,1" in launched["small cluster"]
    assert "sets" not in launched["small cluster"]


def test_entry_allocates_launches_and_returns_the_output(launched):
    assert launched["entry"] == f"{GEOMETRY} {launched['entry gives']}"
    assert launched["entry misses"] == "True True"


def test_misaligned_address_is_left_to_others(launched):
    assert launched["misaligned"] == "otherwise 0x7f0000001002 0x7f0000002000"
    assert launched["misaligned alone"] == "kernel one: expected an address divisible by 16, got 0x7f0000001002"


def test_clusters_for_which_a_device_has_no_room_are_left_to_others(launched):
    """A slice of a GPU, or a part with few multiprocessors in a group, may not hold 16 blocks that run together."""
    assert launched["no room"].endswith("otherwise 0x7f0000001000 0x7f0000002000")
    assert "attribute 4=8,1,1" in launched["room for eight"]
    assert "attribute 4=16,1,1" in launched["room"]


def test_errors_name_the_kernel_and_what_was_expected(launched):
    assert launched["driver error"].endswith("CUDA error 700: stub")
    assert launched["other parameters"] == (
        "kernel one: expected parameters of [8, 4, 8] bytes, its cubin has [8, 4, 8, 4]"
    )
    assert launched["one address too few"] == "zip() argument 2 is shorter than argument 1"
    assert launched["no kernel"] == "expected a cubin with one kernel, got ['a', 'b']"


def test_thread_without_a_context_is_given_one(launched):
    """The C half leaves it to Python, which makes one first."""
    if launched["how"] == "Launch":
        assert launched["no context"].startswith(GEOMETRY)


def test_first_call_may_be_captured(launched):
    """The driver refuses to load a kernel while a graph is captured, unless the thread says that it may."""
    assert launched["captured"].startswith(GEOMETRY)
    assert launched["mode behind it"] == "0"


def test_empty_grid_launches_nothing(launched):
    assert launched["empty grid"] == "nothing"


def test_chain_at_addresses_has_scratch_of_its_own(launched):
    y, scratch, x = launched["at addresses"].split(" args ")[1].split()[:3]
    assert (y, x) == ("7f0000001000", "7f0000002000")
    assert scratch not in (y, x)


def test_plain_entry_binds_at_its_first_call(launched):
    first, second = launched["plain entry gives"].split(", ")
    assert launched["plain entry"] == f"{GEOMETRY} {first}, {GEOMETRY} {second}"
    assert launched["binds"] == "1"


def test_launch_is_bound_once_for_each_device(launched):
    assert launched["addresses"].count("args 7f0000001000 -7 7f0000002000") == 2
    assert launched["addresses elsewhere"].count("args 7f0000001000 -7 7f0000002000") == 2
    assert launched["binds of devices"] == "[None, 0, 1]"


def test_forgotten_launch_goes(launched):
    """Also from the C launcher, whose objects Python does not look for cycles in."""
    assert launched["launch is gone"] == "True"


def test_two_threads_do_not_mix_their_addresses_and_streams(launched):
    minus_seven = hex(2**32 - 7)
    one = (1, "0x7f0000001000", minus_seven, "0x7f0000002000")
    two = (2, "0x7f0000001010", minus_seven, "0x7f0000002001")
    assert launched["two threads"] == f"{[one]} {[two]}", "and no thread leaves its device"


def test_python_launch_changes_the_device_and_makes_a_context_where_it_has_to(launched):
    before = "['to 0', 'cuDevicePrimaryCtxRetain', 'cuCtxSetCurrent', (3,"
    assert launched["two threads elsewhere without a context"].count(before) == 2
