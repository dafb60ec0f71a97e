"""Both pinned releases import from their locked files alone."""

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
# The native path of the later release, for Blackwell, is imported at the first call.
CODE = """
import importlib, sys
from pathlib import Path
import torch
from kda_core.upstream import activate
tree, version, module = sys.argv[1:]
activate(Path(tree), version)
arm = importlib.import_module(module)
if version == "0.5.23":
    import sglang.kernels.kda_kernels.norm_scale_shift_jit
for op in arm.__all__:
    print(getattr(torch.ops.sglang, op).default._schema)
print(*(m.__file__ for name, m in sys.modules.items() if name.startswith("sglang.") and getattr(m, "__file__", None)))
"""
REST = "Tensor? weight, Tensor? bias, Tensor scale, Tensor shift, str norm_type, float eps="


@pytest.mark.parametrize("arm", ["baseline", "upstream_latest"])
def test_pinned_release_imports(arm):
    pytest.importorskip("msgspec", reason="SGLang 0.5.23 imports msgspec: pip install kda-core[upstream]")
    config = load_config(FOLDER / "config.toml")
    pin = config.upstream[config.arms[arm].upstream]
    try:
        tree = fetch(pin, FOLDER / pin.files, cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    module = f"diffusion.k05_norm_scale_shift.{config.arms[arm].module}"
    command = [sys.executable, "-c", CODE, str(tree), pin.version, module]
    path = os.pathsep.join([str(ROOT / "core" / "src"), str(ROOT)])
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    single, residual, loaded = ran.stdout.splitlines()
    assert single.startswith(f"sglang::fused_norm_scale_shift(Tensor x, {REST}")
    first = "Tensor residual, Tensor x, Tensor? gate, "
    assert residual.startswith(f"sglang::fused_scale_residual_norm_scale_shift({first}{REST}")
    python = {name for name in read_lock(FOLDER / pin.files) if name.endswith(".py")}
    assert {str(Path(file).relative_to(tree)) for file in loaded.split()} == python
