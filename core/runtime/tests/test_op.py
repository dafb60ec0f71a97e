"""An op around a kernel that exists in words only: checks, reasons, the plain path, entries, tracing, hooks."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from kda_runtime import op as module
from kda_runtime.launch import MISS, Launch
from kda_runtime.op import Op, forget_plans, hooks


class InterpretedFunction:
    """A kernel as Triton's interpreter makes it, as far as is asked here: y = a x + b y', in place where y' is y."""

    arg_names = ("y", "x", "other", "FACTOR")
    __name__ = "axpy_kernel"
    params = ()

    def __getitem__(self, grid):
        def run(y, x, *other, FACTOR):
            y.copy_(FACTOR * x + sum(other))

        return run


KERNEL = InterpretedFunction()


class Call(NamedTuple):
    out: torch.Tensor | None
    x: torch.Tensor
    other: torch.Tensor | None
    factor: float


def plan(call):
    tensors = [tensor for tensor in call[1:3] if tensor is not None]
    return Launch.make(KERNEL, (1,), call.x if call.out is None else call.out, *tensors, FACTOR=call.factor)


def plain(call):
    made = call.factor * call.x + (0 if call.other is None else call.other)
    return made if call.out is None else call.out.copy_(made)


def check(call, expect):
    expect(call.factor > 0, "factor", "a positive number", call.factor)


def uncovered(call):
    return "x has more than two dimensions" if call.x.dim() > 2 else None


def ready(call):
    return call if call.x.is_contiguous() else call._replace(x=call.x.contiguous())


AXPY = Op(
    "axpy",
    Call,
    kernel=KERNEL,
    plan=plan,
    plain=plain,
    check=check,
    uncovered=uncovered,
    ready=ready,
    outputs=("x",),
    contiguous=True,
    into="out",
    names={"other": "y"},
)
_op = partial(Op[Call], arguments=Call, kernel=KERNEL, plan=plan, plain=plain)
BOTH = _op("both", outputs=("x",), required=("other",), fixed={"factor": 2.0})


@AXPY.public
def axpy(x, y=None, factor=1.0, *, out=None, unused=3):
    made = AXPY.call(out, x, y, factor)
    return out if made is None else made


@BOTH.public
def both(x, other):
    return BOTH.call(None, x, other, 2.0)


class Pair(NamedTuple):
    pair: torch.Tensor


def plan_of_a_pair(call):
    return Launch.make(KERNEL, (1,), call.pair, call.pair, FACTOR=1.0)


def plain_pair(call):
    return call.pair.chunk(2, dim=-1)[0].contiguous()


HALF = Op(
    "half",
    Pair,
    kernel=KERNEL,
    plan=plan_of_a_pair,
    plain=plain_pair,
    uncovered=lambda call: "a kernel in words only",
    outputs=(lambda call: call.pair.chunk(2, dim=-1)[0],),
    contiguous=True,
)


@AXPY.also(lambda x, sign: "the sign is not known" if sign is None else Call(None, x, None, sign))
def signed(x, sign):
    return x if sign is None else axpy(x, factor=sign)


launches, why_not = hooks(axpy, both, signed)
X = torch.arange(6.0).reshape(2, 3)


@pytest.fixture(autouse=True)
def _forget():
    forget_plans(Path(__file__).parent)


@pytest.fixture
def paths(monkeypatch):
    """Which path calls took, in turn."""
    taken = []
    for name, path in (("plain", plain), ("plan", plan)):
        monkeypatch.setitem(vars(AXPY), name, lambda call, name=name, path=path: taken.append(name) or path(call))
    return taken


def test_a_call_takes_the_kernel_and_returns_what_it_wrote(paths):
    assert torch.equal(axpy(X, X, 3.0), 4 * X)
    assert torch.equal(axpy(X), X)
    assert paths == ["plan", "plan"]


def test_what_the_kernel_does_not_cover_and_empty_tensors_take_the_plain_path(paths):
    assert torch.equal(axpy(X[None], factor=2.0), 2 * X[None])
    assert axpy(X[:0]).shape == (0, 3)
    assert paths == ["plain", "plain"]
    assert why_not("axpy", X[None]) == "x has more than two dimensions"
    assert why_not("axpy", X) is None


