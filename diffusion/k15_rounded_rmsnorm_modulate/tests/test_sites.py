"""The lines in `sites.toml`, in front of the blocks of both releases.

A block is upstream's own text, out of the pinned wheel, with simple layers for attention and feed-forward. Its
functions are upstream's, too, as they run without kernels. So the results have the same bits, and each layer gets the
same arguments.
"""

import inspect
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from kda_judge.contract.tasks import find_task
from kda_tools.models import deferred_lines
from kda_tools.models.chain_sites import sites_of
from kda_tools.models.deferred_lines import refuse
from kda_tools.models.upstream_source import counted, module_of, run, source_of, text_of

from .. import solution
from ..bench import grid

SITES = {site.release: site for site in sites_of(find_task("rounded_rmsnorm_modulate"))}
NEW = "0.5.23"
OPS = grid.SINGLE, grid.RESIDUAL, grid.TWO
FOUND = (
    *("LTX2TransformerBlock", "adaln_embedding_coefficient", "rms_norm", "_ltx2_modulate"),
    *("ADALN_NUM_BASE_PARAMS", "ADALN_NUM_CROSS_ATTN_PARAMS", "_LTX2_FUSED_ADA_VALUES_RUNTIME_DISABLED"),
    *("_ltx2_rms_norm_modulate", "_ltx2_try_fused_ada_values9"),
)
"""What is taken out of upstream's module; a release may not have all."""
B, D, EPS = 2, {"": 16, "audio_": 8}, 0.1
TOKENS, TEXT = {"": 6, "audio_": 3}, 4
SINGLE, NORM, MODULATED, TWICE, GATED_TWICE = "single", "norm", "modulated", "twice", "gated twice"
LTX2 = [*[SINGLE] * 2, *[NORM, TWICE] * 2, *[MODULATED] * 2]
"""The calls of a forward: before self-attention, around attention to the prompt, before the feed-forward."""
LTX23 = [*[SINGLE] * 2, *[MODULATED, GATED_TWICE] * 2, *[MODULATED] * 2]
ROWS = (
    *("temb", "temb_audio", "temb_ca_gate", "temb_ca_audio_gate"),
    *("temb_ca_scale_shift", "temb_ca_audio_scale_shift"),
)
MASKS = "a2v_cross_attn_perturbation_mask", "v2a_cross_attn_perturbation_mask"
each_release = pytest.mark.parametrize("release", SITES)
each_model = pytest.mark.parametrize("adaln", [False, True], ids=["ltx2", "ltx23"])
pytestmark = pytest.mark.usefixtures("_without_gradients")


@pytest.fixture
def _without_gradients():
    with torch.no_grad():
        yield


# --- upstream's text, and simple layers for what it asks for


class Attention(torch.nn.Module):
    """It mixes x and its context, and keeps what it got, with upstream's defaults for the rest."""

    signature: inspect.Signature
    """Of upstream's."""

    def __init__(self, query_dim, prefix, context_dim=None, **_options):
        super().__init__()
        self.to_q, self.to_v = (torch.nn.Linear(size or query_dim, query_dim) for size in (query_dim, context_dim))
        self.prefix, self.calls = prefix, []

    def forward(self, *args, **kwargs):
        given = self.signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        got = given.arguments
        self.calls.append({name: value for name, value in got.items() if name != "self"})
        context = got["x"] if got["context"] is None else got["context"]
        return self.to_q(got["x"]) + self.to_v(context).mean(dim=1, keepdim=True)


class FeedForward(torch.nn.Linear):
    def __init__(self, size, dim_out, **_options):
        super().__init__(size, dim_out)


class CustomOp(torch.nn.Module):
    """Upstream's class where there is no kernel."""

    @staticmethod
    def register(_name):
        return lambda kind: kind

    def forward(self, *args):
        return self.forward_native(*args)


class Gate:
    """Upstream's, for kernels that never run."""

    disabled, verified = True, False

    def mark(self, _block):
        pass

    def is_enabled(self, _block):
        return False


class NoDevice:
    @staticmethod
    def tensor_on_device(_tensor):
        return False


