"""The pinned release imports from its locked files alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kda_core.config import load_config
from kda_core.errors import MissingRequirement
from kda_core.upstream import cache_folder, fetch, read_lock

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
FOLDER = Path(__file__).parents[1]
ROOT = FOLDER.parents[1]
CODE = """
import importlib, sys
from pathlib import Path
import torch
from kda_core.upstream import activate
tree, version, module = sys.argv[1:]
activate(Path(tree), version)
arm = importlib.import_module(module)
for op in arm.__all__:
    print(getattr(torch.ops.sglang, op).default._schema)
print(*(m.__file__ for name, m in sys.modules.items() if name.startswith("sglang.") and getattr(m, "__file__", None)))
"""
FIRST = "Tensor x, Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, "
SECOND = "Tensor? weight2, Tensor? bias2, Tensor scale2, "


def test_pinned_release_imports():
    config = load_config(FOLDER / "config.toml")
    arm = config.arms["baseline"]
    pin = config.upstream[arm.upstream]
    try:
        tree = fetch(pin, FOLDER / pin.files, cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    command = [sys.executable, "-c", CODE, str(tree), pin.version, f"diffusion.k04_norm_tanh_mul_add.{arm.module}"]
    path = os.pathsep.join([str(ROOT / "core" / "src"), str(ROOT)])
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    single, double, loaded = ran.stdout.splitlines()
    assert single.startswith(f"sglang::fused_norm_tanh_mul_add({FIRST}str norm_type, float eps=")
    assert double.startswith(f"sglang::fused_norm_tanh_mul_add_norm_scale({FIRST}{SECOND}str norm_type, float eps=")
    assert {str(Path(file).relative_to(tree)) for file in loaded.split()} == set(read_lock(FOLDER / pin.files))
