"""The two upstream releases: they import as locked, and give the solution's bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kda_core.config import load_config
from kda_core.errors import MissingRequirement
from kda_core.upstream import cache_folder, fetch, lock, read_lock

TASK = Path(__file__).parents[1]
ROOT = TASK.parents[1]
CONFIG = load_config(TASK / "config.toml")
ARMS = ["baseline", "upstream_latest"]


def pinned(arm):
    """Module, pin and verified files of an upstream arm."""
    pin = CONFIG.upstream[CONFIG.arms[arm].upstream]
    try:
        tree = fetch(pin, TASK / pin.files, cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    return CONFIG.arms[arm].module, pin, tree


def run(*command, **environment):
    paths = os.pathsep.join(map(str, (ROOT / "core" / "src", ROOT)))
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    ran = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("arm", ARMS)
def test_pinned_release_imports(arm):
    module, pin, tree = pinned(arm)
    out = run(
        "-c",
        "import importlib, sys\nfrom pathlib import Path\nfrom kda_core.upstream import activate\n"
        f"activate(Path({str(tree)!r}), {pin.version!r})\n"
        f"arm = importlib.import_module('diffusion.k02_rotary_embedding.{module}')\n"
        "print(callable(arm.apply_rotary_embedding), arm.apply_ltx2_split_rotary_emb.__module__)\n"
        "loaded = [module for name, module in sys.modules.items() if name.startswith('sglang.')]\n"
        "print(*(module.__file__ for module in loaded if getattr(module, '__file__', None)))",
    )
    found, loaded = out.splitlines()
    assert found.startswith("True sglang.")
    # The PyTorch fallback is loaded on machines without a GPU only, and by the later release when first called.
    listed = {str(tree / name) for name in read_lock(TASK / pin.files)}
    assert {path for path in listed if "fallback" not in path} <= set(loaded.split()) <= listed


@pytest.mark.parametrize("arm", ARMS)
def test_committed_lock_is_what_the_wheel_holds(arm):
    pin = CONFIG.upstream[CONFIG.arms[arm].upstream]
    wheel = cache_folder(ROOT) / "wheels" / pin.wheel
    if not wheel.is_file():
        pytest.skip(f"{pin.wheel} is not in the cache; `kda fetch` brings it")
    assert (TASK / pin.files).read_text() == lock(wheel, read_lock(TASK / pin.files))


@pytest.mark.parametrize("arm", ARMS)
def test_same_bits_as_upstream(arm):
    """On a GPU both ops in every dtype; in the interpreter what `against_upstream` says."""
    import torch

    module, pin, tree = pinned(arm)
    script = "diffusion.k02_rotary_embedding.tests.against_upstream"
    mode = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert int(run("-m", script, module, str(tree), pin.version, **mode)) >= 18
