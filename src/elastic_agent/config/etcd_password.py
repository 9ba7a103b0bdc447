"""The access to etcd: its password, and who else can read that."""

from __future__ import annotations

import stat
from pathlib import Path

from elastic_agent.config.errors import UsageError
from elastic_agent.config.settings import Settings
from elastic_agent.config.sources.environment import ETCD_PASSWORD
from elastic_agent.values import Endpoint, EtcdAccess


def read_password_file(path: Path) -> str:
    """The password in a file that holds nothing else.

    Raises:
        OSError, UnicodeDecodeError: it cannot be read.
    """
    return path.read_text(encoding="utf-8").rstrip("\n")


def etcd_access(settings: Settings, password: str) -> EtcdAccess:
    """The access to etcd; ``password``: from the environment. Raises ``UsageError``: it cannot be read."""
    if settings.etcd_password_file is not None:
        try:
            password = read_password_file(settings.etcd_password_file)
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"etcd_password_file {settings.etcd_password_file}: {error}") from None
    if settings.etcd_user and not password:
        raise UsageError(
            f"etcd_user {settings.etcd_user} requires a password; expected etcd_password_file or the variable "
            f"{ETCD_PASSWORD}"
        )
    return EtcdAccess(
        settings.etcd_prefix,
        settings.etcd_ca,
        settings.etcd_cert,
        settings.etcd_key,
        settings.etcd_user or "",
        password,
    )


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
        warnings.append(
            f"the password is sent to etcd at {endpoint} unencrypted; use TLS: set --secret-file or --etcd-ca"
        )
    return warnings


def _is_world_readable(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IROTH)
    except OSError:
        return False  # whether it can be read is checked elsewhere


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
