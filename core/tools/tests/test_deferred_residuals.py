"""Sums that wait for LTX-2's norms: which calls go to the ops, what anything else gets, both ways into a model."""

import ast
import functools
import json
import threading
import weakref
from collections import Counter
from types import ModuleType

import pytest
import torch

from core.tools.tests.every_task import ROOT
from kda_judge.contract.tasks import Task
from kda_tools.models import apply_hook, apply_site, deferred_residuals
from kda_tools.models.apply_counts import Counts
from kda_tools.models.chain_sites import SiteFile, sites_of
from kda_tools.models.deferred_residuals import MODULATE, RESIDUAL, TWICE
from kda_tools.models.deferred_slices import Refused, refuse

K15 = Task(ROOT / "diffusion" / "k15_rounded_rmsnorm_modulate")
MODEL = ModuleType("model_of_a_test")
"""Upstream's module, as far as its blocks ask for it."""
B, D, EPS = 2, 16, 1e-6
TOKENS = {"video": 5, "audio": 3}
OWN = Counter()
"""Calls of the module's own functions."""


def residual_gate_add(residual, update, gate):
    OWN["add"] += 1
    return residual + update * gate


def rms_norm_modulate(_block, rms_norm, x, scale, shift, eps):
    OWN["norm"] += 1
    return MODEL._ltx2_modulate(rms_norm(x, eps), scale, shift)


def modulate(x, scale, shift):
    OWN["modulate"] += 1
    return x * (1 + scale) + shift


FUNCTIONS = {
    "residual_gate_add": residual_gate_add,
    "_ltx2_rms_norm_modulate": rms_norm_modulate,
    "_ltx2_modulate": modulate,
}


@pytest.fixture(autouse=True)
def _upstream():
    vars(MODEL).update(FUNCTIONS)
    OWN.clear()


class RMSNormNoWeight(torch.nn.Module):
    """Upstream's layer."""

    def forward(self, x, eps):
        with torch.autocast("cpu", enabled=False):
            return torch.nn.functional.rms_norm(x, normalized_shape=(x.shape[-1],), eps=eps)


class Attention(torch.nn.Linear):
    """What attention and feed-forward stand for: they want tensors."""

    def forward(self, x, context=None):
        assert type(x) is torch.Tensor
        assert context is None or type(context) is torch.Tensor
        return super().forward(x) if context is None else super().forward(x) + context.mean(dim=1, keepdim=True)


class Block(torch.nn.Module):
    """The order of upstream's block, for two streams."""

    def __init__(self, adaln=False, skip=()):
        super().__init__()
        self.cross_attention_adaln, self.skip = adaln, skip
        self.rms_norm = RMSNormNoWeight()
        names = (f"{stream}_{layer}" for stream in TOKENS for layer in ("own", "prompt", "cross", "ff"))
        self.layers = torch.nn.ModuleDict({name: Attention(D, D, dtype=torch.bfloat16) for name in names})
        self.cross_table = torch.nn.Parameter(torch.randn(4, D).bfloat16())

    def get_ada_values(self, table, temb):
        return list((table[:, None, None, :] + temb[None]).unbind(0))

    def values(self, temb, stream, place):
        """Shift, scale and gate."""
        return [value.contiguous() for value in temb[stream, place].chunk(3, dim=-1)]

    def forward(self, video, audio, temb):
        hidden = {"video": video, "audio": audio}
        for place in ("own", "prompt"):
            for stream in TOKENS:
                x = hidden[stream]
                layer = self.layers[f"{stream}_{place}"]
                if place == "own" or self.cross_attention_adaln:
                    shift, scale, gate = self.values(temb, stream, place)
                    y = layer(MODEL._ltx2_rms_norm_modulate(self, self.rms_norm, x, scale, shift, EPS))
                    hidden[stream] = MODEL.residual_gate_add(x, y, gate)
                else:
                    hidden[stream] = x + layer(self.rms_norm(x, EPS))
        normed = {stream: self.rms_norm(x, EPS) for stream, x in hidden.items()}
        cross = {stream: self.get_ada_values(self.cross_table, temb[stream, "cross"]) for stream in TOKENS}
        (gate,) = self.get_ada_values(self.cross_table[:1], temb["video", "cross"])
        for number, (to, of) in enumerate((("video", "audio"), ("audio", "video"))):
            first, second = 2 * number, 2 * number + 1
            pair = {one: self.change(MODEL._ltx2_modulate, normed[one], cross[one], first, second) for one in TOKENS}
            if to not in self.skip:
                y = self.layers[f"{to}_cross"](pair[to], pair[of])
                hidden[to] = MODEL.residual_gate_add(hidden[to], y, gate)
        for stream in TOKENS:
            shift, scale, gate = self.values(temb, stream, "ff")
            y = MODEL._ltx2_rms_norm_modulate(self, self.rms_norm, hidden[stream], scale, shift, EPS)
            hidden[stream] = MODEL.residual_gate_add(hidden[stream], self.layers[f"{stream}_ff"](y), gate)
        return hidden["video"], hidden["audio"]

    def change(self, function, x, values, first, second):
        """The modulation; subclasses modulate in another way."""
        return function(x, values[first], values[second])


