"""What a port adds for models that call a task's ops: lines at the head of a `forward` or a function, and their helper.

A class whose task keeps channels-last order (`layout` in `sites.toml`) gets the computation that `kda apply`
puts there: the package holds what it needs of `deferred_layouts` as `layouts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kda_tools.models import deferred_layouts
from kda_tools.models.chain_sites import Site

BLOCK = "kda_block"
"""The package's function that computes a whole block."""
LAYOUTS = "layouts.py"
LINES = """
kda_result = kda_block("{layout}", self, hidden_states)
if kda_result is not None:
    return kda_result
"""
FUNCTION = '''
def kda_block(kind: str, block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor | None:
    """The block's output, or None where its own statements have to run: see `layouts.py`."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not {runs}(x):
        return None
    from .layouts import output_of

    return output_of(kind, block, x, {{{ops}}})
'''
IMPORT = "from .deferred_lines import ORIGINAL, Refused, refuse\n"
INSTEAD = '''

class Refused(Exception):
    """The block is not as usual, or no op takes a call of it."""


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    """An op that takes no call."""
    raise Refused

'''
DOCSTRING = '''"""Blocks that keep their clips in channels-last order from one convolution to the next.

cuDNN's convolutions convert other clips before and after. Weights are converted once, in a copy.
"""
'''
OUTPUT = '''

def output_of(kind: str, block: Any, x: torch.Tensor, ops: Calls) -> torch.Tensor | None:
    """The output of a block of this kind for the clip x, [B, C, T, H, W]; None if the block is not as usual."""
    weights = vars(block).setdefault("_kda_weights", Weights())
    try:
        return WAYS[kind](block, x, ops, weights)
    except Refused:
        return None
'''


def lines(site: Site) -> str:
    """The lines at the head of a site's function, or of its class's `forward`; empty if a port changes neither."""
    return site.ported or (LINES.format(layout=site.layout) if site.layout else "")


def block_function(runs: str, ops: Sequence[str]) -> str:
    """The text of `kda_block`: `runs` is the function that says whether the kernels run at all."""
    return FUNCTION.format(runs=runs, ops=", ".join(f'"{op}": {op}' for op in ops))


def layouts_text() -> str:
    """The text of `layouts.py`; `prune` cuts it down to what `output_of` needs."""
    text = Path(str(deferred_layouts.__file__)).read_text(encoding="utf-8")
    _, future, body = text.partition("\nfrom __future__")
    return DOCSTRING + future + body.replace(IMPORT, INSTEAD) + OUTPUT
