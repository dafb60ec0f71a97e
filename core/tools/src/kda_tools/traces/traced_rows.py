"""What a new task takes from a card: the section on shapes of its `prompt.md`, and drafts of its rows."""

import re
from collections.abc import Iterator

from kda_tools.traces.cards import Card, CardRow, CardTensor
from kda_tools.traces.trace_events import contiguous

SHAPES = re.compile(r"^## The shapes\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
DTYPES = {
    "double": "float64",
    "float": "float32",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    **dict.fromkeys(("long", "long int"), "int64"),
    "int": "int32",
    **dict.fromkeys(("signed char", "char"), "int8"),
    "unsigned char": "uint8",
    "bool": "bool",
}
"""Name of a dtype in PyTorch's traces -> in `bench/workloads.toml`."""
HEAD = """# Drafts of rows, of a trace: docs/card.toml says which. Nothing reads them. Name the inputs as config.toml
# does, add what a trace does not show (scalars, what integers point into, what is overwritten), and move them to
# workloads.toml.
"""


def with_shapes(prompt: str, card: Card) -> str:
    """`prompt` with its section on shapes replaced by the card's; without one, the card's comes at the end."""
    section = "\n".join(_section(card)) + "\n\n"
    if SHAPES.search(prompt) is None:
        return f"{prompt.rstrip()}\n\n{section}".rstrip() + "\n"
    return SHAPES.sub(lambda _: section, prompt, count=1).rstrip() + "\n"


def _section(card: Card) -> Iterator[str]:
    where = f" in `{card.module}`" if card.module else ""
    kernels = ", ".join(f"`{kernel}`" for kernel in card.kernels)
    yield "## The shapes"
    yield ""
    gpu = card.gpu or "an unnamed GPU"
    yield f"A draft of `docs/card.toml`, from a trace on {gpu}: `{card.operator}`{where}, {card.share:.1%}"
    yield f"of the GPU's time, {card.us_per_step:.1f} us of a step of {card.step_us:.1f} us. Kernels: {kernels}."
    if card.saved_us_per_step is not None and card.step_speedup_at_most is not None:
        yield f"A kernel at its limit takes {card.saved_us_per_step:.1f} us off a step, which is then at most"
        yield f"{card.step_speedup_at_most:.4f} times as fast."
    yield ""
    phases = any(row.phase for row in card.row)
    yield f"| {'phase | ' * phases}calls a step | us a call | limit, us | bytes | inputs |"
    yield "|---" * (5 + phases) + "|"
    for row in card.row:
        known = ("-" if row.limit_us is None else f"{row.limit_us:.2f}", "-" if row.bytes is None else f"{row.bytes}")
        cells = (
            *([row.phase or ""] if phases else []),
            f"{row.calls_per_step:g}",
            f"{row.us_per_call:.2f}",
            *known,
            _inputs(row),
        )
        yield f"| {' | '.join(cells)} |"


def _inputs(row: CardRow) -> str:
    if row.inputs is None:
        return "not recorded: profile with record_shapes=True"
    notes = []
    for tensor in row.inputs:
        strides = (
            ""
            if tensor.strides is None or contiguous(tensor.shape, tensor.strides)
            else f" strides {list(tensor.strides)}"
        )
        notes.append(
            f"{DTYPES.get(tensor.dtype, tensor.dtype) or 'dtype hidden by a list'} {list(tensor.shape)}{strides}"
        )
    return "; ".join(notes)


def rows_text(card: Card) -> str:
    """Drafts of `[[workload]]` tables; a row that the trace does not show whole is a comment that says so."""
    op = re.sub(r"\W+", "_", card.operator.rpartition("::")[2]).strip("_") or "op"
    return HEAD + "".join(f"\n{_row(op, number, row)}" for number, row in enumerate(card.row, start=1))


def _row(op: str, number: int, row: CardRow) -> str:
    if row.inputs is None or any(tensor.dtype not in DTYPES for tensor in row.inputs):
        return f"# row {number}, {row.calls_per_step:g} calls a step: {_inputs(row)}\n"
    lines = [f'id = "{op}-{number}"', f'op = "{op}"', "production = true", f"calls_a_step = {row.calls_per_step}"]
    lines += [f"inputs.input{i} = {_spec(tensor)}" for i, tensor in enumerate(row.inputs)]
    return "\n".join(["[[workload]]", *lines]) + "\n"


def _spec(tensor: CardTensor) -> str:
    dtype = DTYPES[tensor.dtype]
    parts = [f"shape = {list(tensor.shape)}", f'dtype = "{dtype}"']
    if tensor.strides is not None and not contiguous(tensor.shape, tensor.strides):
        parts.append(f"stride = {list(tensor.strides)}")
    if dtype in ("int64", "int32"):
        parts.append('fill = "arange"')
    return f"{{ {', '.join(parts)} }}"
