"""Read values captured from a run: small `.npy` files beside the rows, each refused unless it matches its row.

The format is numpy's own, without pickles: a header in text and the bytes. numpy has no bfloat16 and no float8; files
of these hold their bits, as uint16 and uint8.
"""

from __future__ import annotations

import hashlib
import io
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_judge.contract.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from kda_judge.contract.tensor_spec import TensorSpec

MOST_BYTES = 4 << 20
"""Bytes of the largest accepted file: a repository is no place for larger ones."""
BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
"""Dtypes that numpy lacks -> the dtype that their files hold."""


def captured(spec: TensorSpec) -> np.ndarray[Any, Any]:
    """The values, in the row's shape, of an input whose fill is `captured`; a UsageError names a file that differs."""
    assert spec.file is not None
    assert spec.sha256 is not None
    return _read(Path(spec.file), spec.sha256, spec.dtype, spec.shape, spec.low, spec.high)


@lru_cache(maxsize=64)
def _read(
    path: Path, sha256: str, dtype: str, shape: tuple[int, ...], low: int, high: int | None
) -> np.ndarray[Any, Any]:
    import numpy as np

    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UsageError(f"{path}: expected {MOST_BYTES} bytes of captured values or less, got {size}")
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: captured values: {error.strerror or error}") from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise UsageError(f"{path}: expected sha256 {sha256}, as the row says, got {digest}")
    try:
        # `np.load` would also accept a zip or a pickle; only an `.npy` is wanted.
        array = np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UsageError(f"{path}: expected an .npy file without pickles: {error}") from None
    wanted = np.dtype(BITS.get(dtype, dtype))
    if array.dtype != wanted or array.shape != shape:
        raise UsageError(
            f"{path}: expected {wanted.name} {list(shape)}, which the row has as {dtype}, got {array.dtype.str} "
            f"{list(array.shape)}"
        )
    if high is not None and array.size and not (low <= array.min() and array.max() < high):
        raise UsageError(f"{path}: expected values from {low} to below {high}, got {array.min()} to {array.max()}")
    return np.ascontiguousarray(array)
