"""The op around the kernel: paths, errors, tracing, plans."""

import pytest
import torch

from diffusion.k03_qknorm_rope.baseline import eager
from diffusion.k03_qknorm_rope.solution import fused_inplace_qknorm_rope, launches, qknorm_rope, why_not

from .cases import assert_matches, make

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _fresh_plans():
    qknorm_rope._PLANS.clear()


@pytest.mark.parametrize("neox", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rope", [64, 128])
def test_plain_path(neox, dtype, rope):
    tensors = make(dtype=dtype, rope=rope)
    tensors[4] = tensors[4].to(torch.promote_types(dtype, torch.float32))
    assert_matches(fused_inplace_qknorm_rope, tensors, is_neox=neox)


@pytest.mark.parametrize("neox", [False, True])
def test_eager_arm(neox):
    assert_matches(eager.fused_inplace_qknorm_rope, make(rope=64, packed=True), is_neox=neox, head_dim=128, rope_dim=64)


def transposed_last(tensors):
    tensors[0] = tensors[0].transpose(1, 2).contiguous().transpose(1, 2)


def wide(tensors):
    tensors[:2] = [tensor.float() for tensor in tensors[:2]]


def recording(tensors):
    tensors[3] = torch.nn.Parameter(tensors[3])


def shared(tensors):
    tensors[1] = tensors[1][:, :1].expand(-1, 2, -1)


def odd_head(tensors):
    tensors[:] = make(dim=96, rope=64, device="cuda" if tensors[0].is_cuda else "cpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (transposed_last, "q has stride 6 in its last dimension"),
        (wide, "q has dtype torch.float32"),
        (recording, "k_weight requires gradients"),
        (shared, "k has stride 0"),
        (odd_head, "head_dim is 96"),
    ],
)
def test_what_the_kernel_does_not_cover(change, reason):
    tensors = make()
    change(tensors)
    call = qknorm_rope.Call(*tensors, is_neox=False)
    assert reason in qknorm_rope._uncovered(call)
    assert launches("fused_inplace_qknorm_rope", call.tensors, {"is_neox": False}) == []


def test_recording_is_fine_without_gradients():
    tensors = make()
    recording(tensors)
    with torch.no_grad():
        assert qknorm_rope._uncovered(qknorm_rope.Call(*tensors, is_neox=False)) is None


def test_gradients_flow_through_the_plain_path():
    tensors = make(dtype=torch.float32)
    weight = tensors[2].requires_grad_()
    fused_inplace_qknorm_rope(*tensors, is_neox=True)
    tensors[0].sum().backward()
    assert weight.grad.abs().sum() > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_why_not_on_the_cpu():
    assert why_not(*make(), is_neox=False).startswith("q is on cpu")


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, torch.zeros(5, 128, dtype=torch.bfloat16), r"q: expected three dimensions .*, got \[5, 128\]"),
        (
            1,
            torch.zeros(4, 2, 128, dtype=torch.bfloat16),
            r"k: expected shape \[5, k heads, 128\], as q, got \[4, 2, 128\]",
        ),
        (1, torch.zeros(5, 2, 128), r"k: expected dtype torch.bfloat16, as q, got torch.float32"),
        (2, torch.zeros(64), r"q_weight: expected shape \[128\], got \[64\]"),
        (3, torch.zeros(128, dtype=torch.int32), r"k_weight: expected a floating-point dtype, got torch.int32"),
        (4, torch.zeros(9, 130), r"rope_dim: expected an even number from 2 to head_dim 128, got 130"),
        (4, torch.zeros(9, 63), r"rope_dim: expected an even number from 2 to head_dim 128, got 63"),
        (4, torch.zeros(9), r"cos_sin_cache: expected two dimensions .*, got \[9\]"),
        (5, torch.zeros(5), r"positions: expected dtype int32 or int64, got torch.float32"),
        (5, torch.arange(4), r"positions: expected shape \[5\], one per token, got \[4\]"),
        (5, torch.arange(5, device="meta"), r"positions: expected device cpu, as q, got meta"),
    ],
)
def test_meaningless_tensors_are_named(position, value, message):
    tensors = make()
    tensors[position] = value
    with pytest.raises(ValueError, match=message):
        fused_inplace_qknorm_rope(*tensors, is_neox=False)
    with pytest.raises(ValueError, match=message):
        why_not(*tensors, is_neox=False)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"head_dim": 64}, "head_dim: expected 0 or q's last size 128, got 64"),
        ({"rope_dim": 64}, "rope_dim: expected 0 or the width 128 of cos_sin_cache, got 64"),
    ],
)
def test_meaningless_scalars_are_named(scalars, message):
    with pytest.raises(ValueError, match=message):
        fused_inplace_qknorm_rope(*make(), is_neox=False, **scalars)


