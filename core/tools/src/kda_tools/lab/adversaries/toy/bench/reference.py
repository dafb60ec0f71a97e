"""Oracle of the test task."""


def axpy(x, y, *, factor):
    return (factor * x.double() + y.double(),)


axpy_ = axpy


def squash(x, *, factor):
    return ((x.double() * factor).tanh(),)


def check(row):
    if "y" in row.inputs and row.inputs["x"].shape != row.inputs["y"].shape:
        raise ValueError(f"y: expected x's shape {row.inputs['x'].shape}, got {row.inputs['y'].shape}")
