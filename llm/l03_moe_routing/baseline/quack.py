"""QuACK's top-k with softmax, 0.6.5; import after `kda_judge.arms.upstream.activate`."""

import torch
from quack.topk import _topk_fwd

__all__ = ["topk_softmax"]


def topk_softmax(
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    gating_output: torch.Tensor,
    renormalize: bool = False,
    moe_softcapping: float = 0.0,
    correction_bias: torch.Tensor | None = None,
) -> None:
    """Softmax of the k largest logits alone, as with `renormalize`. Weights have the logits' dtype: float32."""
    if not renormalize or moe_softcapping or correction_bias is not None:
        raise ValueError("topk_softmax: QuACK's weights are renormalised, without a cap or a bias")
    _topk_fwd(gating_output.float(), topk_ids.shape[1], True, topk_weights, topk_ids)
