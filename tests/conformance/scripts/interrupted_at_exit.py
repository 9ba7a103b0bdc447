"""Interrupted while Python ends, after the functions that the script has registered."""

import atexit
import ctypes
import signal
import sys

# No function of Python's: those look for signals before they return.
atexit.register(getattr(ctypes.CDLL(None), "raise"), int(signal.SIGINT))
if sys.argv[1] == "torch":
    import torch  # noqa: F401
print("ends", flush=True)
