"""The float64 oracles and the contract of a row."""

from math import prod

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.tensor_spec import ITEM_SIZE
from kda_judge.contract.workloads import Workload

DTYPES = ("float16", "bfloat16", "float32")
COLUMNS_STEP, MAX_COLUMNS = 256, 8192
"""The number of columns of upstream's norm is a multiple of the first and at most the second."""
TENSORS = {
    "temb_norm_scale_shift": ({"x", "temb", "table"}, set()),
    "temb_residual_norm_scale_shift": ({"residual", "x", "temb"}, {"gate_table", "table", "weight", "bias"}),
    "temb_residual": ({"residual", "x", "temb", "gate_table"}, set()),
}
"""Op -> the inputs that it needs, and those that it may have besides."""
NUMBERS = {"gate": "gate_table", "shift": "table", "scale": "table"}
"""Number of a slice -> the table that it is of."""
DEFAULTS = {"shift": 0, "scale": 1, "gate": 2}


def temb_norm_scale_shift(
    x: torch.Tensor, temb: torch.Tensor, table: torch.Tensor, shift: int = 0, scale: int = 1, eps: float = 1e-6
) -> tuple[torch.Tensor]:
    """What y shall be: layer_norm(x) * (1 + table_s + temb_s) + table_b + temb_b, [B, S, D] float64."""
    return (_modulated(x, table, temb, None, None, shift, scale, eps),)


def temb_residual_norm_scale_shift(
    residual: torch.Tensor,
    x: torch.Tensor,
    temb: torch.Tensor,
    gate_table: torch.Tensor | None,
    table: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: int = 2,
    shift: int = 0,
    scale: int = 1,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Y of r, and r = residual + x * (table_g + temb_g) itself, [B, S, D] float64 each.

    y is computed from r as it is returned: one multiply-add in float32, rounded to x's dtype. That is part of the
    contract, because it decides y where r has a large offset: at 4160 two neighbours in bfloat16 are 32 apart.
    """
    total = residual.double() + (x.double() if gate_table is None else _slice(gate_table, temb, gate) * x.double())
    return _modulated(total.float().to(x.dtype), table, temb, weight, bias, shift, scale, eps), total


def temb_residual(
    residual: torch.Tensor, x: torch.Tensor, temb: torch.Tensor, gate_table: torch.Tensor, gate: int = 2
) -> tuple[torch.Tensor]:
    """R alone."""
    return (residual.double() + _slice(gate_table, temb, gate) * x.double(),)


def bytes_moved(workload: Workload) -> int:
    """Every tensor read or written once; of temb and the tables only the slices that the op reads."""
    inputs, x = workload.inputs, workload.inputs["x"]
    written = prod(x.shape) * ITEM_SIZE[x.dtype] * (2 if workload.op == "temb_residual_norm_scale_shift" else 1)
    whole = sum(spec.nbytes for name, spec in inputs.items() if name not in ("temb", *NUMBERS.values()))
    sliced = [inputs[name] for table in NUMBERS.values() if table in inputs for name in ("temb", table)]
    return written + whole + sum(spec.nbytes // spec.shape[-2] for spec in sliced)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the ops' envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    inputs, scalars = workload.inputs, workload.scalars
    needed, more = TENSORS[workload.op]
    allowed = needed | more
    expect(needed <= set(inputs) <= allowed, "inputs", f"{sorted(needed)} of {sorted(allowed)}", sorted(inputs))
    x, temb = inputs["x"], inputs["temb"]
    expect(len(x.shape) == 3, "x", "3 dimensions [B, S, D]", list(x.shape))
    batch, tokens, columns = x.shape
    fits = columns % COLUMNS_STEP == 0 and 0 < columns <= MAX_COLUMNS
    expect(fits, "x", f"D a multiple of {COLUMNS_STEP} up to {MAX_COLUMNS}", columns)
    expect(len(temb.shape) in (3, 4), "temb", "[B, S, K, D] or [B, K, D]", list(temb.shape))
    slices = temb.shape[-2]
    outer = temb.shape[:-2]
    broadcasts = all(size in (1, full) for size, full in zip(outer, (batch, tokens), strict=False))
    fits = broadcasts and temb.shape[-1] == columns
    expect(fits, "temb", "a size of 1 or x's in front of K, and D", list(temb.shape))
    shapes = {"weight": (columns,), "bias": (columns,), "residual": x.shape}
    shapes |= dict.fromkeys(("table", "gate_table"), (1, slices, columns))
    for name, spec in inputs.items():
        expect(spec.dtype in DTYPES, name, f"dtype {', '.join(DTYPES)}", spec.dtype)
        expect(spec.strides[-1] == 1, name, "stride 1 in its last dimension", spec.strides[-1])
        shape = shapes.get(name, spec.shape)
        expect(spec.shape == shape, name, f"shape {list(shape)}", list(spec.shape))
    numbers = {"eps", "shift", "scale"} if "table" in allowed else set()
    numbers |= {"gate"} if "gate_table" in allowed else set()
    expect(set(scalars) <= numbers, "scalars", f"some of {sorted(numbers)}", sorted(scalars))
    for name in numbers & set(NUMBERS):
        number = scalars.get(name, DEFAULTS[name])
        expect(NUMBERS[name] not in inputs or number in range(slices), name, f"0 to {slices - 1}", number)


def _modulated(
    x: torch.Tensor,
    table: torch.Tensor | None,
    temb: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    shift: int,
    scale: int,
    eps: float,
) -> torch.Tensor:
    """LayerNorm and modulation, [B, S, D] float64. Upstream's LayerNorm takes weight and bias only together."""
    wide = x.double()
    wide = wide - wide.mean(dim=-1, keepdim=True)
    y = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None and bias is not None:
        y = y * weight.double() + bias.double()
    if table is None:
        return y
    return y * (1 + _slice(table, temb, scale)) + _slice(table, temb, shift)


def _slice(table: torch.Tensor, temb: torch.Tensor, number: int) -> torch.Tensor:
    """Slice `number` of table + temb, rounded to float32 as in upstream, as a float64 tensor that broadcasts to x."""
    part = (table[:, number].float() + temb[..., number, :].float()).double()
    return part if temb.dim() == 4 else part.unsqueeze(1)
