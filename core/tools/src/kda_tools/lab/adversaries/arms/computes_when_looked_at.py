"""Returns a tuple subclass that computes when it is iterated over: when the worker hands it back, behind the clock.

Caught by: the exact type of what is returned.
"""

import torch


class Later(tuple):
    """Looks like a tuple of one; its element is made when somebody takes it out."""

    def __iter__(self):
        if not hasattr(self, "made"):
            x, y, factor = self.work
            self.made = torch.add(y, x, alpha=factor).contiguous()
        return iter((self.made,))

    def __len__(self):
        return 1


def axpy(x, y, *, factor):
    out = Later()
    out.work = (x, y, factor)
    return out