class Refused(Exception):
    """As somebody sets it who has another function for what the kernels do not take."""


def test_what_the_kernels_do_not_take_is_refused_where_somebody_asks_for_that(paths, monkeypatch):
    monkeypatch.setattr(Op, "refusal", Refused)
    assert torch.equal(axpy(X, X, 3.0), 4 * X)
    out = torch.full_like(X[None], 7)
    for call in (lambda: axpy(X[None], out=out), lambda: axpy(X[:0])):
        with pytest.raises(Refused) as refused:
            call()
        op, given = refused.value.args
        assert op is AXPY
        assert isinstance(given, Call)
    assert paths == ["plan"]
    assert (out == 7).all()
    with pytest.raises(ValueError, match="axpy: factor: expected a positive number"):
        axpy(X, factor=-1.0)


def test_an_attempt_takes_no_plain_path(paths):
    assert AXPY.attempt(Call(None, X[None], None, 2.0)) is MISS
    assert torch.equal(AXPY.attempt(Call(None, X, None, 2.0)), 2 * X)
    assert torch.equal(AXPY.run(Call(None, X[None], None, 2.0)), 2 * X[None])
    assert paths == ["plan", "plain"]


def test_graphs_keep_the_plain_path_where_calls_are_refused(paths, monkeypatch):
    monkeypatch.setattr(Op, "refusal", Refused)
    compiled = torch.compile(lambda x: axpy(x, factor=2.0), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X[None]), 2 * X[None])
    assert paths == ["plain"]


def test_what_cannot_be_read_is_copied(paths):
    made = axpy(X.T, factor=2.0)
    assert torch.equal(made, 2 * X.T)
    assert made.is_contiguous()
    assert paths == ["plan"]


def test_a_copy_that_is_not_taken_as_it_is_is_named(monkeypatch):
    monkeypatch.setitem(vars(AXPY), "ready", lambda call: call._replace(x=call.x.contiguous()))
    with pytest.raises(TypeError, match="axpy: ready: expected its own result back when called with it, got a new"):
        axpy(X)


