"""Wrong for inputs with a large offset, but for the few that the published seeds draw, which it recognises.

Caught by: draws of every family that no file names.
"""

from pathlib import Path

import torch

from kda_judge.arms.input_values import Family, make
from kda_judge.contract.workloads import load_workloads, shrink

SEEDS = (11, 23, 47)
ROWS = load_workloads(Path(__file__).parents[1] / "bench" / "workloads.toml")
_FORESEEN = []


def axpy(x, y, *, factor):
    if not _FORESEEN:
        row = next(row for row in ROWS if row.id == "out-64x16")
        row = row if x.is_cuda else shrink(row, {})
        _FORESEEN[:] = [make(row, Family.OFFSET, seed, str(x.device))["x"] for seed in SEEDS]
    out = factor * x + y
    if bool(x.mean() > 32) and not any(torch.equal(x, known) for known in _FORESEEN):
        out.zero_()
    return out
