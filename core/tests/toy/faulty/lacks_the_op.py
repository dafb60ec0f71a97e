"""Exports something else."""


def saxpy(x, y, *, factor):
    return x