def inputs(rows=1):
    """Hidden states of both streams, and what modulates them: one row for each clip, or `rows`="tokens"."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    temb = {}
    for stream, tokens in TOKENS.items():
        number = tokens if rows == "tokens" else rows
        temb |= {(stream, place): random(B, number, 3 * D) for place in ("own", "prompt", "ff")}
        temb[stream, "cross"] = random(B, 1, D)
    return *(random(B, tokens, D) for tokens in TOKENS.values()), temb


def normed(h, scale, shift, eps):
    assert eps == EPS
    assert type(h) is torch.Tensor
    assert scale is shift is None or scale.shape == shift.shape == (B, 1, D)
    n = torch.nn.functional.rms_norm(h, (D,), eps=eps)
    return n if scale is None else n * (1 + scale) + shift


def summed(residual, x, gate):
    return residual + (x if gate is None else x * gate)


def alone(x, scale, shift, eps):
    return normed(x, scale, shift, eps)


def residual(residual, x, gate, scale, shift, eps):
    h = summed(residual, x, gate)
    return normed(h, scale, shift, eps), h


def twice(residual, x, gate, scale, shift, other_scale, other_shift, eps):
    h = summed(residual, x, gate)
    return normed(h, scale, shift, eps), normed(h, other_scale, other_shift, eps), h


OPS = {MODULATE: alone, RESIDUAL: residual, TWICE: twice}
"""The task's ops, by their definition."""
EACH = {"tensor": 2, "sum": 2, "modulated": 2, "twice": 2}
"""Calls of the ops in a block: for each stream one of each."""


def counting(calls, op, function=None):
    """The op, which counts its calls by what they do."""
    function = function or OPS[op]

    def call(*args):
        kind = {MODULATE: "tensor", TWICE: "twice"}.get(op) or ("sum" if args[3] is None else "modulated")
        calls[kind] += 1
        return function(*args)

    return call


def put(block, calls, ops=tuple(OPS), functions=None):
    """The block with these ops in it, which are counted."""
    for op in ops:
        deferred_residuals.put(MODEL, "ltx2", (block,), op, counting(calls, op, (functions or {}).get(op)))
    return block


def both(block, given):
    """What the block returns, and the calls of the module's own functions."""
    OWN.clear()
    with torch.no_grad():
        got = block(*given)
    assert [type(one) for one in got] == [torch.Tensor] * 2
    return got, dict(OWN)


def assert_equal(got, want):
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("adaln", [False, True], ids=["ltx2", "ltx23"])
def test_the_ops_do_all_norms(adaln):
    block, given, calls = Block(adaln), inputs(), Counter()
    want, own = both(block, given)
    assert own == ({"add": 8, "norm": 6, "modulate": 10} if adaln else {"add": 6, "norm": 4, "modulate": 8})
    for _ in range(2):  # again, as at every change of an arm
        put(block, calls)
    got, own = both(block, given)
    assert_equal(got, want)
    if adaln:  # the second norm is modulated too
        assert calls == {"tensor": 2, "modulated": 4, "twice": 2}
    else:
        assert calls == EACH
    assert own == {"add": 2}, "the last sums, which no norm follows"


