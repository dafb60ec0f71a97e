"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .qkv_pack import qkv_norm_rope_pack

__all__ = ["launches", "qkv_norm_rope_pack", "why_not"]

launches, why_not = hooks(qkv_norm_rope_pack)
