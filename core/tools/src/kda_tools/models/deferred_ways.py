"""How an op gets into a class or function that runs it as statements: one module for each key of `sites.toml`.

Each module has `put(module, name, blocks, op, call)`, which puts an op into blocks of a class, `take_back(module, name,
blocks)`, which undoes it, `defer(block, name, op, call)`, which is `put` for a block made later, and `ORIGINAL`, what
stands for the op where the model's own statements run. `name` is the value of the key. A site may have `ported` beside
another key, which then decides.

This file imports only PyTorch: `kda apply` copies it beside the solutions.
"""

from . import deferred_gelu, deferred_layouts, deferred_lines

WAYS = {
    "activation": deferred_gelu,
    "layout": deferred_layouts,
    "ported": deferred_lines,
}
