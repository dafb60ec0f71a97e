"""The optimised arm: public callables with exactly the upstream signatures."""

from kda_runtime.op import hooks

from .qknorm_rope_kv_store import fused_inplace_qknorm_rope_kv_store

__all__ = ["fused_inplace_qknorm_rope_kv_store", "launches", "why_not"]

launches, why_not = hooks(fused_inplace_qknorm_rope_kv_store)
