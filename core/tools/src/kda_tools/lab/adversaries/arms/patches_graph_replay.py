"""Replaces the replay of CUDA graphs with nothing.

Caught by: the output of the replays, on values that the capture did not see.
"""

import torch

torch.cuda.CUDAGraph.replay = lambda graph: None


def axpy(x, y, *, factor):
    return factor * x + y