def test_what_was_put_there_is_taken_back():
    block, given, calls = Block(), inputs(), Counter()
    want, own = both(block, given)
    put(block, calls)
    deferred_residuals.take_back(MODEL, "ltx2", (block,))
    assert {name: getattr(MODEL, name) for name in FUNCTIONS} == FUNCTIONS
    assert not {"forward", "get_ada_values"} & set(vars(block))
    again = both(block, given)
    assert_equal(again[0], want)
    assert (again[1], calls) == (own, {})
    deferred_residuals.take_back(MODEL, "ltx2", (block,))  # once for each op
    put(block, calls, (RESIDUAL,))
    assert_equal(both(block, given)[0], want)
    assert calls == {"sum": 4, "modulated": 2}, "the ops of before are gone"


def test_what_stood_there_before_runs_and_comes_back():
    block, given, calls, seen = Block(), inputs(), Counter(), Counter()

    def counted(name):
        own = getattr(block, name)
        return lambda *args: seen.update({name: 1}) or own(*args)

    before = block.forward, block.get_ada_values = counted("forward"), counted("get_ada_values")
    put(block, calls)
    both(block, given)
    assert (seen, calls) == ({"forward": 1, "get_ada_values": 3}, EACH)
    deferred_residuals.take_back(MODEL, "ltx2", (block,))
    assert (block.forward, block.get_ada_values) == before
    put(block, calls)
    other = block.forward = lambda *_: None
    deferred_residuals.take_back(MODEL, "ltx2", (block,))
    assert block.forward is other, "only what this module has put there is removed"


@pytest.mark.parametrize(
    ("there", "expected", "own"),
    [
        ((), {}, {"add": 6, "norm": 4, "modulate": 8}),
        ((MODULATE,), {"tensor": 2}, {"add": 6, "norm": 2, "modulate": 6}),
        ((RESIDUAL,), {"sum": 2, "modulated": 2}, {"add": 2, "norm": 2, "modulate": 6}),
        ((TWICE,), {"twice": 2}, {"add": 6, "norm": 4, "modulate": 4}),
    ],
    ids=["none", "alone", "residual", "twice"],
)
@pytest.mark.parametrize("how", ["absent", "refused"])
def test_without_an_op_the_models_own_functions_run(there, expected, own, how):
    """Where `twice` is not there, the third norm waits until its first modulation, which has no waiting sum then."""
    block, given, calls = Block(), inputs(), Counter()
    want, _ = both(block, given)
    if how == "absent":
        put(block, calls, there or (MODULATE,), {} if there else {MODULATE: refuse})
        calls_expected = expected or {"tensor": 2}
    else:
        put(block, Counter(), functions={op: refuse for op in OPS if op not in there})
        put(block, calls, there)
        calls_expected = expected
    got, found = both(block, given)
    assert_equal(got, want)
    if there == (RESIDUAL,):  # the third norm is one of a sum, then
        calls_expected = {"sum": 4, "modulated": 2}
    assert calls == calls_expected
    assert found == own


def test_a_sum_is_computed_once_after_a_refusal():
    sums = []

    def refusing(*args):
        sums.append(args[0])
        raise Refused

    block, given = Block(), inputs()
    want, own = both(block, given)
    put(block, Counter(), functions=dict.fromkeys(OPS, refusing))
    got, found = both(block, given)
    assert_equal(got, want)
    assert found == own
    assert len(sums) == 2 + 2 + 2 * 2 + 2, "the third norm asks for two modulations, then for none"


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        (("video",), {"tensor": 3, "sum": 2, "modulated": 1, "twice": 2}),
        (("audio",), {"tensor": 3, "sum": 2, "modulated": 1, "twice": 2}),
        (("video", "audio"), {"tensor": 4, "sum": 2, "twice": 2}),
    ],
)
def test_blocks_that_skip_an_attention(skip, expected):
    block, given, calls = Block(skip=skip), inputs(), Counter()
    want, _ = both(block, given)
    assert_equal(both(put(block, calls), given)[0], want)
    assert calls == expected, "the last norm is that of a sum that is known already"


