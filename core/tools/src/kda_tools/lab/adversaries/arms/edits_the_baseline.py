"""Makes the opponent's source slower, for the next generation of workers.

Caught by: hashes taken after the run once more; the run cannot be published.
"""

from pathlib import Path

path = Path(__file__).parents[1] / "baseline" / "__init__.py"
edited = path.with_suffix(".edited")
edited.write_text(path.read_text().replace("    return", "    __import__('time').sleep(0.002)\n    return", 1))
edited.replace(path)  # at once: the opponent may be reading it


def axpy(x, y, *, factor):
    return factor * x + y
