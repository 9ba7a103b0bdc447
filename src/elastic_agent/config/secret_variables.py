"""Variables with secrets: they are taken out of the environment before anything is started that would inherit them.

They are no settings, because settings are printed. What is done here protects them from accidents: an environment
that is inherited, logged or sent along with an error report. Workers run as the agent's user, who can read the agent's
memory and files; from them they cannot be hidden.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.config.sources.environment import ETCD_PASSWORD, SECRET


@dataclass(frozen=True)
class SecretVariables:
    """What reads back each variable that was taken, once."""

    etcd_password: Callable[[], str] = str
    """Empty if it was not set."""
    secret: Callable[[], str | None] = lambda: None
    """Of the run; None if it was not set. See :mod:`.run_secret`."""


def take_secret_variables() -> SecretVariables:
    """Take them out of the environment and the memory of this process.

    To be called before any process is started: a fork has a copy of the memory, and the kernel shows the part that a
    process got at its start as ``/proc/PID/environ``.
    """
    password, secret = _take(ETCD_PASSWORD), _take(SECRET)
    return SecretVariables(password or str, secret or (lambda: None))


def _take(variable: str) -> Callable[[], str] | None:
    """None: it is not set."""
    if variable not in os.environ:
        return None
    fd = os.memfd_create("secret")  # closed in whatever is started
    value = os.environb[variable.encode()]
    os.write(fd, value)
    _overwrite(variable, value)
    del os.environ[variable]

    def read() -> str:
        with open(fd, "rb") as file:
            file.seek(0)
            return os.fsdecode(file.read())

    return read


def _overwrite(variable: str, value: bytes) -> None:
    """Where C has the value of the variable, and where Python has it: ``value`` is what ``os.environ`` holds."""
    import ctypes  # only needed with a secret

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if (address := libc.getenv(variable.encode())) is not None:
        ctypes.memset(address, 0, len(value))
    if len(value) > 1:  # of each single byte there is one object for all
        ctypes.memset(ctypes.c_char_p(value), 0, len(value))