def residual_gate_add(residual, update, gate):
    return residual + update * gate


@cache
def upstream(release):
    """A module with the release's block."""
    site = SITES[release]
    needed = {
        "torch": torch,
        "nn": torch.nn,
        "F": torch.nn.functional,
        "LTX2FeedForward": FeedForward,
        "LTX2_RMS_NORM_MODULATE": Gate(),
        "_LTX2_MODULATE": Gate(),
        "current_platform": NoDevice,
        "get_tp_world_size": lambda: 1,
        "residual_gate_add": residual_gate_add,
    }
    own = {"nn": torch.nn}
    run(source_of(site), ("LTX2Attention",), own)
    signature = inspect.signature(own["LTX2Attention"].forward)
    needed["LTX2Attention"] = type("LTX2Attention", (Attention,), {"signature": signature})
    if release == NEW:
        layers = {"torch": torch, "F": torch.nn.functional, "CustomOp": CustomOp}
        run(text_of("sglang.multimodal_gen.runtime.layers.layernorm", release), ("RMSNormNoWeight",), layers)
        needed["RMSNormNoWeight"] = layers["RMSNormNoWeight"]
    return module_of(site, FOUND, **needed)


def block_of(module, adaln=False, dtype=torch.bfloat16):
    torch.manual_seed(0)
    sizes = {"dim": D[""], "cross_attention_dim": D[""], "audio_dim": D["audio_"]}
    sizes |= {"audio_cross_attention_dim": D["audio_"], "num_attention_heads": 2, "attention_head_dim": 8}
    sizes |= {"audio_num_attention_heads": 2, "audio_attention_head_dim": 4}
    return module.LTX2TransformerBlock(0, **sizes, norm_eps=EPS, cross_attention_adaln=adaln).to(dtype)


def given_to(block, **other):
    """Arguments of a forward; `other` are more, or in place of these."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(block.scale_shift_table.dtype)

    given = {}
    for side, end in (("", ""), ("audio_", "_audio")):
        size = D[side]
        given[f"{side}hidden_states"] = normal(B, TOKENS[side], size)
        given[f"{side}encoder_hidden_states"] = normal(B, TEXT, size)
        given[f"temb{end}"] = normal(B, 1, len(block.scale_shift_table) * size)
        given[f"temb{end}_prompt"] = normal(B, 1, 2 * size) if block.cross_attention_adaln else None
        given[f"temb_ca{end}_scale_shift"] = normal(B, 1, 4 * size)
        given[f"temb_ca{end}_gate"] = normal(B, 1, size)
    # What only goes to the layers: any objects, all different.
    names = inspect.signature(block.forward).parameters
    passed = ("rotary_emb", "encoder_attention_mask", "self_attention_mask", "cross_attention_mask", "self_attn")
    given |= {name: f"the {name}" for name in names if name.endswith(passed)}
    given |= {name: f"the {name}" for name in names if name.endswith("self_attn_perturbation_mask")}
    given |= {"audio_replicated_for_sp": "replicated", "skip_a2v_cross_attn": False, "skip_v2a_cross_attn": False}
    if "video_memory_prefix_len" in names:
        given["video_memory_prefix_len"] = 3
    return given | other


def layers(block):
    return [layer for layer in block.modules() if isinstance(layer, Attention)]


def assert_equal(got, want):
    """The same results, or the same arguments of a layer."""
    assert type(got) is type(want)
    assert len(got) == len(want)
    pairs = [(got[name], want[name]) for name in want] if isinstance(want, dict) else zip(got, want, strict=True)
    for one, other in pairs:
        if isinstance(other, torch.Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one is other or one == other


def kind_of(op, args):
    """What a call of an op does; its operands are of the right form."""
    args = dict(zip(inspect.signature(getattr(solution, op)).parameters, args, strict=True))
    x = args.pop("x")
    size = x.shape[-1]
    tokens = TOKENS["" if size == D[""] else "audio_"]
    assert x.shape == (B, tokens, size)
    assert args.pop("residual", x).shape == x.shape
    assert args.pop("eps") == EPS
    assert {one.shape for one in args.values() if one is not None} == {(B, 1, size)}
    assert {one.dtype for one in args.values() if one is not None} == {x.dtype}
    if op == grid.RESIDUAL:
        assert args["gate"] is not None
        return NORM if args["scale"] is None else MODULATED
    return SINGLE if op == grid.SINGLE else TWICE if args["gate"] is None else GATED_TWICE


def put(block, release, calls, ops=OPS, refused=()):
    """Put the solution's ops into the block; `calls` gets what each call does."""

    def op_of(name):
        def call(*args):
            calls.append(kind_of(name, args))
            return (refuse if name in refused else getattr(solution, name))(*args)

        return call

    for name in ops:
        deferred_lines.put(None, SITES[release].ported, (block,), name, op_of(name))


