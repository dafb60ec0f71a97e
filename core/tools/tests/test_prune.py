"""What is left of modules that are taken along: never too little, and none of what nothing reaches."""

import ast

from kda_tools.project.export.prune import prune

ROOT = """from ._kda import rows
from ._kda.op import Op, hooks

OP = Op("double")
print(rows.line, getattr(rows, "by_a_string"))
"""
OP = '''"""Ops."""

from __future__ import annotations

import inspect
import os
from typing import TYPE_CHECKING

from .checks import check, unused

try:
    from .bound import entry as make_entry
except ImportError:  # left out
    from .plans import plain_entry as make_entry

if TYPE_CHECKING:
    from .types import Shape, Unused
if TYPE_CHECKING:
    from .types import Nothing

CODE = """
def call():
    return by_code()
"""
LIMIT = 3
"""Stays with it."""
# About the next one.
OTHER = os.sep
"""Goes with it."""


class Base:
    """Of ours."""

    def inherited(self):
        """Nobody asks for it."""


@decorate
class Op(Base):
    """An op."""

    field: Shape = LIMIT

    def __init__(self, name):
        exec(CODE)
        self.run(name)

    # ---- running

    @property
    def width(self):
        return getattr(self, "asked")

    def run(self, name):
        """Used."""
        check(name)
        return make_entry(self)

    # ---- asking

    # About the next one.
    @property
    def never(self):
        return only_never()

    def asked(self):
        return None


class Walker(ast.NodeVisitor):
    def visit_Name(self, node):
        return OTHER


# --- at the end


def decorate(kind):
    return kind


def by_code():
    return Op("x").width


def only_never():
    return inspect


def hooks():
    """Is imported."""
'''
ROWS = """import torch

line = 1


def by_a_string():
    return torch


def field():
    return Lost


class Lost:
    pass
"""
FILES = {
    "__init__.py": ROOT,
    "table.json": "{}",
    "_kda/__init__.py": "",
    "_kda/op.py": OP,
    "_kda/rows.py": ROWS,
    "_kda/checks.py": "def check(x):\n    return x\n\n\ndef unused():\n    return only_here\n",
    "_kda/plans.py": (
        "class Plan:\n    pass\n\n\ndef plain_entry(op):\n    def inner():\n"
        "        from .late import last\n        return last\n    return inner\n"
    ),
    "_kda/types.py": "class Shape:\n    pass\n\n\nclass Unused:\n    pass\n",
    "_kda/late.py": "last = first = 1\n",
    "_kda/nobody.py": "raise AssertionError\n",
}


def test_what_is_reached_stays_and_nothing_else():
    left = prune(FILES, ["__init__.py"])
    assert left["__init__.py"] == ROOT
    assert set(left) == set(FILES) - {"_kda/nobody.py"}
    op = left["_kda/op.py"]
    for stays in (
        "LIMIT = 3",
        "Stays with it",
        "from .types import Shape\n",
        "def width",
        "def asked",
        "by_code",
        "# ---- running",
    ):
        assert stays in op, stays
    for goes in (
        *("OTHER", "Goes with it", "About the next one", "never", "inherited"),
        *("Walker", "inspect", "import os", "unused", "Nothing", "Unused", "bound"),
    ):
        assert goes not in op, goes
    assert "\nfrom .plans import plain_entry as make_entry\n" in op
    assert [line for line in op.splitlines() if "# ---" in line] == [
        "    # ---- running",
        "    # ---- asking",
        "# --- at the end",
    ]
    assert "class Base:" in op
    assert left["_kda/checks.py"] == "def check(x):\n    return x\n"
    assert left["_kda/plans.py"].startswith("def plain_entry")
    assert left["_kda/types.py"] == "class Shape:\n    pass\n"
    assert left["_kda/rows.py"] == "import torch\n\nline = 1\n\n\ndef by_a_string():\n    return torch\n"
    for name in left:
        if name.endswith(".py"):
            ast.parse(left[name], name)


def test_what_needs_a_module_that_is_left_out_goes_with_what_follows():
    late = "def bind(x):\n    slow = x\n    try:\n        from . import native\n    except ImportError:  # left out\n"
    late += "        return slow\n    return native.bind(_described(x))\n\n\ndef _described(x):\n    return x\n"
    root = {"__init__.py": "from .late import bind\n\nbind(1)\n"}
    assert prune({**root, "late.py": late}, ["__init__.py"])["late.py"] == (
        "def bind(x):\n    slow = x\n    return slow\n"
    )
    there = {**root, "late.py": late, "native.py": "def bind(x):\n    return x\n"}
    assert prune(there, ["__init__.py"]) == there


def test_an_attribute_of_another_packages_module_keeps_no_method():
    """`re.compile` is no call of a method `compile`."""
    text = "import re\n\n\nclass One:\n    def run(self):\n        return re.compile('a')\n\n"
    files = {
        "__init__.py": "from .one import One\n\nOne().run()\n",
        "one.py": f"{text}    def compile(self):\n        pass\n",
    }
    assert prune(files, ["__init__.py"])["one.py"] == text.rstrip("\n") + "\n"


def test_a_heading_with_nothing_below_it_goes():
    text = "# --- one\n\n\ndef a():\n    pass\n\n\n# --- two\n\n\ndef b():\n    pass\n"
    left = prune({"x.py": "from .y import b\n", "y.py": text}, ["x.py"])
    assert left["y.py"] == "# --- two\n\n\ndef b():\n    pass\n"


def test_a_heading_at_the_end_of_a_module_goes():
    text = "def a():\n    pass\n\n\n# --- two\n\n\ndef b():\n    pass\n"
    assert prune({"x.py": "from .y import a\n", "y.py": text}, ["x.py"])["y.py"] == "def a():\n    pass\n"


def test_a_string_keeps_what_its_module_may_get_and_nothing_elsewhere():
    """`pad` is an op that is asked for by its name, and the name of a table, which keeps no function."""
    op = "def pad():\n    return 1\n\n\ndef copy():\n    return TABLE\n\n\nTABLE = read('pad')\n"
    files = {"k/__init__.py": "from .op import copy, pad\n", "k/op.py": op}
    for asked in ("pad", "copy"):
        root = f"def load(name):\n    from . import k\n    return getattr(k, name)\n\n\nload({asked!r})\n"
        left = prune({"__init__.py": root, **files}, ["__init__.py"])
        assert left["k/__init__.py"] == f"from .op import {asked}\n"
        assert ("def pad" in left["k/op.py"], "def copy" in left["k/op.py"]) == (asked == "pad", asked == "copy")


def test_a_long_import_that_loses_names_is_written_again():
    names = [f"name_of_some_length_{number}" for number in range(8)]
    used = ", ".join(names[:6])
    module = (
        f"from .z import ({', '.join(names)}, last as end)\nimport os, sys\n\n\ndef a():\n    return {used}, end, sys\n"
    )
    files = {"x.py": "from .y import a\n", "y.py": module, "z.py": "".join(f"{one} = 1\n" for one in [*names, "last"])}
    left = prune(files, ["x.py"])
    assert "name_of_some_length_5,\n    last as end,\n)\nimport sys\n" in left["y.py"]
    assert left["z.py"] == "".join(f"{one} = 1\n" for one in [*names[:6], "last"])


def test_methods_that_a_class_of_others_calls_stay():
    text = "import ast\n\n\nclass V(ast.NodeVisitor):\n    def visit_Name(self, node):\n        return 1\n"
    assert prune({"x.py": "from .y import V\n", "y.py": text}, ["x.py"])["y.py"] == text
