"""Both upstream releases give the solution's bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kda_judge.arms.upstream import cache_folder, fetch
from kda_judge.contract.config import load_config
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import checkout_root

TASK = Path(__file__).parents[1]
CONFIG = load_config(TASK / "config.toml")
SCRIPT = """
import sys
from pathlib import Path
from kda_judge.contract.task_import import import_from
task, *arguments = sys.argv[1:]
import_from(Path(task), "tests.against_upstream").main(*arguments)
"""


@pytest.mark.parametrize("arm", ["baseline", "upstream_latest"])
def test_same_bits_as_upstream(arm):
    """On a GPU both ops in every dtype; in the interpreter what `against_upstream` says."""
    pin = CONFIG.upstream[CONFIG.arms[arm].upstream]
    try:
        tree = fetch(pin, TASK / pin.files, cache_folder(checkout_root()))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", SCRIPT, str(TASK), CONFIG.arms[arm].module, str(tree), pin.version]
    env = {**os.environ, "PYTHONPATH": import_path(), **mode}
    ran = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) >= 18
