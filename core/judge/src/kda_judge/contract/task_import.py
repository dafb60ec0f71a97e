"""Import a task's modules from its folder, wherever that lies.

A task is a package named like its folder, and all imports inside it are relative. So a copied folder runs itself, and
no folder has to be on `sys.path`, where the task's neighbours could be taken for other packages.
"""

import hashlib
import importlib
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from kda_judge.contract.errors import UsageError


def import_from(folder: Path, module: str) -> ModuleType:
    """The module of this name (`solution`, `bench.reference`) of the task in `folder`; the package itself where empty.

    Raises:
        UsageError: the folder's name is not a valid package name.
    """
    package = _package(folder.resolve())
    return importlib.import_module(f"{package}.{module}" if module else package)


def _package(folder: Path) -> str:
    """Register the folder as a package and return its name, with a hash in it where another package has that name."""
    if not folder.name.isidentifier():
        raise UsageError(f"{folder}: expected a folder whose name Python can import (letters, digits, _), got none")
    other = f"{folder.name}_{hashlib.sha256(str(folder).encode()).hexdigest()[:8]}"
    for name in (folder.name, other):
        known = sys.modules.get(name)
        if known is None:
            register(name, folder)
            return name
        if str(folder) in map(str, getattr(known, "__path__", ())):
            return name
    raise AssertionError(f"two packages are named {other}")


def register(name: str, folder: Path) -> ModuleType:
    """The folder as a package of this name; its `__init__.py`, where there is one, is run."""
    spec = spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None
    package = module_from_spec(spec)
    sys.modules[name] = package
    if spec.loader is not None and (folder / "__init__.py").is_file():
        spec.loader.exec_module(package)
    return package


def import_path() -> str:
    """The PYTHONPATH with which a child process finds the modules that this process finds."""
    return os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sys.path]))
