"""The float64 oracle and the contract of a row. Bytes: logits and temperatures are read once, probabilities written."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload


def softmax(logits: torch.Tensor, temperatures: torch.Tensor | None = None) -> tuple[torch.Tensor]:
    """Probabilities of every row, [rows, vocabulary] float64."""
    wide = logits.double()
    return ((wide if temperatures is None else wide / temperatures.double()).softmax(dim=-1),)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    logits, temperatures = workload.inputs["logits"], workload.inputs.get("temperatures")
    expect(len(logits.shape) == 2, "logits", "two dimensions [rows, vocabulary]", list(logits.shape))
    allowed = ("float32", "bfloat16", "float16") if temperatures else ("float32",)
    expect(logits.dtype in allowed, "logits", f"dtype {' or '.join(allowed)}", logits.dtype)
    if temperatures is not None:
        shapes = [(logits.shape[0], 1), (1, 1), (1,)]
        expect(temperatures.shape in shapes, "temperatures", f"one of the shapes {shapes}", temperatures.shape)
        expect(temperatures.dtype == "float32", "temperatures", "dtype float32", temperatures.dtype)
        positive = temperatures.fill == "scale" or (temperatures.fill == "randint" and temperatures.low > 0)
        expect(positive, "temperatures", "fill = 'scale', or 'randint' with `low` above 0", temperatures.fill)
    out = workload.outputs["p"]
    expect(out.shape == logits.shape, "p", f"shape {list(logits.shape)}, as logits", list(out.shape))
    expect(out.dtype == "float32", "p", "dtype float32", out.dtype)