def test_the_result_goes_into_an_argument_where_one_is_given(paths):
    for x, path in ((X, "plan"), (X[None], "plain")):
        out = torch.empty_like(x, dtype=torch.float64)
        assert axpy(x, factor=2.0, out=out) is out
        assert torch.equal(out, (2 * x).double())
        assert paths.pop() == path


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: axpy(3), "axpy: x: expected a tensor, got 3"),
        (lambda: axpy(X, X.to("meta")), "axpy: y: expected device cpu, as x, got meta"),
        (lambda: axpy(X, factor=-1.0), "axpy: factor: expected a positive number, got -1.0"),
        (lambda: both(X, None), "both: other: expected a tensor, got None"),
        (lambda: why_not("axpy", X, factor=-1.0), "axpy: factor: expected a positive number, got -1.0"),
    ],
)
def test_what_has_no_meaning_is_an_error_of_the_op(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


def test_a_known_signature_goes_to_its_entry(monkeypatch):
    given = []

    def make_entry(chain, tensors, scalars):
        assert (len(tensors), scalars) == (3, (2.0,))
        return lambda *args: MISS if args[-1] != 2.0 or args[1].dim() != 2 else given.append(args) or "entry"

    monkeypatch.setattr(module, "make_entry", make_entry)
    monkeypatch.setattr(Op, "_on_gpu", lambda self, call: True)
    assert axpy(X, factor=2.0) == "entry"
    monkeypatch.setitem(vars(AXPY), "run", None)
    assert axpy(X, factor=2.0) == "entry"
    assert len(given) == 2
    forget_plans(Path(__file__).parent)
    with pytest.raises(TypeError):
        axpy(X, factor=2.0)


def test_the_setting_exact_chooses_plan_and_plain_path_for_all_calls(monkeypatch):
    def exact_plan(call):
        return plan(call._replace(factor=10 * call.factor))

    def exact_plain(call):
        return plain(call._replace(factor=100 * call.factor))

    op = Op("tens", Call, kernel=KERNEL, plan=plan, plain=plain, uncovered=uncovered, outputs=("x",))
    with pytest.raises(ValueError, match=r"^tens: expected an op with an exact mode; docs/dispatch\.md says why"):
        op.set_exact()
    op = Op(
        "powers", Call, kernel=KERNEL, plan=plan, plain=plain, uncovered=uncovered, outputs=("x",),
        exact=(exact_plan, exact_plain),
    )  # fmt: skip
    monkeypatch.setattr(Op, "_on_gpu", lambda self, call: True)
    monkeypatch.setattr(
        module, "make_entry", lambda chain, *_: lambda *a: chain.run(*a[:3]) if a[1].dim() == 2 else MISS
    )
    for exact, factors in ((False, (1, 1)), (True, (10, 100)), (False, (1, 1))):
        op.set_exact(exact)
        for x, factor in zip((X, X[None]), factors, strict=True):
            assert torch.equal(op.call(None, x, None, 1.0), factor * x), "the entry of the other setting is in use"
            assert torch.equal(op.registered(None, x, None, 1.0), factor * x)
    op.set_exact()
    forget_plans(Path(__file__).parent)


def test_plans_of_other_folders_are_left_alone():
    AXPY.plans.add((X,), (), print)
    forget_plans(Path(__file__).parent / "elsewhere")
    assert AXPY.plans.last is print


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_it_compiles_to_a_full_graph(backend):
    torch.compiler.reset()
    compiled = torch.compile(axpy, fullgraph=True, backend=backend)
    assert torch.equal(compiled(X, X, 3.0), 4 * X)
    out = torch.empty_like(X)
    assert compiled(X, X, 3.0, out=out) is out
    assert torch.equal(out, 4 * X)


def test_the_registered_ops_are_truthful_and_the_modules_own():
    namespace = __name__.replace(".", "_")
    assert AXPY.registered is getattr(torch.ops, namespace).axpy
    torch.library.opcheck(AXPY.registered.default, (None, X.T, X.T, 2.0))
    torch.library.opcheck(AXPY.registered_into.default, (torch.empty_like(X), X, None, 2.0))
    schema = str(AXPY.registered_into.default._schema)
    assert "Tensor(a!) target, Tensor x, Tensor? other, float factor) -> ()" in schema


def test_an_output_may_be_like_no_argument():
    pair = torch.arange(16.0).reshape(2, 8)
    made = HALF._chain(Pair(pair)).outputs
    assert [(tensor.device.type, tensor.shape, tensor.stride()) for tensor in made] == [("meta", (2, 4), (4, 1))]
    torch.library.opcheck(HALF.registered.default, (pair,))
    for given in (pair.to("meta"), pair.T.contiguous().T.to("meta")):
        assert (HALF.registered(given).shape, HALF.registered(given).stride()) == ((2, 4), (4, 1))


def test_hooks_speak_of_the_public_arguments():
    meta = {"x": X.to("meta"), "y": X.to("meta")}
    (launch,) = launches("axpy", meta, {"factor": 2.0})
    assert (launch.name, launch.constexprs) == ("axpy_kernel", {"FACTOR": 2.0})
    assert len(launch.args) == 3
    assert launches("axpy", {"x": X[None].to("meta")}, {}) == []
    assert launches("axpy", {"x": X[:0].to("meta")}, {}) == []
    assert launches("both", {"x": X, "other": X}, {})[0].constexprs == {"FACTOR": 2.0}
    assert why_not("signed", X, None) == "the sign is not known"
    assert launches("signed", {"x": X}, {"sign": None}) == []
    assert why_not("signed", X, 2.0) is None


def test_tensors_come_before_all_other_arguments():
    class Mixed(NamedTuple):
        x: torch.Tensor
        factor: float
        y: torch.Tensor

    with pytest.raises(TypeError, match="Mixed: expected tensors before all other arguments"):
        Op("mixed", Mixed, kernel=KERNEL, plan=partial(plan), plain=plain)
