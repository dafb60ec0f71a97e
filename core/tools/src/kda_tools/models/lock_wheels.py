"""`kda model lock`: list the files of the pinned wheels that models read, with their sha256.

A model's fast paths import modules and compile sources at their first use, on a GPU. So the patterns of the known
models list whole folders, and not only the files that one run on one machine read.
"""

import hashlib
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

from kda_judge.contract.errors import UsageError
from kda_tools.models.known_models import Patterns


def write_lock(patterns: Patterns, wheel: Path, lock: Path) -> int:
    """Write the wheel's lock file, in sha256sum's format; returns how many files it lists.

    Raises:
        UsageError: a pattern of `take` matches no file of the wheel.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = sorted(item.filename for item in archive.infolist() if not item.is_dir())
        for pattern in patterns.take:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(f"{pattern}: {wheel.name} holds no such file")
        chosen = [
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in patterns.take)
            and not any(fnmatchcase(name, pattern) for pattern in patterns.without)
        ]
        lines = [f"{hashlib.sha256(archive.read(name)).hexdigest()}  {name}\n" for name in chosen]
    head = f"# Files of {wheel.name} that models may read, written by `kda model lock`\n"
    lock.write_text(head + "".join(lines), encoding="utf-8")
    return len(chosen)
