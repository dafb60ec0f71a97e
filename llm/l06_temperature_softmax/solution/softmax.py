"""Softmax of logits over temperatures: one launch with a cluster of blocks for each row, else two launches.

    p = exp(y - max(y)) / sum(exp(y - max(y))),   y = logits / temperatures        over a row, in float32

Source of the semantics: SGLang 0.5.23, `kernels/ops/sampling/__init__.py` (Apache-2.0); the code is our own.

Idea: a row of a vocabulary is 0.25 to 0.6 MB, and every probability waits for all of it. A cluster of blocks holds it
in registers, so that logits are read once and probabilities written once, in one launch (`cluster.py`). Other calls
take two launches of programs that share a row; the second launch reads the row again, from the L2 (`kernels.py`).
"""

import torch

from kda_runtime.checks import FLOATS, Expect, given, scattered, unfit
from kda_runtime.op import Op

from .kernels import parts_kernel
from .plans import Call, plan


def _check(call: Call, expect: Expect) -> None:
    """Refuse arguments that the op has no meaning for."""
    logits, temperatures = call
    if temperatures is not None:
        pairs = zip(reversed(logits.shape), reversed(temperatures.shape), strict=False)
        fits = all(a == b or 1 in (a, b) for a, b in pairs)
        expect(fits, "temperatures", f"a shape that broadcasts with {list(logits.shape)}", list(temperatures.shape))


def _uncovered(call: Call) -> str | None:
    """Why the kernels cannot take this call on any device, or None."""
    logits, temperatures = call
    if logits.dim() != 2:
        return f"logits has {logits.dim()} dimensions; the kernels take [rows, vocabulary]"
    result = logits.dtype
    if temperatures is not None:
        result = torch.result_type(logits, temperatures)
        one = temperatures.numel() == 1 and temperatures.dim() <= 2  # with more dimensions, the result has them, too
        if not one and list(temperatures.shape) != [logits.shape[0], 1]:
            return f"temperatures has shape {list(temperatures.shape)}; the kernels take one for every row, or one"
    if result != torch.float32:
        return f"the probabilities have dtype {result}; the kernels write float32"
    return scattered({"logits": logits}) or unfit(given(call), FLOATS)


def _plain(call: Call) -> torch.Tensor:
    """The same maths in PyTorch, for whatever the kernels do not cover."""
    logits, temperatures = call
    if temperatures is not None:
        logits = logits / temperatures
    return torch.softmax(logits.contiguous(), dim=-1)


def _like(call: Call) -> torch.Tensor:
    """A tensor of the result's shape and dtype, on the call's device."""
    logits, temperatures = call
    if temperatures is None:
        return logits
    shape = torch.broadcast_shapes(logits.shape, temperatures.shape)
    return logits.new_empty(shape, dtype=torch.result_type(logits, temperatures))


# --- public function

OP = Op(
    "softmax",
    Call,
    kernel=parts_kernel,
    plan=plan,
    plain=_plain,
    check=_check,
    uncovered=_uncovered,
    outputs=(_like,),
    contiguous=True,
)


@OP.public
def softmax(logits: torch.Tensor, temperatures: torch.Tensor | None = None) -> torch.Tensor:
    """Probabilities of the tokens of a vocabulary.

    Args:
        logits: [rows, vocabulary], float16, bfloat16 or float32; rows may lie apart.
        temperatures: [rows, 1], or one for all; None is 1. A negative one prefers small logits, 0 gives NaN.

    Returns:
        A new contiguous tensor of the dtype that logits / temperatures has: [rows, vocabulary].

    Other dtypes and shapes, and CPU tensors, take a plain PyTorch path: see `why_not`.

    Raises:
        ValueError: an argument has no meaning for the op; names it, what was expected and what came.
    """
    result: torch.Tensor = OP.call(logits, temperatures)
    return result
