"""Returns at once and lets a thread do the work later.

Caught by: what was returned is copied right behind the call.
"""

import threading
import time

import torch


def axpy(x, y, *, factor):
    out = torch.empty_like(x)

    def work():
        time.sleep(0.2)
        torch.add(y, x, alpha=factor, out=out)

    threading.Thread(target=work, daemon=True).start()
    return out
