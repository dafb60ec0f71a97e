"""Compares the solution with one upstream release bit by bit; `test_upstream.py` starts it in a process of its own.

Only layouts that upstream reads rightly: x that it can view as [batch * tokens, ...] (LTX2: contiguous) and stride 1 in
every last dimension. On a CPU, in Triton's interpreter, only LTX2 in float16 and float32 can be compared: upstream's
other op is PyTorch there, and the interpreter multiplies bfloat16 as integers.
"""

import sys
from pathlib import Path

import torch
from triton.runtime.interpreter import InterpreterBuilder

from kda_judge.arms.triton_interpreter import convert_as_a_gpu_does
from kda_judge.arms.upstream import activate
from kda_judge.contract.task_import import import_from

from .cases import halves, pairs, same_bits

TASK = Path(__file__).parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def calls():
    """Op, tensors, scalars."""
    dtypes = [torch.float16, torch.float32] + [torch.bfloat16] * (DEVICE == "cuda")
    for dtype in dtypes:
        for shape in ((2, 9, 32, 32), (1, 7, 32, 64), (2, 5, 3, 20)):
            batch, tokens, heads, half = shape
            for view in (True, False):
                for table in {dtype, torch.float32}:
                    yield "apply_ltx2_split_rotary_emb", halves(batch, tokens, heads, half, dtype, table, view), {}
    if DEVICE == "cpu":
        return
    for dtype in dtypes:
        for shape in ((9, 24, 128), (2, 9, 3, 64), (1, 5, 33, 96)):
            for columns, interleaved in ((None, False), (shape[-1], True), (shape[-1], False)):
                for packed in (False, True):
                    tensors = pairs(shape, dtype, columns=columns, rows=12, packed=packed)
                    yield "apply_rotary_embedding", tensors, {"interleaved": interleaved}


def main(arm, tree, version):
    """Print how many calls agree; exit with the first that does not."""
    if DEVICE == "cpu":
        # A GPU's compiler makes one fused multiply-add of upstream's product and sum. The interpreter rounds both,
        # so `tl.fma` has to round both, too, to be compared there.
        rounds_twice = InterpreterBuilder.create_fma
        convert_as_a_gpu_does()
        InterpreterBuilder.create_fma = rounds_twice
    activate(Path(tree), version)
    upstream, solution = import_from(TASK, arm), import_from(TASK, "solution")
    compared = 0
    for op, tensors, scalars in calls():
        x, cos, sin = (tensor.to(DEVICE) for tensor in tensors)
        # Results that are zero, of either sign.
        x[..., :2] = 0
        x[..., 2:4] = -0.0
        assert solution.why_not(op, x, cos, sin, **scalars) is None
        ours, theirs = (getattr(side, op)(x, cos, sin, **scalars) for side in (solution, upstream))
        if not same_bits(ours, theirs) or ours.stride() != theirs.stride():
            sys.exit(f"{op} {list(x.shape)} {x.dtype} {cos.dtype} {scalars}: {(ours != theirs).sum()} elements differ")
        compared += 1
    print(compared)
