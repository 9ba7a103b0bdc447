"""The password for etcd: its sources, and how it is kept out of environments and messages.

It is no setting, because settings are printed. What is done here protects it from accidents: an environment that is
inherited, logged or sent along with an error report. Workers run as the agent's user, who can read the agent's memory
and files; from them it cannot be hidden.
"""

from __future__ import annotations

import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from elastic_agent.config.sources.environment import ETCD_PASSWORD
from elastic_agent.values import Endpoint


def take_password(environ: MutableMapping[str, str]) -> str:
    """The password in the variable, or an empty text; the variable is removed.

    To be called before any process is started. The value is also overwritten where the process got it at its start:
    the kernel shows that memory as ``/proc/PID/environ``, and a fork has a copy of it.
    """
    if environ is os.environ and ETCD_PASSWORD in environ:
        password: str = environ[ETCD_PASSWORD]
        _overwrite(ETCD_PASSWORD)
        del environ[ETCD_PASSWORD]
        return password
    return environ.pop(ETCD_PASSWORD, "")


def _overwrite(variable: str) -> None:
    import ctypes  # only needed with a password

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(variable.encode())
    if address is not None:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))


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
