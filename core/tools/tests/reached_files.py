"""Which files of the tools a module imports, directly and by others."""

import ast
from collections.abc import Collection

from core.tools.tests.every_task import ROOT


def computed_with(module: str, rooms: Collection[str], without: Collection[str]) -> set[str]:
    """Files of these rooms that `module` reaches, as `room/name.py`, but for the names in `without`."""
    source = ROOT / "core" / "tools" / "src"
    reached, ahead = set(), [module]
    while ahead:
        name = ahead.pop()
        path = source / f"{name.replace('.', '/')}.py"
        if path in reached or not path.is_file():
            continue
        reached.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                inside = name.rsplit(".", node.level)[0] if node.level else ""  # of a relative import
                imported = ".".join(part for part in (inside, node.module) if part)
                ahead += [imported, *(f"{imported}.{one.name}" for one in node.names)]
    found = (path.relative_to(source / "kda_tools") for path in reached)
    return {path.as_posix() for path in found if path.parent.name in rooms and path.stem not in without}