class Perturbed(Block):
    """Its second modulation gets other tensors."""

    def change(self, function, x, values, first, second):
        return function(x, values[first] * 1 if first else values[first], values[second])


class OtherShift(Block):
    """Its first modulation gets a shift of its own."""

    def change(self, function, x, values, first, second):
        return function(x, values[first], values[second] if first else values[second] * 1)


class Pairs(Block):
    """It makes the values of each modulation by themselves."""

    def change(self, function, x, values, first, second):
        temb = (values[0] - self.cross_table[0]) * 0
        return function(x, *self.get_ada_values(self.cross_table[first : second + 1], temb))


class Backwards(Block):
    """It makes the second modulation first."""

    def change(self, function, x, values, first, second):
        return function(x, values[2 - first], values[4 - second])


class Again(Block):
    """It asks for every modulation twice."""

    def change(self, function, x, values, first, second):
        return torch.minimum(*(function(x, values[first], values[second]) for _ in range(2)))


@pytest.mark.parametrize(
    ("kind", "expected", "modulated"),
    [
        (Perturbed, EACH, 2),
        (OtherShift, EACH | {"sum": 4, "twice": 0}, 4),
        (Pairs, EACH | {"sum": 4, "twice": 0}, 4),
        (Backwards, EACH | {"sum": 4, "twice": 0}, 4),
        (Again, EACH, 4),
    ],
)
def test_other_modulations_are_the_models_own(kind, expected, modulated):
    block, given, calls = kind(), inputs(), Counter()
    want, _ = both(block, given)
    got, own = both(put(block, calls), given)
    assert_equal(got, want)
    assert calls == Counter(expected)
    assert own == {"add": 2, "modulate": modulated}


@pytest.mark.parametrize("adaln", [False, True], ids=["ltx2", "ltx23"])
def test_a_row_for_each_token_is_the_models_own(adaln):
    block, given, calls = Block(adaln), inputs("tokens"), Counter()
    want, own = both(block, given)
    got, found = both(put(block, calls), given)
    assert_equal(got, want)
    assert calls == {}
    assert found == own


def test_a_row_for_each_token_between_the_streams():
    block, calls = Block(skip=TOKENS), Counter()
    video, audio, temb = inputs()
    temb |= {(stream, "cross"): temb[stream, "cross"].repeat(1, tokens, 1) for stream, tokens in TOKENS.items()}
    want, _ = both(block, (video, audio, temb))
    got, own = both(put(block, calls), (video, audio, temb))
    assert_equal(got, want)
    assert calls == {"tensor": 4, "sum": 4}
    assert own == {"add": 2, "modulate": 4}


@pytest.mark.parametrize("clips", [1, B])
def test_a_row_for_all_clips_is_the_models_own(clips):
    """The ops want one row for each clip."""
    block, calls = Block(), Counter()
    video, audio, temb = inputs()
    temb = {key: value[:clips] for key, value in temb.items()}
    want, own = both(block, (video, audio, temb))
    got, found = both(put(block, calls), (video, audio, temb))
    assert_equal(got, want)
    assert (found == own) == (calls == {}) == (clips == 1)


@pytest.mark.parametrize("place", ["ff", "own"])
def test_another_dtype_is_the_models_own(place):
    block, calls = Block().float(), Counter()
    video, audio, temb = inputs()
    given = video.float(), audio.float(), temb | {(stream, place): temb[stream, place] for stream in TOKENS}
    given[2].update({key: value.float() for key, value in temb.items() if key[1] != place})
    want, _ = both(block, given)
    got, _ = both(put(block, calls), given)
    assert_equal(got, want)
    assert calls == ({"tensor": 2, "sum": 2, "twice": 2} if place == "ff" else {"modulated": 2})


