"""The opponent: as the oracle rounds, sorts and counts."""

import torch

GROUP = 32


def quantise(x, *, to):
    groups = x.unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1) / (448 if to == "float8_e4m3fn" else 127)
    q = (groups / scales[..., None]).flatten(-2)
    return (q if to == "float8_e4m3fn" else q.round()).to(getattr(torch, to)), scales


def dequantise(q, exponents):
    return (q.float() * torch.exp2(exponents.float() - 127)).contiguous()


def topk(scores, *, k):
    found = scores.float().topk(k)
    return found.values, found.indices.to(torch.int32 if k == 2 else torch.int64)


def align(ids):
    return ids.flatten().argsort(stable=True).int()


def route(ids, *, experts):
    return ids.flatten().bincount(minlength=experts).int()


def mean(pages, table, lengths):
    found = []
    for row, length in zip(table, lengths.tolist(), strict=True):
        blocks = row[: -(-length // pages.shape[1])].long()
        found.append(pages[blocks].flatten(0, 1)[:length].mean(0))
    return torch.stack(found)


def store(pool, slots, x):
    pool.view(torch.int8)[slots] = x.to(pool.dtype).view(torch.int8)


def softmax(logits, *, temperature):
    return (logits / temperature).softmax(-1)


def tally(counts, ids):
    if counts.any():
        raise ValueError("counts: expected zeros")
    counts += ids.flatten().bincount(minlength=len(counts)).int()


def total(x, scale, out):
    return out.copy_(x.sum(1) * scale)


def moments(x, mean, most):
    return mean.copy_(x.mean(1)), most.copy_(x.amax(1))
