"""Kinds of steps of a language model: a prefill of one sequence, or a new token for each of several."""

from __future__ import annotations

from collections.abc import Sequence

from kda_judge.contract.strict_models import Count, Strict


class Phase(Strict):
    """Steps of one kind."""

    name: str
    """For example `prefill-4096` or `decode-b16-kv2048`."""
    batch: Count
    new_tokens: Count
    """New tokens of each sequence."""
    kv_tokens: Count
    """Tokens of each sequence, including the new ones."""


def phases(prefill: Sequence[int], decode: Sequence[int], kv: int) -> tuple[Phase, ...]:
    """A prefill phase for each number of tokens, then a decode phase for each number of sequences, of `kv` tokens."""
    first = [Phase(name=f"prefill-{new}", batch=1, new_tokens=new, kv_tokens=new) for new in prefill]
    then = [Phase(name=f"decode-b{n}-kv{kv}", batch=n, new_tokens=1, kv_tokens=kv) for n in decode]
    return (*first, *then)