def waiting(calls, gate=True):
    """A sum that waits, and what it stands for."""
    video, _, temb = inputs()
    update, row = video.flip(0), temb["video", "cross"]
    run = deferred_residuals.Run({op: counting(calls, op) for op in OPS}, norms_alone=True)
    want = residual_gate_add(video, update, row)
    one = deferred_residuals.Sum(run, residual_gate_add, video, update, row)
    return (one, want) if gate else (one + update, want + update)


def test_shape_and_dtype_compute_nothing():
    one, want = waiting(Counter())
    OWN.clear()
    for x in (one, deferred_residuals.Norm(one, EPS)):
        assert (x.shape, x.dtype, x.device, x.ndim) == (want.shape, want.dtype, want.device, want.ndim)
        assert (x.dim(), x.size(), x.size(1), x.is_contiguous()) == (want.dim(), want.size(), want.size(1), True)
    assert (OWN, one.made) == ({}, None)
    assert one.stride() == want.stride()
    assert OWN == {"add": 1}


@pytest.mark.parametrize("kind", [deferred_residuals.Sum, deferred_residuals.Norm])
def test_no_method_of_tensors_is_hidden(kind):
    known = {"shape", "dtype", "device", "ndim", "dim", "size", "is_contiguous"}
    assert {name for name in set(dir(kind)) & set(dir(torch.Tensor)) if not name.startswith("_")} == known


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, t: x * t,
        lambda x, t: t * x,
        lambda x, t: t + x,
        lambda x, t: x + 1,
        lambda x, t: 1 + x,
        lambda x, t: x + x,
        lambda x, t: x + t[:1],
        lambda x, t: x + t.float(),
        lambda x, t: x - t,
        lambda x, t: 1 - x,
        lambda x, t: x / t,
        lambda x, t: -x,
        lambda x, t: x[:, 1:],
        lambda x, t: x @ t.mT,
        lambda x, t: torch.stack([*x, *t]),
        lambda x, t: torch.tensor(len(x)),
        lambda x, t: torch.cat((x, t)),
        lambda x, t: torch.cat(tensors=[t, x]),
        lambda x, t: torch.where(t > 0, x, t),
        lambda x, t: x.float().sum(),
        lambda x, t: x.view(-1),
        lambda x, t: torch.nn.functional.linear(x, t[0]),
        lambda x, t: torch.nn.functional.rms_norm(x, (D,), eps=EPS).sum(),
        lambda x, t: torch.nn.functional.rms_norm(x, (D,)).sum(),
        lambda x, t: torch.nn.functional.rms_norm(x, (D,), t[0, 0], EPS).sum(),
        lambda x, t: torch.nn.functional.rms_norm(x, t.shape[1:], eps=EPS).sum(),
        lambda x, t: torch.nn.functional.rms_norm(input=x, normalized_shape=(D,), eps=EPS).sum(),
        lambda x, t: torch.nn.functional.layer_norm(x, (D,)),
    ],
)
def test_anything_else_gets_the_tensor(use, gate):
    one, want = waiting(Counter(), gate)
    other = inputs()[0].flip(1)
    got = use(one, other)
    got = got.tensor() if isinstance(got, deferred_residuals.Waiting) else got
    assert type(got) is torch.Tensor
    assert torch.equal(got, use(want, other))
    assert torch.equal(one.tensor(), want)


def test_a_norm_by_itself():
    calls = Counter()
    one, want = waiting(calls, gate=False)
    norm = torch.nn.functional.rms_norm(one, (D,), eps=EPS)
    assert (type(norm), calls) == (deferred_residuals.Norm, {})
    assert torch.equal(norm * 2, torch.nn.functional.rms_norm(want, (D,), eps=EPS) * 2)
    assert torch.equal(norm[0], norm.tensor()[0])
    OWN.clear()
    assert torch.equal(one.tensor(), want)
    assert (calls, OWN) == ({"sum": 1}, {}), "one call of the op, which gives the sum too"


