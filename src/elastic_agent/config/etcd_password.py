"""The access to etcd: its password, and whether others can read it on its way."""

from __future__ import annotations

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


def exposure(endpoint: Endpoint, *, encrypted: bool) -> str:
    """A warning if others can read the password on its way to these members of etcd, else an empty text.

    ``encrypted``: whether connections to etcd are.
    """
    if encrypted or all(_is_loopback(member.host) for member in endpoint.members):
        return ""
    return f"the password is sent to etcd at {endpoint} unencrypted; use TLS: set --secret-file or --etcd-ca"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")
