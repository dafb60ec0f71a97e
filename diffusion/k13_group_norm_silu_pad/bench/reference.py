"""The float64 oracle, the bytes that must move, and the contract of a row."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

L2_BYTES = 60_000_000
"""Bytes of an H200's L2 cache in which a kernel can hope to find again what it read before."""
FLOATS = ("float16", "bfloat16", "float32")
SCALARS = {
    "group_norm_silu_pad": ("num_groups", "eps", "frames", "height", "width"),
    "upsample_pad": ("up_frames", "up_space", "frames", "height", "width"),
    "bias_residual": (),
}


def group_norm_silu_pad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    x_bias: torch.Tensor | None,
    num_groups: int,
    eps: float,
    frames: int,
    height: int,
    width: int,
) -> tuple[torch.Tensor]:
    """[B, frames + T, H + 2 * height, W + 2 * width, C] float64."""
    x = x.double() if x_bias is None else x.double() + x_bias.double()
    groups = x.flatten(1, 3).unflatten(2, (num_groups, -1))  # [B, pixels, groups, channels of a group]
    groups = groups - groups.mean(dim=(1, 3), keepdim=True)
    groups /= torch.sqrt(groups.square().mean(dim=(1, 3), keepdim=True) + eps)
    y = groups.reshape(x.shape) * weight.double() + bias.double()
    return (_padded(y * torch.sigmoid(y), frames, height, width),)


def upsample_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> tuple[torch.Tensor]:
    """[B, 1 + (T - 1) * up_frames + frames, H * up_space + 2 * height, W * up_space + 2 * width, C] float64."""
    later = source[:, 1:].repeat_interleave(up_frames, dim=1)
    x = torch.cat((source[:, :1], later), dim=1)
    for dim in (2, 3):
        x = x.repeat_interleave(up_space, dim=dim)
    return (_padded(x, frames, height, width),)


def bias_residual(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, residual_bias: torch.Tensor | None
) -> tuple[torch.Tensor]:
    """[B, T, H, W, C] float64."""
    summands = [one.double() for one in (bias, residual, residual_bias) if one is not None]
    return (sum(summands, start=x.double()),)


def _padded(x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
    """The clip in the middle, then the edges of what is there so far: columns, lines, frames."""
    b, t, h, w, c = x.shape
    y = torch.empty(b, frames + t, height + h + height, width + w + width, c, dtype=torch.float64, device=x.device)
    inner = y[:, frames:, height : height + h]
    inner[..., width : width + w, :] = x
    inner[..., :width, :], inner[..., width + w :, :] = inner[..., width, None, :], inner[..., width + w - 1, None, :]
    inner = y[:, frames:]
    inner[:, :, :height], inner[:, :, height + h :] = inner[:, :, height, None], inner[:, :, height + h - 1, None]
    y[:, :frames] = y[:, frames, None]
    return y


def bytes_moved(workload: Workload) -> int:
    """Read the inputs once, write the output once, and read again the part of a clip beyond the L2 cache's size.

    A norm needs a second reading, because the first one has to be over before anything can be written.
    """
    inputs = sum(spec.nbytes for spec in workload.inputs.values())
    outputs = sum(spec.nbytes for spec in workload.outputs.values())
    if workload.op != "group_norm_silu_pad":
        return inputs + outputs
    x = workload.inputs["x"]
    return inputs + outputs + x.shape[0] * max(0, x.nbytes // x.shape[0] - L2_BYTES)


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    name, output, needed = {
        "group_norm_silu_pad": ("x", "y", {"x", "weight", "bias"}),
        "upsample_pad": ("source", "upsampled", {"source"}),
        "bias_residual": ("x", "sum", {"x", "bias"}),
    }[workload.op]
    optional = {"group_norm_silu_pad": {"x_bias"}, "bias_residual": {"residual", "residual_bias"}}.get(
        workload.op, set()
    )
    inputs, wanted = workload.inputs, SCALARS[workload.op]
    expect(needed <= set(inputs) <= needed | optional, "inputs", ", ".join(sorted(needed)), sorted(inputs))
    expect(set(workload.scalars) == set(wanted), "scalars", ", ".join(wanted) or "none", sorted(workload.scalars))
    given = {"frames": 0, "height": 0, "width": 0, "up_frames": 1, "up_space": 1, **workload.scalars}
    for scalar, value in given.items():
        if scalar != "eps":
            least = 1 if scalar.startswith("up_") or scalar == "num_groups" else 0
            expect(type(value) is int and value >= least, scalar, f"an integer of {least} or more", value)
    x, y = inputs[name], workload.outputs[output]
    expect(x.dtype in FLOATS, name, f"dtype {' or '.join(FLOATS)}", x.dtype)
    expect(len(x.shape) == 5 and all(x.shape), name, "[B, T, H, W, C], with elements", list(x.shape))
    batch, t, h, w, channels = x.shape
    for other in set(inputs) - {name}:
        spec, shape = inputs[other], x.shape if other == "residual" else (channels,)
        expect((spec.shape, spec.dtype) == (shape, x.dtype), other, f"{list(shape)}, {x.dtype}", list(spec.shape))
    if workload.op == "group_norm_silu_pad":
        expect(channels % int(given["num_groups"]) == 0, "num_groups", f"a divisor of {channels}", given["num_groups"])
    expect("residual" in inputs or "residual_bias" not in inputs, "residual_bias", "a residual", "none")
    frames, height, width, up_frames, up_space = (
        int(given[scalar]) for scalar in ("frames", "height", "width", "up_frames", "up_space")
    )
    size = (batch, frames + 1 + (t - 1) * up_frames, h * up_space + 2 * height, w * up_space + 2 * width, channels)
    expect((y.shape, y.dtype) == (size, x.dtype), output, f"{list(size)}, {x.dtype}", [list(y.shape), y.dtype])