def test_a_waiting_sum_lets_go_of_what_it_was_made_from():
    update = inputs()[0].flip(0)
    gone = weakref.ref(update)
    run = deferred_residuals.Run(OPS, norms_alone=True)
    one = deferred_residuals.Sum(run, residual_gate_add, inputs()[0], update, inputs()[2]["video", "cross"])
    del update
    assert gone() is not None
    one.tensor()
    assert gone() is None


def test_a_norm_that_has_waited_meets_no_autocast(monkeypatch):
    own, seen = torch.nn.functional.rms_norm, []
    one = deferred_residuals.Sum(deferred_residuals.Run({}, norms_alone=False), None, *[inputs()[0]] * 2, None)
    norm = own(one, (D,), eps=EPS)
    monkeypatch.setattr(
        torch.nn.functional,
        "rms_norm",
        lambda *args, **kwargs: seen.append(torch.is_autocast_enabled("cpu")) or own(*args, **kwargs),
    )
    with torch.autocast("cpu", torch.bfloat16):
        norm.tensor()
        assert torch.is_autocast_enabled("cpu")
    assert seen == [False]


class Adding(Block):
    """A block that only adds, and says what it got."""

    def forward(self, *arguments):
        self.runs = len(deferred_residuals._running.runs)
        self.got = MODEL.residual_gate_add(*arguments)
        return self.got


@pytest.mark.parametrize(
    "change",
    [
        lambda residual, update, gate: (residual, update.float(), gate),
        lambda residual, update, gate: (residual, update[:1], gate),
        lambda residual, update, gate: (residual[:1], update, gate),
        lambda residual, update, gate: (residual, update, gate.float()),
        lambda residual, update, gate: (residual, update, gate[0, 0]),
        lambda residual, update, gate: (residual[0], update[0], gate[0]),
    ],
)
def test_other_sums_do_not_wait(change):
    video, _, temb = inputs()
    given, block = (video, video.flip(0), temb["video", "cross"]), put(Adding(), Counter())
    assert torch.equal(block(*given), residual_gate_add(*given))
    assert type(block.got) is deferred_residuals.Sum
    assert torch.equal(block(*change(*given)), residual_gate_add(*change(*given)))
    assert type(block.got) is torch.Tensor


@pytest.mark.parametrize("change", [lambda x: x.float(), lambda x: x[:1], lambda _: 1])
def test_other_tensors_are_added_at_once(change):
    one, want = waiting(Counter())
    video = inputs()[0]
    assert type(one + video) is deferred_residuals.Sum
    assert type(one + change(video)) is torch.Tensor
    assert torch.equal(one + change(video), want + change(video))


def test_while_something_compiles_nothing_waits(monkeypatch):
    video, _, temb = inputs()
    block = put(Adding(), calls := Counter())
    given, row = (video, video, temb["video", "cross"]), temb["video", "cross"]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    block(*given)
    assert (type(block.got), block.runs) == (torch.Tensor, 0)
    monkeypatch.setattr(deferred_residuals._running, "runs", [deferred_residuals.Run(OPS, norms_alone=True)])
    block(*given)
    assert type(block.got) is torch.Tensor
    MODEL._ltx2_rms_norm_modulate(block, block.rms_norm, video, row, row, EPS)
    block.get_ada_values(block.cross_table, row)
    assert (calls, OWN["norm"], deferred_residuals._running.runs[0].values) == ({}, 1, {})


def test_outside_of_a_block_nothing_waits():
    video, _, temb = inputs()
    put(Block(), Counter())
    row = temb["video", "cross"]
    assert type(MODEL.residual_gate_add(video, video, row)) is torch.Tensor
    assert type(MODEL._ltx2_rms_norm_modulate(None, RMSNormNoWeight(), video, row, row, EPS)) is torch.Tensor
    assert OWN == {"add": 1, "norm": 1, "modulate": 1}


