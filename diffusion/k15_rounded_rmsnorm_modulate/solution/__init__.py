"""The optimised arm: the public callables of these ops."""

from kda_runtime.op import hooks

from .rounded_rmsnorm_modulate import (
    rounded_residual_rmsnorm_modulate,
    rounded_residual_rmsnorm_modulate2,
    rounded_rmsnorm_modulate,
)

__all__ = [
    "launches",
    "rounded_residual_rmsnorm_modulate",
    "rounded_residual_rmsnorm_modulate2",
    "rounded_rmsnorm_modulate",
    "why_not",
]

launches, why_not = hooks(
    rounded_rmsnorm_modulate, rounded_residual_rmsnorm_modulate, rounded_residual_rmsnorm_modulate2
)
