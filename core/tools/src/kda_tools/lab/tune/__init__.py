"""`kda tune`: a recorded sweep over a solution's configurations writes the table that its dispatch reads."""

from kda_tools.lab.tune.sweep import Sweep

__all__ = ["Sweep"]
