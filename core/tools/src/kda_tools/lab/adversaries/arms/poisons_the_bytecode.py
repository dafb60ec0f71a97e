"""Puts slower bytecode into the opponent's `__pycache__`; its source stays as it is.

Caught by: bytecode, of which there must be none new after the run; the run cannot be published.
"""

import importlib.util
from importlib._bootstrap_external import _code_to_timestamp_pyc
from pathlib import Path

path = Path(__file__).parents[1] / "baseline" / "__init__.py"
slow = path.read_text().replace("    return", "    __import__('time').sleep(0.002)\n    return", 1)
facts = path.stat()
cache = Path(importlib.util.cache_from_source(str(path)))
cache.parent.mkdir(parents=True, exist_ok=True)
cache.write_bytes(_code_to_timestamp_pyc(compile(slow, str(path), "exec"), int(facts.st_mtime), facts.st_size))


def axpy(x, y, *, factor):
    return factor * x + y
