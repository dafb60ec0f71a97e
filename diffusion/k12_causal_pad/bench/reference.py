"""The float64 oracle and the contract of a row. Bytes moved are the usual: inputs read once, outputs written once."""

import torch

from kda_judge.contract.errors import expecting
from kda_judge.contract.workloads import Workload

FLOATS = ("float16", "bfloat16", "float32")
SCALARS = {
    "causal_pad": ("frames", "height", "width"),
    "upsample_causal_pad": ("up_frames", "up_space", "frames", "height", "width"),
}


def causal_pad(x: torch.Tensor, frames: int, height: int, width: int) -> tuple[torch.Tensor]:
    """[B, C, frames + T, H + 2 * height, W + 2 * width] float64."""
    return (_padded(x, frames, height, width),)


def upsample_causal_pad(
    source: torch.Tensor, up_frames: int, up_space: int, frames: int, height: int, width: int
) -> tuple[torch.Tensor]:
    """The same of source upsampled: 1 + (T - 1) * up_frames frames of H * up_space lines and W * up_space columns."""
    later = source[:, :, 1:].repeat_interleave(up_frames, dim=2)
    x = torch.cat((source[:, :, :1], later), dim=2)
    for dim in (3, 4):
        x = x.repeat_interleave(up_space, dim=dim)
    return (_padded(x, frames, height, width),)


def _padded(x: torch.Tensor, frames: int, height: int, width: int) -> torch.Tensor:
    """The clip in the middle, then the edges of what is there so far: columns, lines, frames."""
    b, c, t, h, w = x.shape
    y = torch.empty(b, c, frames + t, height + h + height, width + w + width, dtype=torch.float64, device=x.device)
    inner = y[:, :, frames:, height : height + h]
    inner[..., width : width + w] = x
    inner[..., :width], inner[..., width + w :] = inner[..., width, None], inner[..., width + w - 1, None]
    inner = y[:, :, frames:]
    inner[..., :height, :] = inner[..., height, None, :]
    inner[..., height + h :, :] = inner[..., height + h - 1, None, :]
    y[:, :, :frames] = y[:, :, frames, None]
    return y


def check(workload: Workload) -> None:
    """Raise ValueError for a row outside the op's envelope; it names the argument, what was expected and what came."""
    expect = expecting()
    name = "x" if workload.op == "causal_pad" else "source"
    expect(set(workload.inputs) == {name}, "inputs", name, sorted(workload.inputs))
    wanted = SCALARS[workload.op]
    expect(set(workload.scalars) == set(wanted), "scalars", ", ".join(wanted), sorted(workload.scalars))
    given = {"up_frames": 1, "up_space": 1, **workload.scalars}
    for scalar, value in given.items():
        least = 1 if scalar.startswith("up_") else 0
        expect(type(value) is int and value >= least, scalar, f"an integer of {least} or more", value)
    output = "y" if name == "x" else "upsampled"
    x, y = workload.inputs[name], workload.outputs[output]
    expect(x.dtype in FLOATS, name, f"dtype {' or '.join(FLOATS)}", x.dtype)
    expect(len(x.shape) == 5 and all(x.shape[2:]), name, "[B, C, T, H, W], with pixels", list(x.shape))
    batch, channels, t, h, w = x.shape
    frames, height, width, up_frames, up_space = (
        int(given[scalar]) for scalar in ("frames", "height", "width", "up_frames", "up_space")
    )
    sizes = (frames + 1 + (t - 1) * up_frames, h * up_space + 2 * height, w * up_space + 2 * width)
    shape = (batch, channels, *sizes)
    expect((y.shape, y.dtype) == (shape, x.dtype), output, f"{list(shape)}, {x.dtype}", [list(y.shape), y.dtype])
