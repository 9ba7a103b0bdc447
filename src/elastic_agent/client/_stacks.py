"""Lets the agent request the stacks of all threads of a worker, even of one stuck in a C call."""

from __future__ import annotations

import os

from elastic_agent.client._environment import MalformedEnvironmentError, number_at_least_0
from elastic_agent.worker_variables import STACKS_SIGNAL


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
