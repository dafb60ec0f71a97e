"""Both pinned releases import from their locked files alone; they ask for a GPU's properties while they do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kda_core.config import load_config
from kda_core.errors import MissingRequirement
from kda_core.upstream import cache_folder, fetch, read_lock

FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
# Without a GPU one is feigned: the modules choose their Triton path at import, and read the warp size.
CODE = """
import importlib, sys, types
from pathlib import Path
import torch
if not torch.cuda.is_available():
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(warp_size=32)
    torch.get_device_module = lambda *_: torch.cuda
from kda_core.upstream import activate
tree, version, module = sys.argv[1:]
activate(Path(tree), version)
arm = importlib.import_module(module)
print(arm.triton_group_norm_silu.__module__, arm.apply_group_norm_silu.__module__)
print(torch.ops.sglang.triton_group_norm_silu_cuda.default._schema)
print(*(m.__file__ for name, m in sys.modules.items() if name.startswith("sglang.") and getattr(m, "__file__", None)))
"""


@pytest.mark.parametrize(
    ("release", "arm", "sources"),
    [
        (
            "sglang-0.5.12.post1",
            "baseline",
            ("sglang.jit_kernel.diffusion.triton.group_norm_silu", "sglang.jit_kernel.diffusion.group_norm_silu"),
        ),
        (
            "sglang-0.5.23",
            "upstream_latest",
            (
                "sglang.kernels.ops.diffusion.norm.group_norm_silu_triton",
                "sglang.kernels.ops.diffusion.norm.group_norm_silu",
            ),
        ),
    ],
)
def test_pinned_release_imports(release, arm, sources):
    config = load_config(FOLDER / "config.toml")
    pin, files = config.upstream[release], FOLDER / config.upstream[release].files
    try:
        tree = fetch(pin, files, cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    command = [sys.executable, "-c", CODE, str(tree), pin.version]
    command.append(f"diffusion.k07_group_norm_silu.{config.arms[arm].module}")
    path = os.pathsep.join([str(ROOT / "core" / "src"), str(ROOT)])
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    modules, schema, loaded = ran.stdout.splitlines()
    assert tuple(modules.split()) == sources
    assert schema.startswith(
        "sglang::triton_group_norm_silu_cuda(Tensor x, Tensor weight, Tensor bias, SymInt num_groups"
    )
    assert {str(Path(file).relative_to(tree)) for file in loaded.split()} == set(read_lock(files))
