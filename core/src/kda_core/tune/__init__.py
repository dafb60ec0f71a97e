"""`kda tune`: a recorded sweep over a solution's configurations writes the table that its dispatch reads."""

from kda_core.tune.sweep import Sweep

__all__ = ["Sweep"]
