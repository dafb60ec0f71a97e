"""The regression grid: correctness-only rows over the ops' whole envelope.

`causal_pad`: channels {1 x 3, 2 x 16} x frames {1, 2, 5} x pictures (`PICTURES`) x margins (`MARGINS`) x {float16,
bfloat16, float32}. `upsample_causal_pad`: 3 channels, frames {1, 4}, the same pictures, two of the margins, factors
(`FACTORS`) and the dtypes. Odd widths take the kernel's form without pairs. Some of the model's tiles, too.

Thinning for machines without a GPU (`thin`): 3 channels, up to 4 frames, pictures of up to 100 pixels, and of the
upsampled ones the first margins. Sizes are such that outputs shrink there as inputs do.
"""

from collections.abc import Iterable, Iterator
from itertools import product
from math import prod

from kda_judge.contract.tensor_spec import DType, OutputSpec, TensorSpec
from kda_judge.contract.workloads import Workload

CHANNELS, FRAMES = ((1, 3), (2, 16)), (1, 2, 5)
PICTURES = ((1, 1), (2, 1), (7, 9), (9, 10), (33, 32), (96, 80), (129, 257))
MARGINS = ((2, 1, 1), (0, 1, 1), (2, 0, 0), (1, 3, 2))
"""Frames, lines and columns."""
FACTORS = ((1, 2), (2, 2), (2, 1), (3, 3))
"""Of frames and pixels."""
DTYPES: tuple[DType, ...] = ("float16", "bfloat16", "float32")
TILES = ((1, 512, 2, 12, 10), (1, 512, 5, 32, 32), (1, 128, 17, 96, 80))
THIN_CHANNELS, THIN_FRAMES, THIN_PIXELS = 3, 4, 100


def grid() -> Iterator[Workload]:
    """All rows; ids name the input's shape, the margins, the factors and the dtype."""
    for channels, t, picture, margins, dtype in product(CHANNELS, FRAMES, PICTURES, MARGINS, DTYPES):
        yield _row((*channels, t, *picture), margins, None, dtype)
    for t, picture, margins, factors, dtype in product((1, 4), PICTURES, MARGINS[::3], FACTORS, DTYPES):
        yield _row((1, 3, t, *picture), margins, factors, dtype)
    for shape, factors, dtype in product(TILES, (None, (2, 2)), DTYPES):
        yield _row(shape, MARGINS[0], factors, dtype)


def thin(rows: Iterable[Workload]) -> list[Workload]:
    """The rows that a machine without a GPU checks; the module says which and why."""
    kept = []
    for row in rows:
        ((_, channels, t, *picture),) = (spec.shape for spec in row.inputs.values())
        small = channels == THIN_CHANNELS and t <= THIN_FRAMES and prod(picture) <= THIN_PIXELS
        if small and (row.op == "causal_pad" or row.scalars["height"] == MARGINS[0][1]):
            kept.append(row)
    return kept


def _row(
    shape: tuple[int, ...], margins: tuple[int, int, int], factors: tuple[int, int] | None, dtype: DType
) -> Workload:
    batch, channels, t, h, w = shape
    frames, height, width = margins
    up_frames, up_space = factors or (1, 1)
    sizes = (frames + 1 + (t - 1) * up_frames, h * up_space + 2 * height, w * up_space + 2 * width)
    scalars = {"frames": frames, "height": height, "width": width}
    if factors:
        scalars |= {"up_frames": up_frames, "up_space": up_space}
    name, output = ("source", "upsampled") if factors else ("x", "y")
    by = f"-by{up_frames}x{up_space}" if factors else ""
    return Workload(
        id=f"{'x'.join(map(str, shape))}{by}-and{'x'.join(map(str, margins))}-{dtype}",
        op="upsample_causal_pad" if factors else "causal_pad",
        inputs={name: TensorSpec(shape=shape, dtype=dtype)},
        outputs={output: OutputSpec(shape=(batch, channels, *sizes), dtype=dtype)},
        scalars=scalars,
    )
