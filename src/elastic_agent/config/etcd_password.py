"""The password for etcd: its sources, and how it is kept out of environments and messages.

It is no setting, because settings are printed. What is done here protects it from accidents: an environment that is
inherited, logged or sent along with an error report. Workers run as the agent's user, who can read the agent's memory
and files; from them it cannot be hidden.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from elastic_agent.config.sources.environment import ETCD_PASSWORD
from elastic_agent.values import Endpoint


def take_password() -> Callable[[], str]:
    """Take the password out of the environment and the memory of this process; an empty text if there is none.

    To be called before any process is started: a fork has a copy of the memory, and the kernel shows the part that a
    process got at its start as ``/proc/PID/environ``.

    Returns:
        What reads it back, once.
    """
    if ETCD_PASSWORD not in os.environ:
        return str
    fd = os.memfd_create("password")  # closed in whatever is started
    value = os.environb[ETCD_PASSWORD.encode()]
    os.write(fd, value)
    _overwrite(ETCD_PASSWORD, value)
    del os.environ[ETCD_PASSWORD]

    def read() -> str:
        with open(fd, "rb") as file:
            file.seek(0)
            return os.fsdecode(file.read())

    return read


def _overwrite(variable: str, value: bytes) -> None:
    """Where C has the value of the variable, and where Python has it: ``value`` is what ``os.environ`` holds."""
    import ctypes  # only needed with a password

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if (address := libc.getenv(variable.encode())) is not None:
        ctypes.memset(address, 0, len(value))
    if len(value) > 1:  # of each single byte there is one object for all
        ctypes.memset(ctypes.c_char_p(value), 0, len(value))


def read_password_file(path: Path) -> str:
    """The password in a file that holds nothing else.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return path.read_text(encoding="utf-8").rstrip("\n")


def exposures(endpoint: Endpoint, file: Path | None, *, encrypted: bool) -> list[str]:
    """A warning for each way in which others can read the password.

    Args:
        endpoint: the members of etcd that it is sent to.
        file: where it is kept, if it is kept in a file.
        encrypted: whether connections to etcd are.
    """
    warnings = []
    if file is not None and _is_world_readable(file):
        warnings.append(
            f"the password file {file} is readable by every user of this machine; expected mode 0600 or 0640"
        )
    if not encrypted and not all(_is_loopback(member.host) for member in endpoint.members):
        warnings.append(f"the password is sent to etcd at {endpoint} unencrypted; set --etcd-ca to use TLS")
    return warnings


def _is_world_readable(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False  # whether it can be read is checked elsewhere


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
