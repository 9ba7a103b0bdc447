"""MUNGE, which tells programs on the machines of a cluster as which user another program runs.

``munge`` puts data into a credential: encrypted and authenticated with a key that only the daemons (``munged``) of the
cluster have, and with the user id of the program that made it, which the daemon learns from the kernel. A credential
can be decoded once on each machine, within five minutes, and here only by the user that it is for.
"""

from __future__ import annotations

import re
import secrets
import subprocess
from collections.abc import Sequence

TIMEOUT_S = 5.0
"""For one of its programs; the daemon answers within milliseconds."""

MOST_BYTES = 16384
"""Of a credential; ours have some hundreds."""

UNAUTHORIZED = 18
"""unmunge's exit code for a credential that is for another user."""

_SAFE = ("--cipher=aes256", "--mac=sha256", "--zip=none", "--ttl=0")
"""Not the defaults, which a site can set to no encryption at all. A lifetime of 0: the site's, usually 300 s."""

_UID = re.compile(rb"UID:[ \t]+(?:[0-9]{1,10}|[^\n]*\(([0-9]{1,10})\))")


class MungeError(Exception):
    """A credential could not be made or decoded. ``str()`` is one line: what was seen, and what to do."""

    def __init__(self, problem: str, code: int = 0) -> None:
        """``code``: the exit code of the program, if it ran."""
        super().__init__(problem)
        self.code = code


class Munge:
    """Credentials of this user, for this user. For any thread; each call starts a program."""

    def __init__(self, uid: int) -> None:
        """``uid``: of this user, as MUNGE knows it (in a container, the kernel may show processes another one)."""
        self.uid = uid

    @classmethod
    def of_this_user(cls) -> Munge:
        """Make sure that MUNGE works on this machine. Raises ``MungeError``: it does not."""
        expected = secrets.token_hex(16).encode()
        uid, found = decode(encode(expected))
        if found != expected:
            raise MungeError("unmunge did not return what munge was given; expected a working MUNGE")
        return cls(uid)

    def encode(self, payload: bytes) -> bytes:
        """A credential that only this user can decode. Raises ``MungeError``."""
        return encode(payload, f"--restrict-uid={self.uid}")


def encode(payload: bytes, *options: str) -> bytes:
    """A credential with this payload. Raises ``MungeError``."""
    return _run(("munge", *_SAFE, *options), payload).strip()


def decode(credential: bytes) -> tuple[int, bytes]:
    """The user that made a credential, and its payload. Raises ``MungeError``: it does not count, for any reason."""
    if len(credential) > MOST_BYTES:
        raise MungeError(f"the credential has {len(credential)} bytes; expected {MOST_BYTES} at most")
    return parse_decoded(_run(("unmunge", "--keys=UID"), credential))


def parse_decoded(output: bytes) -> tuple[int, bytes]:
    """User and payload in the output of ``unmunge --keys=UID``. Raises ``MungeError``: it is something else."""
    head, blank, payload = output.partition(b"\n\n")
    found = _UID.fullmatch(head)
    if not blank or found is None:
        raise MungeError(f"unmunge printed {output[:40]!r}; expected the user id of the credential")
    return int(found[1] or head.split()[-1]), payload


def _run(words: Sequence[str], data: bytes) -> bytes:
    """What the program prints, with ``data`` as its input: arguments are visible to all users of the machine."""
    try:
        done = subprocess.run(
            words, input=data, capture_output=True, timeout=TIMEOUT_S, start_new_session=True, check=False
        )
    except OSError as error:
        raise MungeError(
            f"cannot start {words[0]} on this machine: {error.strerror}; expected MUNGE to be installed (package munge)"
        ) from None
    except subprocess.TimeoutExpired:
        raise MungeError(
            f"{words[0]} did not complete within {TIMEOUT_S:g} s; expected a running munged on this machine"
        ) from None
    if done.returncode != 0:
        raise MungeError(
            f"{_one_line(done.stderr) or words[0]} (exit code {done.returncode}); expected a running munged with the "
            "same key and time on all machines",
            done.returncode,
        )
    return done.stdout


def _one_line(output: bytes) -> str:
    """The first line, without control characters."""
    line = output.decode(errors="replace").strip().partition("\n")[0]
    return "".join(character for character in line if character.isprintable())[:200]
