"""Inputs for this task's tests."""

import torch

from ..bench import reference


def make(rows=3, vocabulary=1000, dtype=torch.float32, device="cpu"):
    """Logits of a few nats and a temperature for every row."""
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    temperatures = torch.rand(rows, 1, generator=generator) + 0.3
    return [logits.to(device, dtype), temperatures.to(device)]


def assert_matches(got, logits, temperatures):
    """The oracle's probabilities to some ten roundings of float32, which sum to one."""
    (want,) = reference.softmax(logits, temperatures)
    assert got.is_contiguous()
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=1e-7, rtol=1e-5)
    torch.testing.assert_close(got.double().sum(-1), torch.ones_like(want[..., 0]), atol=1e-5, rtol=0)
