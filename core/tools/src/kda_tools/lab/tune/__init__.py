"""`kda tune`: records a sweep over a solution's configurations, and writes the table that its dispatch reads."""

from kda_tools.lab.tune.sweep import Sweep

__all__ = ["Sweep"]
