"""``elastic-agent secret``: a new secret for the agents of a run, or certificates for a server from an existing one."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_agent.cli.arguments import CommandParser
from elastic_agent.config.errors import BadValueError, UsageError, quoted
from elastic_agent.config.secrets import new_secret, run_secret
from elastic_agent.config.value_types import HOST, PATH
from elastic_agent.exit_codes import ExitCode
from elastic_agent.files import write_atomically

PAGE = """\
Usage: elastic-agent secret [FILE]
       elastic-agent secret --certificates DIR FILE [NAME...]

Writes a new secret to FILE, which must not exist yet and which only this user can read; without FILE, prints it.
Copy the file to all machines, and start every agent with --secret-file FILE: the agents then accept only connections
of each other, so that others who reach the port of the store cannot join, redirect or end the run.

  --certificates DIR   make certificates from the existing secret FILE for a server on this machine, such as etcd:
                       DIR/ca.pem, DIR/cert.pem and DIR/key.pem, which only this user can read. They are valid for
                       this machine's name and addresses, for localhost, and for each NAME (a host name or address)"""

_KEY, _LOCAL_NAMES = "key.pem", ("localhost", "127.0.0.1", "::1")


def secret(argv: Sequence[str]) -> int:
    """Create a secret, or certificates from one."""
    parser = CommandParser("secret", PAGE, most_words=sys.maxsize)
    parser.add("--certificates", PATH)
    found = parser.read(argv)
    if found.certificates is not None:
        return _write_certificates(found.certificates, found.words)
    if len(found.words) > 1:
        raise UsageError(f"secret: got {quoted(' '.join(found.words))}; expected at most one file name")
    if not found.words:
        print(new_secret(), flush=True)
        return ExitCode.FINISHED
    _write_secret(found.words[0])
    return ExitCode.FINISHED


def _write_secret(file: str) -> None:
    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(f"secret: {quoted(file)} exists already; expected a new file") from None
    except OSError as error:
        raise UsageError(f"secret: cannot create {quoted(file)}: {error.strerror}") from None
    with open(fd, "w") as opened:
        opened.write(f"{new_secret()}\n")


def _write_certificates(folder: Path, arguments: Sequence[str]) -> int:
    if not arguments:
        raise UsageError("secret: --certificates DIR requires the file of a secret: --certificates DIR FILE")
    file, *names = arguments
    checked = [_checked(name) for name in names]
    values = run_secret(Path(file), {}, None)
    from elastic_agent.transport import Secret, own_addresses  # errors are shown before these are loaded

    found = Secret(values)
    pem = found.issue(dict.fromkeys((*_LOCAL_NAMES, os.uname().nodename, *own_addresses(), *checked)))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, data in (("ca.pem", pem.authorities), ("cert.pem", pem.certificate), (_KEY, pem.key)):
            write_atomically(folder / name, data)
    except OSError as error:
        where = quoted(error.filename or folder)
        raise UsageError(f"secret: cannot write {where}: {error.strerror}") from None
    print(
        f"wrote certificates of the secret with key id {found.ids[0]}; start etcd with https:// URLs and "
        f"{_etcd_options(folder)}",
        flush=True,
    )
    return ExitCode.FINISHED


def _checked(name: str) -> str:
    try:
        return str(HOST.parse(name))
    except BadValueError:
        raise UsageError(f"secret: got {quoted(name)}; expected {HOST.accepted}") from None


def _etcd_options(folder: Path) -> str:
    """Return the options of etcd with these files, for its clients and for its other members."""
    ca, cert, key = (shlex.quote(str(folder.absolute() / name)) for name in ("ca.pem", "cert.pem", _KEY))
    kinds = (("", "client-cert-auth"), ("peer-", "peer-client-cert-auth"))
    return " ".join(
        f"--{kind}trusted-ca-file {ca} --{kind}cert-file {cert} --{kind}key-file {key} --{required}"
        for kind, required in kinds
    )