def both(block, release, given, **how):
    """Run upstream's forward and the lines, which give the same: what both gave to the layers, and the ops' calls."""
    calls, seen = [], []
    before = {name: value.clone() for name, value in given.items() if isinstance(value, torch.Tensor)}
    want = block(**given)
    seen.append([list(layer.calls) for layer in layers(block)])
    for layer in layers(block):
        layer.calls.clear()
    put(block, release, calls, **how)
    got = block(**given)
    seen.append([list(layer.calls) for layer in layers(block)])
    assert_equal(got, want)
    assert_equal([given[name] for name in before], list(before.values()))
    return seen, calls


def assert_same_layers(seen):
    want, got = seen
    assert [len(calls) for calls in got] == [len(calls) for calls in want]
    for one, other in zip(got, want, strict=True):
        for mine, upstreams in zip(one, other, strict=True):
            assert_equal(mine, upstreams)


def with_cross(calls, skipped):
    """The calls of a forward without some of the attentions between the streams: their norm is of the stream itself."""
    return calls[:-2] + [SINGLE if skip else MODULATED for skip in skipped]


# --- the lines


@each_release
@each_model
@pytest.mark.parametrize("skipped", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_the_ops_do_all_norms_with_upstreams_bits(release, adaln, skipped):
    block = block_of(upstream(release), adaln)
    given = given_to(block, skip_a2v_cross_attn=skipped[0], skip_v2a_cross_attn=skipped[1])
    seen, calls = both(block, release, given)
    assert_same_layers(seen)
    assert [len(one) for one in seen[0]] == [1] * 4 + [not skip for skip in skipped]
    assert calls == with_cross(LTX23 if adaln else LTX2, skipped)


@each_release
def test_the_ops_get_upstreams_eps_and_float16(release):
    block = block_of(upstream(release), dtype=torch.float16)
    seen, calls = both(block, release, given_to(block))
    assert_same_layers(seen)
    assert calls == LTX2


@each_release
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_of_some_clips_is_applied_as_upstream_does(release, name):
    block = block_of(upstream(release))
    mask = torch.tensor([1, 0.3], dtype=torch.bfloat16)[:, None, None]  # not 0 and 1: where it is rounded shows
    seen, calls = both(block, release, given_to(block, **{name: mask}))
    assert_same_layers(seen)
    assert calls == LTX2
    number = MASKS.index(name)
    assert not torch.equal(block(**given_to(block))[number], block(**given_to(block, **{name: mask}))[number])


@each_model
def test_the_prompts_keys_and_values_are_passed_on(adaln):
    """LTX-2.3 has none: its prompt changes in each step."""
    block = block_of(upstream(NEW), adaln)
    kept = SimpleNamespace(video="the video's", audio="the audio's")
    seen, calls = both(block, NEW, given_to(block, prompt_kv=kept))
    assert_same_layers(seen)
    passed = [layer.calls[0]["context_kv"] for layer in (block.attn2, block.audio_attn2)]
    assert passed == ([None] * 2 if adaln else [kept.video, kept.audio])
    assert calls == (LTX23 if adaln else LTX2)


def test_scales_of_upstreams_kernel_are_used(monkeypatch):
    """It runs on GPUs alone: here another function makes other values."""
    module = upstream(NEW)
    block = block_of(module, adaln=True)
    given = given_to(block)
    usual = block(**given)
    for layer in layers(block):
        layer.calls.clear()
    values, asked = counted(lambda table, *args: tuple(block.get_ada_values(table + 1, *args, slice(None))))
    monkeypatch.setattr(module, "_ltx2_try_fused_ada_values9", values)
    seen, calls = both(block, NEW, given)
    assert_same_layers(seen)
    assert calls == LTX23
    assert len(asked) == 2 * 2, "for both streams, by upstream and by the lines"
    assert not torch.equal(block(**given)[0], usual[0])


# --- what is upstream's


def per_token(name, value):
    """A row for each token of the stream."""
    return value.repeat(1, TOKENS["audio_" if "audio" in name else ""], 1)


@each_release
@each_model
@pytest.mark.parametrize("name", ROWS)
def test_a_row_for_each_token_is_upstreams(release, adaln, name):
    block = block_of(upstream(release), adaln)
    given = given_to(block)
    seen, calls = both(block, release, given | {name: per_token(name, given[name])})
    assert_same_layers(seen)
    assert calls == []


@each_release
@each_model
@pytest.mark.parametrize("name", [*ROWS, "audio_hidden_states"])
def test_two_dtypes_are_upstreams(release, adaln, name):
    block = block_of(upstream(release), adaln)
    given = given_to(block)
    for layer in block.modules():
        if isinstance(layer, torch.nn.Linear):  # as under autocast
            layer.forward = lambda x, one=layer: torch.nn.functional.linear(x.bfloat16(), one.weight, one.bias)
    seen, calls = both(block, release, given | {name: given[name].float()})
    assert_same_layers(seen)
    assert calls == []


@each_release
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("change", ["tokens", "float32", "one clip"])
def test_other_masks_are_upstreams(release, name, change):
    block = block_of(upstream(release))
    mask = torch.tensor([1, 0], dtype=torch.bfloat16)[:, None, None]
    mask = {"tokens": per_token("audio" if "v2a" in name else "", mask), "float32": mask.float(), "one clip": mask[:1]}
    block.ff.forward = block.audio_ff.forward = lambda x: x.bfloat16()
    seen, calls = both(block, release, given_to(block, **{name: mask[change]}))
    assert_same_layers(seen)
    assert calls == []


@each_release
def test_float32_is_upstreams(release):
    block = block_of(upstream(release), dtype=torch.float32)
    assert both(block, release, given_to(block))[1] == []


@each_release
@pytest.mark.parametrize("name", ["temb_prompt", "temb_audio_prompt"])
def test_a_missing_prompt_is_upstreams_error(release, name):
    block, calls = block_of(upstream(release), adaln=True), []
    put(block, release, calls)
    with pytest.raises(ValueError, match="requires prompt modulation"):
        block(**given_to(block, **{name: None}))
    assert calls == []


@each_release
def test_a_trace_of_torch_compile_is_upstreams(release, monkeypatch):
    block = block_of(upstream(release))
    given, calls = given_to(block), []
    want = block(**given)
    put(block, release, calls)
    answers = iter([False])  # what runs the lines asks first
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: next(answers, True))
    assert_equal(block(**given), want)
    assert calls == []
    assert next(answers, None) is None


@each_release
@each_model
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("how", ["absent", "refused"])
def test_without_an_op_upstreams_block_runs(release, adaln, op, how):
    block = block_of(upstream(release), adaln)
    options = {"ops": [one for one in OPS if one != op]} if how == "absent" else {"refused": (op,)}
    _, calls = both(block, release, given_to(block), **options)
    expected = LTX23 if adaln else LTX2
    reached = {grid.SINGLE: 0, grid.RESIDUAL: 2, grid.TWO: 3}[op]
    assert calls == expected[: reached + (how == "refused")]
    assert len(block.attn1.calls) == (1 if op == grid.SINGLE else 2)


def test_both_releases_have_all_ops():
    sites = sites_of(find_task("rounded_rmsnorm_modulate"))
    assert [(site.release, site.op) for site in sites] == [(release, op) for release in SITES for op in OPS]
    assert {site.class_ for site in sites} == {"LTX2TransformerBlock"}
