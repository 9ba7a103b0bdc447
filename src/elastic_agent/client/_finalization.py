"""Keeps torch's threads from aborting a worker that ends."""

from __future__ import annotations

import atexit
import sys
import time

_PAUSE_S = 0.001


def release_gil_before_finalization() -> None:
    """Let threads that wait for the interpreter's lock (the GIL) have it once more before the process ends.

    A thread of gloo's that completes a collective takes the lock to free the tensor. If it still waits when the
    interpreter is finalized, Python before 3.14 ends that thread with an exception that C++ may not let through, and
    the worker dies of SIGABRT after its work is done ("terminate called without an active exception"). See
    https://github.com/pytorch/pytorch/issues/190489.
    """
    atexit.register(_release_gil)


def _release_gil() -> None:
    if "torch.distributed" in sys.modules:
        time.sleep(_PAUSE_S)
