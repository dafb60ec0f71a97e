"""The C half of launching: what only it can get wrong. `test_bound.py` has what it and Triton's launcher do alike."""

from types import SimpleNamespace

import pytest
import torch

from kda_runtime import native

SCRIPT = r"""
import gc, sys, threading
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

torch.set_grad_enabled(False)
quiet = ctypes.c_int.in_dll(stub, "stub_quiet")
error = ctypes.c_int.in_dll(stub, "stub_error")
other_params = ctypes.c_int.in_dll(stub, "stub_other_params")
quiet.value = 1

class Sub(torch.Tensor):
    pass

def make(dtype=torch.float32):
    return torch.zeros(4, 250, dtype=dtype)

def binding(*given):
    return Launch.make(kernel, (8,), given[0], 2, given[1], 1000, 1e-5, BLOCK=128, num_warps=2)

y, x = make(), make()
entry = entry_of(binding(y, x), [y, x, None], (1e-6, True, "rms"))
assert type(entry).__name__ == "Entry", bound.how()

def call(y=y, x=x, z=None, eps=1e-6, flag=True, kind="rms"):
    return entry(y, x, z, eps, flag, kind)

def hit(what, **given):
    print(f"{what}: {call(**given) is None}")

def miss(what, **given):
    print(f"{what}: {call(**given) is MISS}")

hit("hit, the same")
hit("hit, other tensors", y=make(), x=make())
hit("hit, equal scalars", eps=float("1e-6"), flag=1, kind="".join(["r", "ms"]))
hit("hit, requires gradients, none recorded", x=make().requires_grad_())
with torch.enable_grad():
    hit("hit, gradient mode, none required")
    miss("miss, recording gradients", x=make().requires_grad_())
miss("miss, dtype", x=make(torch.int32))
miss("miss, dtype of the same width", x=make(torch.uint32))
miss("miss, sizes", x=torch.zeros(4, 251))
miss("miss, rank", x=torch.zeros(1000))
miss("miss, strides", x=torch.zeros(250, 4).t())
miss("miss, device", x=make().to("meta"))
miss("miss, parameter", x=torch.nn.Parameter(make()))
miss("miss, subclass", x=make().as_subclass(Sub))
miss("miss, no tensor", x=3)
miss("miss, None for a tensor", x=None)
miss("miss, a tensor for None", z=x)
miss("miss, float", eps=1e-5)
miss("miss, string", kind="layer")
miss("miss, negated view", x=torch._neg_view(x))
miss("miss, zero tensor", x=torch._efficientzerotensor((4, 250)))
miss("miss, functional tensor", x=torch._to_functional_tensor(make()))
miss("miss, sparse", x=make().to_sparse())
with torch.inference_mode():
    miss("miss, inference mode")
    inference = make()
miss("miss, inference tensor", x=inference)
with torch.autocast("cpu"):
    miss("miss, autocast")
with FlopCounterMode(display=False):
    miss("miss, dispatch mode")
with FakeTensorMode() as mode:
    miss("miss, fake mode")
miss("miss, fake tensor", x=mode.from_tensor(x))
torch.func.vmap(lambda row: (miss("miss, vmapped", x=row), row)[1])(torch.zeros(3, 4, 250))
torch.func.vmap(lambda row: (miss("miss, inside vmap"), row)[1])(torch.zeros(3))
torch.func.functionalize(lambda t: (miss("miss, functionalized", x=t), t)[1])(x)

complex_x = make(torch.complex64)
conj = entry_of(binding(y, x), [complex_x, x])
print("hit, complex:", conj(complex_x, x) is None)
print("miss, conjugated:", conj(complex_x.conj(), x) is MISS)
with torch.inference_mode():
    in_mode = entry_of(binding(y, x), [y, x])
    print("hit, made in inference mode:", in_mode(y, x) is None)
print("miss, made in inference mode:", in_mode(y, x) is MISS)

def raises(kind, function, *given, **named):
    try:
        function(*given, **named)
    except kind as raised:
        return str(raised)
    raise AssertionError("nothing was raised")

run = bind(binding(y, x))
error.value = 700
print("driver error:", raises(RuntimeError, call))
error.value = 201
say("no context", lambda: setattr(quiet, "value", 0) or run(Y, X))
quiet.value = 1
print("too few:", raises(TypeError, entry, y))
print("too few addresses:", raises(TypeError, run, Y))
print("keywords:", raises(TypeError, run, Y, x=X))
print("no address:", raises(TypeError, run, Y, "x"))
print("negative address:", raises(OverflowError, run, Y, -1))
class Bad:
    def __eq__(self, other):
        raise KeyError("bad")
print("comparison fails:", raises(KeyError, call, eps=Bad()))

# A kernel with other parameters than Triton's signature says must not be launched from here.
other_params.value = 1
print("other parameters:", type(bind(binding(y, x))).__name__)
other_params.value = 0

# Outputs: like the argument in size, dtype and layout, without what belongs to the argument alone.
strided = torch.zeros(250, 8)[:, ::2].t()
parameter = torch.nn.Parameter(make())
for name, like in {"strided": strided, "parameter": parameter, "transposed": torch.zeros(250, 4).t()}.items():
    made, expected = entry_of(binding(y, x), [like], (), outputs=[0])(like), torch.empty_like(like)
    same = all(getattr(made, of) == getattr(expected, of) for of in ("shape", "dtype", "device", "requires_grad"))
    print(f"output, {name}: {same and made.stride() == expected.stride() and type(made) is torch.Tensor}")

@triton.jit
def three(a, b, c):
    tl.store(a, tl.load(c))
    tl.store(b, tl.load(c))

pair = entry_of(Launch.make(three, (1,), y, y, x, num_warps=1), [x], (), outputs=[0, 0])
quiet.value = 0
first, second = say("pair", pair, x)
quiet.value = 1
print(f"pair gives: args {first.data_ptr():x} {second.data_ptr():x} {x.data_ptr():x}")

module = native.load(MISS).module
one = bind(Launch.make(empty, (1,), num_warps=1))
print("a step without its pointers:", raises(ValueError, module.entry, (x,), (), (), 0, ((run, bytes([0])),)))
print("a place behind the table:", raises(ValueError, module.entry, (x,), (), (), 0, ((run, bytes([0, 1])),)))
print("no steps:", raises(ValueError, module.entry, (x,), (), (), 0, ()))
print("no such output:", raises(ValueError, module.entry, (x,), (), (), 1, ((one, b""),)))
print("no launch:", raises(TypeError, module.entry, (x,), (), (), 0, ((print, b""),)))

# Nothing is leaked or freed too early: 10000 calls of each kind.
produce = entry_of(binding(y, x), [x], (0.5,), outputs=[0])
scalar, scratch = float("0.5"), make()
meta = torch.empty(1000, device="meta")
chain = entry_of(Chain((binding(y, x), binding(y, x)), ((1, 3), (0, 1)), (0,), (meta, meta)), [x])
def many():
    for _ in range(10_000):
        call(), call(x=None), produce(scratch, scalar), produce(scratch, 0.25), run(Y, X), chain(scratch)
watched = [y, x, scratch, scalar, MISS, None, True, entry, produce, run, chain, torch.empty_like, knobs.runtime,
           knobs.runtime.launch_enter_hook, torch.Tensor, kernel]
many()
gc.collect()
before = [sys.getrefcount(thing) for thing in watched]
blocks = sys.getallocatedblocks()
many()
gc.collect()
after = [sys.getrefcount(thing) for thing in watched]
print("references:", max(abs(a - b) for a, b in zip(before, after, strict=True)) < 20)
print("blocks:", sys.getallocatedblocks() - blocks < 200)

# Objects themselves, made and dropped, failures included.
def churn():
    for _ in range(50):
        entry_of(binding(y, x), [y, x, None], (1e-6, "rms"))
        raises(ValueError, module.entry, (x, None), (1.0,), (), 0, ((run, bytes([0])),))
        bind(binding(y, x))
        geometry = ("k", 0x77, (1, 1, 1), 32, 1, 0, 0, 0, 0)
        refused = (*geometry, bytes(8), b"\4", b"", b"", 1, 1, 1, 1, [], [], None)
        raises(ValueError, native.load(MISS).module.bind, refused)
        raises(TypeError, native.load(MISS).module.bind, ("k",))
churn()
gc.collect()
before, blocks = [sys.getrefcount(thing) for thing in watched], sys.getallocatedblocks()
churn()
gc.collect()
print("references of made objects:",
      max(abs(a - sys.getrefcount(b)) for a, b in zip(before, watched, strict=True)) < 20)
print("blocks of made objects:", sys.getallocatedblocks() - blocks < 200)

wrong = []
def work():
    mine, like = make(), make(torch.bfloat16)
    torch.set_grad_enabled(False)
    other = entry_of(binding(y, x), [like], (), outputs=[0])
    for _ in range(3000):
        if call(y=mine) is not None or other(like).dtype is not torch.bfloat16 or call(x=like) is not MISS:
            wrong.append(threading.get_ident())
threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("threads:", not wrong)
"""


