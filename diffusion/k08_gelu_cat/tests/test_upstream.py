"""The baseline is what the pinned models run: their source says so, in a single-stream block's `forward`.

There the op is no function of its own but two statements, a GELU module and `torch.cat` of the attention's columns and
what it returns.
"""

import ast
import zipfile

import pytest

from kda_judge.arms.upstream import cache_folder, obtain
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.tasks import checkout_root
from kda_tools.models.known_models import load_models

DITS = "sglang/multimodal_gen/runtime/models/dits/"
SITES = [
    ("0.5.12.post1", "hunyuanvideo.py", "MMSingleStreamBlock", "mlp_act"),
    ("0.5.12.post1", "flux.py", "FluxSingleTransformerBlock", "act_mlp"),
    ("0.5.23", "hunyuanvideo.py", "MMSingleStreamBlock", "mlp_act"),
    ("0.5.23", "flux.py", "FluxSingleTransformerBlock", "act_mlp"),
]
