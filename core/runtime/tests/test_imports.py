"""What importing the runtime costs: its own modules and a little of the standard library, beyond torch and triton."""

import json
import subprocess
import sys
from pathlib import Path

import kda_runtime

FOLDER = Path(kda_runtime.__file__).parent
MODULES = sorted(f"kda_runtime.{path.stem}" for path in FOLDER.glob("*.py") if path.stem != "__init__")
CODE = f"""
import importlib, json, sys
import torch, triton, triton.language
before = set(sys.modules)
for name in {MODULES}:
    importlib.import_module(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
MOST_OF_THE_STANDARD_LIBRARY = 10
TOML_BEFORE_3_11 = {"tomli"} if sys.version_info < (3, 11) else set()


def test_it_loads_itself_and_little_else():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    loaded = json.loads(ran.stdout)
    own = [name for name in loaded if name.partition(".")[0] == "kda_runtime"]
    tops = {name.partition(".")[0] for name in loaded} - {"kda_runtime", "torch", "triton"} - TOML_BEFORE_3_11
    assert sorted(own) == ["kda_runtime", *MODULES]
    assert tops <= sys.stdlib_module_names, "nothing but torch, triton and the standard library"
    assert len(tops) <= MOST_OF_THE_STANDARD_LIBRARY, tops
    assert [name for name in loaded if name.partition(".")[0] in ("torch", "triton")] == [], "no part of them besides"