def test_a_block_that_fails_runs_no_more():
    block = put(Block(), Counter())
    with pytest.raises(KeyError):
        block(*inputs()[:2], {})
    assert deferred_residuals._running.runs == []


def test_blocks_run_in_several_threads():
    blocks = [Block(), Block()]
    given, calls = inputs(), [Counter(), Counter()]
    want = [both(block, given)[0] for block in blocks]
    meeting, got = threading.Barrier(2), {}

    def together(function):
        def call(*args):
            meeting.wait(10)  # both blocks are in the same call
            return function(*args)

        return call

    for block, counter in zip(blocks, calls, strict=True):
        put(block, counter, functions={op: together(function) for op, function in OPS.items()})

    def run(number):
        with torch.no_grad():
            got[number] = blocks[number](*given)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert_equal(got[number], want[number])
        assert calls[number] == EACH


@torch.no_grad()
@pytest.mark.parametrize("real", [True, False], ids=["compiled", "as if"])
def test_torch_compile_sees_the_models_own(real, monkeypatch):
    block, given, calls = Block(), inputs(), Counter()
    want = block(*given)
    run = put(block, calls)
    if real:
        run = torch.compile(run, backend="eager", fullgraph=True)
    else:
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert_equal(run(*given), want)
    assert calls == {}


def test_the_sites_are_of_one_class():
    sites = sites_of(K15)
    assert [site.op for site in sites] == list(OPS)
    assert {(site.kind, site.place, site.release, site.class_) for site in sites} == {
        ("residuals", "ltx2", "0.5.23", "LTX2TransformerBlock")
    }
    known = sites[0].model_dump(by_alias=True)
    with pytest.raises(ValueError, match="key 'residuals': expected one of ltx2, got 'wan'"):
        SiteFile.model_validate({"site": (known | {"residuals": "wan"},)})


# ---- kda apply


def test_the_copy_imports_only_pytorch(tmp_path):
    apply_site.write(tmp_path / "site", [], {}, runtime=False)
    copies = tmp_path / "site" / apply_site.COPIED
    found = {}
    for name in ("deferred_residuals", "deferred_kept"):
        nodes = list(ast.walk(ast.parse((copies / f"{name}.py").read_text())))
        found[name] = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found[name] |= {"." * node.level + node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    library = {"__future__", "collections.abc", "typing"}
    assert found == {
        "deferred_kept": library | {"operator"},
        "deferred_residuals": library
        | {".deferred_kept", ".deferred_slices", "functools", "threading", "torch", "types"},
    }


@pytest.mark.parametrize("taken", [True, False], ids=["taken", "refused"])
def test_blocks_that_are_made_later_call_the_ops(taken, tmp_path, monkeypatch):
    calls, originals = Counter(), []

    def replacement(solution, original, _counts):
        originals.append(original)
        return functools.wraps(solution)(counting(calls, solution.__name__, solution if taken else original))

    monkeypatch.setattr(apply_hook, "replacement", replacement)
    apply_site.write(tmp_path / "site", apply_site.sites([K15]), {}, runtime=False)
    plan = json.loads((tmp_path / "site" / apply_hook.PLAN).read_text())
    MODEL.LTX2TransformerBlock = type("LTX2TransformerBlock", (Block,), {})
    for entry in plan["releases"]["0.5.23"]:
        op = functools.wraps(OPS[entry["function"]])(lambda *args, op=entry["function"]: OPS[op](*args))
        op.__name__ = entry["function"]
        place = apply_hook.defer_in(MODEL, entry, op, Counts(tmp_path))
        assert place == "model_of_a_test.LTX2TransformerBlock.ltx2"
    assert originals == [refuse] * 3, "what a refused call meets"
    block, given = MODEL.LTX2TransformerBlock(), inputs()
    got, _ = both(block, given)
    assert calls["tensor"] == 2
    assert calls == EACH or not taken
    deferred_residuals.take_back(MODEL, "ltx2", (block,))
    assert_equal(got, both(block, given)[0])