@pytest.fixture(scope="module")
def lines(stub):
    return stub.run(SCRIPT)


def test_every_difference_misses_and_nothing_else_does(lines):
    kinds = {kind: {name: text for name, text in lines.items() if name.startswith(kind)} for kind in ("hit", "miss")}
    assert [len(named) for named in kinds.values()] == [7, 29]
    assert {name for named in kinds.values() for name, text in named.items() if text != "True"} == set()


def test_outputs_are_what_empty_like_gives(lines):
    assert [lines[f"output, {name}"] for name in ("strided", "parameter", "transposed")] == ["True"] * 3
    assert lines["pair gives"] in lines["pair"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("driver error", "launch of kernel: CUDA error 700: stub"),
        ("too few", "launch of kernel: expected 6 positional arguments, got 1"),
        ("too few addresses", "launch of kernel: expected 2 positional arguments, got 1"),
        ("keywords", "launch of kernel: expected 2 positional arguments, got 1 and keywords"),
        ("no address", "an integer is required"),
        ("negative address", "can't convert negative int to unsigned"),
        ("comparison fails", "'bad'"),
        ("a step without its pointers", "entry: its 1 launches do not fit its table of 1 tensors"),
        ("a place behind the table", "entry: its 1 launches do not fit its table of 1 tensors"),
        ("no steps", "entry: its 0 launches do not fit its table of 1 tensors"),
        ("no such output", "entry: its 1 launches do not fit its table of 1 tensors"),
        ("no launch", "argument 1 must be kda_native.Launch, not builtin_function_or_method"),
    ],
)
def test_errors_reach_the_caller(lines, case, message):
    assert lines[case] == message


