"""Both upstream releases give the solution's bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda_core.config import load_config
from kda_core.errors import MissingRequirement
from kda_core.upstream import cache_folder, fetch

TASK = Path(__file__).parents[1]
ROOT = TASK.parents[1]
CONFIG = load_config(TASK / "config.toml")
SCRIPT = "diffusion.k02_rotary_embedding.tests.against_upstream"


@pytest.mark.parametrize("arm", ["baseline", "upstream_latest"])
def test_same_bits_as_upstream(arm):
    """On a GPU both ops in every dtype; in the interpreter what `against_upstream` says."""
    pin = CONFIG.upstream[CONFIG.arms[arm].upstream]
    try:
        tree = fetch(pin, TASK / pin.files, cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    paths = os.pathsep.join(map(str, (ROOT / "core" / "src", ROOT)))
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", SCRIPT, CONFIG.arms[arm].module, str(tree), pin.version]
    env = {**os.environ, "PYTHONPATH": paths, **mode}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 18
