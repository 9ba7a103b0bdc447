"""The secrets of a run, its own and the password for etcd: where they come from, and how they are kept.

They are no settings, because settings are printed. A variable that holds one is taken out of the environment before
anything is started that would inherit it. What is done here protects them from accidents: an environment that is
inherited, logged or sent along with an error report. Workers run as the agent's user, who can read the agent's memory
and files; from them they cannot be hidden.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elastic_agent.config.errors import UsageError
from elastic_agent.config.settings import Settings
from elastic_agent.config.sources.environment import ETCD_PASSWORD, SECRET
from elastic_agent.values import EtcdAccess

CREDENTIAL = "elastic-agent-secret"
"""The name of the credential: ``LoadCredential=elastic-agent-secret:FILE`` in a unit of systemd."""

LEAST_CHARS, MOST_LINES, MOST_BYTES = 16, 2, 4096
REMEDY = "create one with elastic-agent secret FILE, and copy it to all machines"


def new_secret() -> str:
    """Return a new secret as :func:`run_secret` reads it."""
    return secrets.token_hex(32)


def named_source(file: Path | None, environ: Mapping[str, str], *, is_variable_set: bool) -> str:
    """Name what :func:`run_secret` would read, in words; empty: there is no secret."""
    return _file_of_secret(file, environ)[1] or (f"the variable {SECRET}" if is_variable_set else "")


def _file_of_secret(file: Path | None, environ: Mapping[str, str]) -> tuple[Path | None, str]:
    """Return the file that holds the secret, and what messages call it; None: the variable may hold it."""
    folder = environ.get("CREDENTIALS_DIRECTORY")
    if file is not None:
        return file, f"--secret-file {file}"
    if folder and (credential := Path(folder, CREDENTIAL)).exists():
        return credential, f"the credential {CREDENTIAL}"
    return None, ""


def run_secret(file: Path | None, environ: Mapping[str, str], variable: str | None) -> tuple[bytes, ...]:
    """Read the secret that the agents of a run share, from the first of these that is there; empty without any.

    During a rotation there are two, and the first one is used for what this agent writes.

    Args:
        file: ``--secret-file``.
        environ: for the folder of systemd's credentials.
        variable: the value of ELASTIC_AGENT_SECRET; None: it is not set. If it is empty, what was to set it has failed.

    Raises:
        UsageError: it cannot be read, others can read it, or it is none.
    """
    source, name = _file_of_secret(file, environ)
    if source is not None:
        return _parsed(_read(source, is_private=file is not None), name)
    return _parsed(variable.encode("utf-8", "surrogateescape"), SECRET) if variable is not None else ()


def _read(file: Path, *, is_private: bool) -> bytes:
    shown = f"--secret-file {file}"
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{shown}: not a regular file; {REMEDY}")
            if is_private:
                _check_access(file, shown, found)
            return opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(
            f"{shown}: No such file or directory; copy it from a machine that has it, as all need the same one "
            "(elastic-agent secret FILE makes one)"
        ) from None
    except OSError as error:
        raise UsageError(f"{shown}: {error.strerror}; expected a file that this user can read") from None


def _check_access(file: Path, shown: str, found: os.stat_result) -> None:
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{shown}: it belongs to user {found.st_uid}; expected this user ({os.geteuid()}) or root"
        )
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = stat.S_IMODE(found.st_mode)
        raise UsageError(
            f"{shown}: other users can read or write it (mode {mode:04o}); expected 0600: chmod 600 {file}"
        )


def _parsed(data: bytes, source: str) -> tuple[bytes, ...]:
    """Parse the content of a file or of another ``source``; raises ``UsageError`` if it is malformed."""
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    if not lines or len(lines) > MOST_LINES or len(data) > MOST_BYTES:
        raise UsageError(
            f"{source}: {len(lines) or 'no'} lines; expected one secret, or during a rotation two; {REMEDY}"
        )
    if any(len(line) < LEAST_CHARS for line in lines):
        raise UsageError(f"{source}: expected a secret of at least {LEAST_CHARS} characters; {REMEDY}")
    return tuple(lines)


def etcd_access(settings: Settings, password: str) -> EtcdAccess:
    """Return the access to etcd; ``password``: from the environment.

    Raises ``UsageError``: it cannot be read, or is missing.
    """
    if settings.etcd_password_file is not None:
        try:
            password = settings.etcd_password_file.read_text(encoding="utf-8").rstrip("\n")
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


@dataclass(frozen=True)
class SecretVariables:
    """The secrets that were in the environment."""

    etcd_password: str = field(default="", repr=False)
    """Empty if it was not set."""
    secret: str | None = field(default=None, repr=False)
    """Of the run; None if it was not set. See :func:`run_secret`."""


def take_secret_variables() -> SecretVariables:
    """Take them out of the environment of this process, before any process is started that would inherit it."""
    return SecretVariables(_take(ETCD_PASSWORD) or "", _take(SECRET))


def _take(variable: str) -> str | None:
    value = os.environ.get(variable)
    if value is not None:
        import ctypes  # only needed with a secret

        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        if (address := libc.getenv(variable.encode())) is not None:
            ctypes.memset(address, 0, len(os.fsencode(value)))  # the kernel shows this memory: ps e
        del os.environ[variable]
    return value
