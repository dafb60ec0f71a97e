"""What the models of both pinned releases run: two kernels of PyTorch's own, a module for the GELU, and `torch.cat`.

It stands in the single-stream blocks: SGLang 0.5.12.post1's hunyuanvideo.py and flux.py, 0.5.23's hunyuanvideo.py and
hunyuan3d.py, and its flux.py with quality `exact`. There is nothing of SGLang's to import: `tests/test_upstream.py`
reads the pinned files and compares.
"""

import torch

__all__ = ["fused_gelu_tanh_cat"]

ACTIVATION = torch.nn.GELU(approximate="tanh")


def fused_gelu_tanh_cat(attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
    """The columns of attn, then the GELU of the columns of mlp."""
    return torch.cat((attn, ACTIVATION(mlp)), dim=-1)
