"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .ltx2_rotary import apply_ltx2_split_rotary_emb
from .rotary import apply_rotary_embedding

__all__ = ["apply_ltx2_split_rotary_emb", "apply_rotary_embedding", "launches", "why_not"]

launches, why_not = hooks(apply_rotary_embedding, apply_ltx2_split_rotary_emb)