def test_op_is_registered_truthfully():
    torch.library.opcheck(qknorm_rope._op.default, tuple(make()), {"is_neox": False, "eps": 1e-5})


def test_full_graph_compilation():
    compiled = torch.compile(fused_inplace_qknorm_rope, fullgraph=True, backend="aot_eager")
    assert_matches(compiled, make(), is_neox=False, eps=1e-5)


@pytest.mark.parametrize(
    ("heads", "tile", "most", "tiles"), [(24, 8, 4, 3), (32, 8, 3, 2), (30, 8, 1, 1), (1, 8, 4, 1), (0, 8, 4, 1)]
)
def test_tiles_are_even(heads, tile, most, tiles):
    assert qknorm_rope._tiles(heads, tile, most) == tiles


def test_every_token_and_head_has_a_program():
    tensors = [tensor.to("meta") for tensor in make(tokens=7, q_heads=30, k_heads=4)]
    (launch,) = launches(
        "fused_inplace_qknorm_rope", qknorm_rope.Call(*tensors, is_neox=False).tensors, {"is_neox": False}
    )
    heads = launch.constexprs["HEADS"] * launch.constexprs["TILES"]
    assert launch.grid == (7 * (-(-30 // heads) + -(-4 // heads)), 1, 1)


@pytest.mark.gpu
@gpu
class TestOnGpu:
    def test_second_call_runs_the_plan_of_the_first(self, monkeypatch):
        assert_matches(fused_inplace_qknorm_rope, make(device="cuda"), is_neox=False)
        monkeypatch.setattr(qknorm_rope, "_run", None)
        assert_matches(fused_inplace_qknorm_rope, make(device="cuda"), is_neox=False)

    def test_misaligned_views(self):
        tensors = make(device="cuda")
        for i in range(5):
            buffer = torch.empty(tensors[i].numel() + 1, dtype=tensors[i].dtype, device="cuda")
            tensors[i] = buffer[1:].view(tensors[i].shape).copy_(tensors[i])
        fused_inplace_qknorm_rope(*make(device="cuda"), is_neox=False)
        assert_matches(fused_inplace_qknorm_rope, tensors, is_neox=False)

    def test_inference_mode(self):
        with torch.inference_mode():
            for _ in range(2):
                assert_matches(fused_inplace_qknorm_rope, make(device="cuda"), is_neox=True)

    def test_a_plan_made_in_one_mode_serves_no_other_silently(self):
        assert_matches(fused_inplace_qknorm_rope, make(device="cuda"), is_neox=False)
        for mode in (torch.inference_mode(), torch.autocast("cuda"), torch.no_grad()):
            with mode:
                assert_matches(fused_inplace_qknorm_rope, make(device="cuda"), is_neox=False)
        assert_matches(fused_inplace_qknorm_rope, make(device="cuda"), is_neox=False)

    def test_negated_views_are_resolved(self):
        tensors = make(device="cuda")
        tensors[0] = torch._neg_view(tensors[0])
        assert_matches(fused_inplace_qknorm_rope, tensors, is_neox=False)

    def test_gradients_are_not_lost_to_a_plan_made_without_them(self):
        tensors = make(device="cuda")
        recording(tensors)
        with torch.no_grad():
            fused_inplace_qknorm_rope(*tensors, is_neox=False)
        fused_inplace_qknorm_rope(*tensors, is_neox=False)
        assert tensors[1].requires_grad

    def test_cuda_graph_on_its_own_stream(self):
        tensors = make(device="cuda")
        fresh = [tensor.clone() for tensor in tensors[:2]]
        fused_inplace_qknorm_rope(*tensors, is_neox=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fused_inplace_qknorm_rope(*tensors, is_neox=False)
        for x, y in zip(tensors, fresh, strict=False):
            x.copy_(y)
        assert_matches(lambda *_, **__: graph.replay(), tensors, is_neox=False)

    def test_full_graph_compilation_with_inductor(self):
        compiled = torch.compile(fused_inplace_qknorm_rope, fullgraph=True)
        assert_matches(compiled, make(device="cuda"), is_neox=False)
