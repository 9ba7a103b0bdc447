"""The password for etcd: its file, and who else can read it."""

from __future__ import annotations

import stat
from pathlib import Path

from elastic_agent.values import Endpoint


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
