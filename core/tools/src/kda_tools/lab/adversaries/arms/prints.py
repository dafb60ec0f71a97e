"""A good arm that prints forged results.

Caught by: nothing, and needs not be: what an arm prints is never read.
"""

print("kda: axpy: 10 of 10 rows FASTER, speedup 9.99")


def axpy(x, y, *, factor):
    print('{"verdict": "FASTER"}')
    return factor * x + y
