"""What torch's C++ code logs in this process."""

from __future__ import annotations

import contextlib
import ctypes
import os

import torch

_ERRORS = 2


def quieten_torch() -> None:
    """Have torch's C++ code log errors only from now on, as TORCH_CPP_LOG_LEVEL=ERROR at its import would have.

    Its store client warns of every wait that ends by its time-out.
    """
    with contextlib.suppress(OSError, ValueError):  # not there: then it warns
        log_level().value = _ERRORS


def log_level() -> ctypes.c_int:
    """The level below which it is silent, in torch's own memory. Raises OSError or ValueError when it is not there."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    return ctypes.c_int.in_dll(ctypes.CDLL(library), "FLAGS_caffe2_log_level")