def test_thread_without_a_context_takes_the_normal_launcher(lines):
    assert lines["no context"].endswith("queries 2")


def test_kernel_with_other_parameters_is_left_to_triton(lines):
    assert lines["other parameters"] == "function"


@pytest.mark.parametrize("case", ["references", "blocks", "references of made objects", "blocks of made objects"])
def test_nothing_leaks(lines, case):
    assert lines[case] == "True"


def test_entries_are_shared_between_threads(lines):
    assert lines["threads"] == "True"


HOW = """
x = torch.zeros(1000)
launch = Launch.make(kernel, (8,), x, 2, x, 1000, 1e-5, BLOCK=128, num_warps=2)
entry = entry_of(launch, [x, x])
print("how:", bound.how().replace(":", ""))
say("launched", entry, x, x)
print("misses:", entry(x, x[1:]) is MISS)
"""


def test_two_processes_build_it_at_the_same_time(stub, tmp_path):
    started = [stub.start(HOW, TRITON_CACHE_DIR=str(tmp_path)) for _ in range(2)]
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert "how: native\n" in out
        assert "queries 0\n" in out
    assert len(list(tmp_path.glob("*/kda_native*"))) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("exchange[0] = 2", "expected version 1 of DLPack's C exchange interface, got 2.0"),
        ("native.IMPL_WORDS = 4", "are laid out in an unknown way"),
        ("torch._C._dispatch_tls_local_include_set = torch._C._dispatch_tls_local_exclude_set", "in an unknown way"),
        ("native._build = lambda: open('/missing')", "No such file or directory"),
    ],
)
def test_what_is_unknown_leaves_tritons_launcher(stub, change, reason):
    lines = stub.run(f"{change}\n{HOW}")
    assert lines["how"].startswith("triton (")
    assert reason in lines["how"]
    assert lines["launched"].endswith("queries 2"), "the normal launcher asks the driver about each of the two pointers"
    assert lines["misses"] == "True"


def test_without_a_compiler_tritons_launcher_is_taken(stub, tmp_path):
    cache = str(tmp_path)
    stub.run(HOW, TRITON_CACHE_DIR=cache, KDA_LAUNCH="triton")  # builds what Triton needs for itself
    lines = stub.run(HOW, TRITON_CACHE_DIR=cache, CC="false")
    assert lines["how"].startswith("triton (CalledProcessError")
    assert lines["launched"].endswith("queries 2")


@pytest.mark.parametrize("metadata", [(4, 1, 228 * 1024 + 16), (4, 2, 0)], ids=["shared memory", "cluster"])
def test_kernels_with_more_launch_attributes_are_left_to_triton(metadata):
    compiled, hooks = SimpleNamespace(packed_metadata=metadata, run=None), native.Hooks(None, None, None, [], [])
    assert native.describe(compiled, (1, 1, 1), {}, frozenset(), 0, print, hooks) is None


def test_a_layout_must_be_found_exactly_once():
    words = (torch.tensor([5, 7, 9]), torch.tensor([1, 7, 9]))
    bases = [tensor.data_ptr() for tensor in words]
    assert native._search(bases, [7, 7], range(3)) == 8
    assert native._search(bases, [5, 1], range(3)) == 0
    with pytest.raises(RuntimeError, match="unknown way"):
        native._search(bases, [5, 7], range(3))
    with pytest.raises(RuntimeError, match="unknown way"):
        native._search([bases[0]] * 2, [4, 4], range(3))
    twice = torch.tensor([3, 3])
    with pytest.raises(RuntimeError, match="unknown way"):
        native._search([twice.data_ptr()], [3], range(2))
