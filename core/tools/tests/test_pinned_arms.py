"""Every upstream arm imports from its locked files alone, and the solution has its signatures."""

import inspect
import json
import os
import shutil
import subprocess
import sys

import pytest

from core.tools.tests.every_task import ROOT, TASKS, calls_of_chains
from kda_judge.arms.arm_import import REPLAYER
from kda_judge.arms.upstream import cache_folder, fetch, read_lock
from kda_judge.contract.errors import MissingRequirement
from kda_judge.contract.task_import import import_path
from kda_judge.contract.tasks import Task
from kda_tools.project.lock_upstream import lock

# Prints what the arm's callables are and what of upstream was loaded, or the name of a package that it lacks. Without a
# GPU one is feigned: some modules choose their path at import, and ask the device for its properties.
CODE = """
import importlib, inspect, json, sys, types
from pathlib import Path
import torch
if not torch.cuda.is_available():
    torch.version.cuda = "13.0"
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(warp_size=32)
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.get_device_module = lambda *_: torch.cuda
from kda_judge.arms.upstream import activate
from kda_judge.contract.task_import import import_from

def loaded():
    files = (getattr(m, "__file__", None) for name, m in list(sys.modules.items()) if name.startswith(f"{package}."))
    return sorted({str(Path(file).relative_to(tree)) for file in files if file})

def parameters(function):
    if isinstance(function, torch._ops.OpOverloadPacket):
        return [
            (a.name, "KEYWORD_ONLY" if a.kwarg_only else "POSITIONAL_OR_KEYWORD", default(a))
            for a in function.default._schema.arguments
        ]
    return [(p.name, p.kind.name, repr(p.default)) for p in inspect.signature(function).parameters.values()]

def default(argument):
    return repr(argument.default_value if argument.has_default_value() else inspect.Parameter.empty)

def registered(name):
    overloads = getattr(getattr(torch.ops.sglang, name, None), "default", None)
    return overloads and [argument.name for argument in overloads._schema.arguments]

tree, version, package, task, module, *names = sys.argv[1:]
activate(Path(tree), version, package)
try:
    arm = import_from(Path(task), module)
    public = {name: getattr(arm, name) for name in arm.__all__}
    # What `torch.library.custom_op` decorates.
    public = {name: getattr(function, "_init_fn", function) for name, function in public.items()}
    first = loaded()
    for name in names:
        importlib.import_module(name)
except ModuleNotFoundError as error:
    if error.name.startswith(package):
        raise
    sys.exit(json.dumps({"missing": error.name}))
print(json.dumps({
    "modules": {name: function.__module__ for name, function in public.items()},
    "parameters": {name: parameters(function) for name, function in public.items()},
    "registered": {name: registered(name) or registered(f"{name}_cuda") for name in public},
    "first": first,
    "all": loaded(),
}))
"""
ARMS = [(task, arm) for task in TASKS for arm, spec in task.config.arms.items() if spec.upstream]
every_arm = pytest.mark.parametrize(("task", "arm"), ARMS, ids=[f"{task.op}-{arm}" for task, arm in ARMS])


def pin_of(task, arm):
    return task.config.upstream[task.config.arms[arm].upstream]


def idle(tree, loaded, locked):
    """The locked files that are neither loaded with the arm nor named by one that is (for a first call, say).

    Fallbacks for machines without a GPU may be: upstream puts their names together when it needs them. So may the
    launcher that the portable arm runs under.
    """
    rest = {name for name in set(locked) - set(loaded) - {REPLAYER} if "fallback" not in name}
    named = set(loaded)
    while named:
        sources = "".join((tree / name).read_text() for name in named)
        named = {name for name in rest if module_of(name).rpartition(".")[2] in sources}
        rest -= named
    return sorted(rest)


def module_of(file):
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@every_arm
def test_arm_imports_from_its_locked_files_alone(task, arm):
    pin = pin_of(task, arm)
    try:
        tree = fetch(pin, task.path / pin.files, cache_folder(ROOT))
    except MissingRequirement as error:
        pytest.skip(f"the wheel cannot be had: {error}")
    python = sorted(name for name in read_lock(task.path / pin.files) if name.endswith(".py"))
    modules = map(module_of, python)
    command = [
        *(sys.executable, "-c", CODE, str(tree), pin.version),
        *(pin.module, str(task.path), task.config.arms[arm].module),
    ]
    env = os.environ | {"PYTHONPATH": import_path()}
    ran = subprocess.run([*command, *modules], env=env, capture_output=True, text=True, check=False)
    if ran.stderr.startswith('{"missing"'):
        pytest.skip(
            f"needs {json.loads(ran.stderr)['missing']}: pip install kda-judge[torch,upstream] nvidia-cutlass-dsl"
        )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["all"] == python, "the locked files, and nothing else of upstream"
    assert idle(tree, found["first"], python) == []

    solution = task.load("solution")
    assert set(task.config.ops_of(arm)) <= set(found["modules"])
    own = calls_of_chains(task, arm)
    for name, module in found["modules"].items():
        if pin.module not in module.split("."):
            assert own.get(name), f"{name} is upstream's own, or a chain of upstream's"
        theirs = [tuple(parameter) for parameter in found["parameters"][name]]
        # Under our stand-in for the framework's registration, where there is one; it may know fewer arguments.
        assert set(found["registered"][name] or ()) <= {parameter for parameter, *_ in theirs}
        if arm == "baseline":
            ours = inspect.signature(getattr(solution, name)).parameters.values()
            assert [(p.name, p.kind.name, repr(p.default)) for p in ours] == theirs


@every_arm
def test_lock_writes_what_is_committed(task, arm, tmp_path):
    pin = pin_of(task, arm)
    wheel = cache_folder(ROOT) / "wheels" / pin.wheel
    if not wheel.is_file():
        pytest.skip(f"{pin.wheel} is not in the cache; `kda fetch` brings it")
    copy = Task(tmp_path / task.folder)
    copy.path.mkdir()
    shutil.copy(task.path / "config.toml", copy.path)
    shutil.copytree(task.path / "baseline", copy.path / "baseline")
    assert lock(copy, pin, wheel).missing == []
    assert (copy.path / pin.files).read_text() == (task.path / pin.files).read_text()
