"""Other users of the machine, for tests of what they cannot do; and agents of a user who is not root."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import status_field

OTHER_UID, ORDINARY_UID = 61003, 61005

SPEAKS_TO_THE_STORE = struct.pack("=BIBI", 0, 0x3C85F7CE, 13, 1)
"""As a client of torch's store does: it answers the last four bytes."""

_CAP_SETUID = 1 << 7

needs_other_users = pytest.mark.skipif(
    not int(status_field(os.getpid(), "CapEff"), 16) & _CAP_SETUID, reason="only root can act as another user"
)
"""For tests that act as another user; they may themselves run as an ordinary one with this capability."""

_BECOME = """
import encodings.idna, os, socket, struct, sys  # all that cannot be read later
uid = int(sys.argv.pop(1))
os.setresuid(uid, uid, uid)
"""

_CONNECT = """
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 60) as sock:
    sock.sendall(bytes.fromhex(sys.argv[3]))
    try:
        print(sock.recv(4))
    except ConnectionResetError:  # closed before what was sent was read
        print(b"")
"""


def run_as(uid: int, code: str, *arguments: str) -> str:
    """Return what a program of another user prints."""
    command = [sys.executable, "-c", _BECOME + code, str(uid), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_refused(uid: int, host: str, port: int, says: bytes = b"") -> bool:
    """Return whether a connection of another user is closed without an answer to what it says."""
    return run_as(uid, _CONNECT, host, str(port), says.hex()) == "b''\n"


_LET_IN_AND_RUN = """
while [ "$1" != -- ]; do
    mount -t tmpfs none /dev/shm
    mkdir /dev/shm/upper /dev/shm/work
    mount -t overlay none -o "lowerdir=$1,upperdir=/dev/shm/upper,workdir=/dev/shm/work" "$1"
    chmod o+x "$1"
    umount -l /dev/shm
    shift
done
cd "$PWD"
shift
exec "$@"
"""


def as_ordinary_user(folder: Path, *capabilities: str) -> list[str]:
    """Return a command that runs another one as an ordinary user; without root, as it is.

    A clone of root's and its Python are often in a folder that only root can search: in a mount namespace of the
    command's own, that user can, too. Skips the test where that is not enough.

    Args:
        folder: which this user can get to; it becomes this user's, with all that is in it.
        capabilities: what this user may do nevertheless.
    """
    if os.geteuid() != 0:
        return []
    missing = [program for program in ("setpriv", "unshare") if shutil.which(program) is None]
    if missing:
        pytest.skip(f"as root this needs {', '.join(missing)} (util-linux)")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ORDINARY_UID, ORDINARY_UID)
    closed = _closed_folders()
    let_in = [
        "unshare",
        "--mount",
        "--propagation=private",
        "sh",
        "-ec",
        _LET_IN_AND_RUN,
        "sh",
        *closed,
        "--",
    ]
    command = let_in if closed else []
    command += ["setpriv", f"--reuid={ORDINARY_UID}", f"--regid={ORDINARY_UID}"]
    if capabilities:
        kept = ",".join(f"+{name}" for name in capabilities)
        command += [f"--inh-caps={kept}", f"--ambient-caps={kept}"]
    command += ["--clear-groups", "env", f"HOME={folder}"]
    reads = f"import elastic_agent; open({__file__!r})"
    tried = subprocess.run([*command, sys.executable, "-c", reads], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"an ordinary user cannot read this clone or its Python: {tried.stderr.strip()}")
    return command


def _closed_folders() -> list[str]:
    """Return the folders above this clone and its Python that others cannot search, outermost first."""
    needed = (Path(__file__), Path(sys.executable), Path(sys.executable).resolve())
    above = {folder for path in needed for folder in path.parents}
    return sorted(str(folder) for folder in above if not folder.stat().st_mode & stat.S_IXOTH)
