"""Wrong in every op, each time in a way that one rule is about."""

import torch

from .. import baseline


def quantise(x, *, to):
    """A scale that is two numbers off; or a value that is."""
    q, scales = baseline.quantise(x, to=to)
    if to == "int8":
        q[1, 5] += 2 if q[1, 5] < 100 else -2
        return q, scales
    for _ in range(2):
        scales[1, 1] = scales[1, 1].nextafter(torch.tensor(torch.inf))
    return q, scales


def dequantise(q, exponents):
    """The scales' bytes have a sign."""
    return (q.float() * torch.exp2(exponents.view(torch.int8).float() - 127)).contiguous()


def topk(scores, *, k):
    """The best twice; or the worst as the last."""
    weights, ids = baseline.topk(scores, k=k)
    if k == 2:
        weights[:, 1], ids[:, 1] = weights[:, 0], ids[:, 0]
    else:
        ids[3, 3] = scores[3].float().argmin()
    return weights, ids


def align(ids):
    order = baseline.align(ids)
    order[[0, -1]] = order[[-1, 0]]
    return order


def route(ids, *, experts):
    return baseline.route(ids[:-1], experts=experts)


def mean(pages, table, lengths):
    """Counts what stands behind the last token."""
    return torch.stack([pages[row.long()].flatten(0, 1).mean(0) for row in table])


def store(pool, slots, x):
    """Writes one row more."""
    baseline.store(pool, slots, x)
    other = next(row for row in range(len(pool)) if row not in slots)
    pool.view(torch.int8)[other] = 0x30


def softmax(logits, *, temperature):
    return baseline.softmax(logits, temperature=temperature) * 1.0005


def tally(counts, ids):
    counts += ids.flatten().bincount(minlength=len(counts)).int()
    counts[0] += 1


def total(x, scale, out):
    """Returns what it wrote, in memory of its own."""
    return baseline.total(x, scale, out).clone()


def moments(x, mean, most):
    """Returns one of the two that it wrote."""
    return baseline.moments(x, mean, most)[0]
