"""The good arm: right, and other than the oracle in every way that the rules allow."""

import torch

from ..baseline import GROUP, dequantise, mean, moments, route, softmax, store, tally, total

__all__ = ["align", "dequantise", "mean", "moments", "quantise", "route", "softmax", "store", "tally", "topk", "total"]


def quantise(x, *, to):
    """The scale is one number further than it need be."""
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / (448 if to == "float8_e4m3fn" else 127)
    further = scales.nextafter(torch.full_like(scales, torch.inf))
    q = (groups / further[..., None]).flatten(-2)
    return (q if to == "float8_e4m3fn" else q.round()).to(getattr(torch, to)), further


def topk(scores, *, k):
    """The last of equal scores first."""
    order = torch.sort(scores.flip(-1).float(), descending=True, stable=True).indices[..., :k]
    ids = scores.shape[-1] - 1 - order
    return scores.gather(-1, ids).float(), ids.to(torch.int32 if k == 2 else torch.int64)


def align(ids):
    """The last of an expert's tokens first."""
    count = ids.numel()
    return (count - 1 - ids.flatten().flip(0).argsort(stable=True)).int()
