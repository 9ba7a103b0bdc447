"""Prepares the process of a worker: stacks on request, and an end that torch's threads do not abort."""

from __future__ import annotations

import atexit
import os
import sys
import time

from elastic_agent.client._environment import MalformedEnvironmentError, number_at_least_0
from elastic_agent.worker_variables import STACKS_SIGNAL

_PAUSE_S = 0.001
_PATIENCE_S = 0.1
"""The longest wait for threads: autograd's threads for GPUs always look as if they were about to run Python code."""


def write_stacks_on_signal() -> None:
    """Have the signal that the agent named write every thread's stack to stderr; without an agent, do nothing.

    Raises:
        MalformedEnvironmentError: what was named is no signal that can be caught.
    """
    value = os.environ.get(STACKS_SIGNAL)
    if value is None:
        return
    # Imported here: 0.1 ms that only workers of an agent need spend.
    import faulthandler

    expected = "the number of a signal that can be caught"
    signal_number = number_at_least_0(STACKS_SIGNAL, value, expected)
    try:
        # Descriptor 2 and not sys.stderr, which may be replaced by something without one.
        faulthandler.register(signal_number, file=2, all_threads=True, chain=False)
    except (ValueError, RuntimeError, OSError, OverflowError) as error:
        message = f"{STACKS_SIGNAL}={value!r} in the environment: {error}; expected {expected}"
        raise MalformedEnvironmentError(message) from None


def release_gil_before_finalization() -> None:
    """Let threads that wait for the interpreter's lock (the GIL) have it once more before the process ends.

    A thread of gloo's that completes a collective takes the lock to free the tensor. If it still waits when the
    interpreter is finalized, Python before 3.14 ends that thread with an exception that C++ may not let through, and
    the worker dies of SIGABRT after its work is done ("terminate called without an active exception"). See
    https://github.com/pytorch/pytorch/issues/190489.
    """
    if sys.version_info < (3, 14):
        atexit.register(_release_gil)


def _release_gil() -> None:
    if "torch.distributed" not in sys.modules:
        return
    until_s = time.monotonic() + _PATIENCE_S
    time.sleep(_PAUSE_S)
    while _threads_without_frame() and time.monotonic() < until_s:
        time.sleep(_PAUSE_S)  # a busy machine may not have run such a thread yet


def _threads_without_frame() -> int:
    """Return how many threads have announced themselves to the interpreter, and run no Python code.

    A thread of C++ code creates its thread state, waits for the lock, and deletes the state when it is done.
    """
    import ctypes  # here, because it takes some milliseconds to import and most processes need it never

    api = ctypes.pythonapi
    for name in ("PyInterpreterState_Get", "PyInterpreterState_ThreadHead", "PyThreadState_Next"):
        getattr(api, name).restype = ctypes.c_void_p
    states = 0
    state = api.PyInterpreterState_ThreadHead(ctypes.c_void_p(api.PyInterpreterState_Get()))
    while state:
        states += 1
        state = api.PyThreadState_Next(ctypes.c_void_p(state))
    return states - len(sys._current_frames())
