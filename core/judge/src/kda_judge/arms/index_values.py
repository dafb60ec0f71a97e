"""Seeded indices with the structure that they have in use: slots, block tables, ids of experts.

All functions return int64 tensors; the same generator state gives the same values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from kda_judge.contract.tensor_spec import TensorSpec


def slots(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Places below `high` in any order, none twice in the whole tensor: where a step's tokens go in a cache."""
    import torch

    assert spec.high is not None
    order = torch.randperm(spec.high, generator=generator, device=generator.device)
    return order[: math.prod(spec.shape)].reshape(spec.shape)


def block_table(spec: TensorSpec, lengths: torch.Tensor | None, generator: torch.Generator) -> torch.Tensor:
    """[sequences, blocks]: where the blocks of each sequence lie; 0 behind the last one, as serving engines leave it.

    No two sequences share a block. Without `lengths` every sequence has all its blocks.
    """
    import torch

    table = slots(spec, generator)
    if lengths is None:
        return table
    used = (lengths.long() + spec.block - 1) // spec.block  # [sequences]
    return table * (torch.arange(spec.shape[1], device=table.device) < used[:, None])


def expert_ids(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """[..., k]: k different experts for every token, drawn one after the other in proportion to their popularity.

    Which expert is popular is drawn too, unless `counts` say it.
    """
    import torch

    assert spec.high is not None
    device = generator.device
    if spec.counts is not None:
        popularity = torch.tensor(spec.counts, dtype=torch.float32, device=device)
    else:
        rank = torch.randperm(spec.high, generator=generator, device=device) + 1
        popularity = rank.float() ** -spec.skew
    tokens, chosen = math.prod(spec.shape[:-1]), spec.shape[-1] if spec.shape else 1
    # Of independent exponential times with these rates, the first k are such a draw without repeats.
    waits = torch.empty(tokens, spec.high, device=device).exponential_(generator=generator) / popularity
    return waits.topk(chosen, largest=False).indices.reshape(spec.shape)
