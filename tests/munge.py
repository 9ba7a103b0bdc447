"""A MUNGE of the tests' own: its daemon, and the programs ``munge`` and ``unmunge`` that talk to it."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

import pytest

from tests.waiting import wait_for

PROGRAMS = ("munged", "munge", "unmunge", "setpriv")
STRANGER = 61004
"""The user id of another user of the machine."""


def need_munge() -> None:
    """Skip where MUNGE cannot be had."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        pytest.skip(f"no {', '.join(missing)} here (Debian: munge, util-linux)")
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")


class MungeDaemon:
    """``munged`` with a key of its own."""

    def __enter__(self) -> Self:
        self._folder = Path(tempfile.mkdtemp(prefix="munge-"))
        self._folder.chmod(0o755)  # other users connect to its socket
        self._socket = self._folder / "socket"
        key = self._folder / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={self._folder / name}" for name in ("key", "pid", "log", "seed")]
        self._daemon = subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig",
                "TERM",
                "munged",
                "--foreground",
                "--force",
                f"--socket={self._socket}",
                *files,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for("munged's socket", self._socket.exists)  # it tells only a parent that it leaves, as a daemon
        return self

    def __exit__(self, *_: object) -> None:
        self._daemon.terminate()
        self._daemon.wait()
        shutil.rmtree(self._folder)

    def path(self, user: int | None = None) -> str:
        """A PATH with programs that talk to this daemon, as another user if one is given."""
        folder = self._folder / f"programs-{user}"
        if not folder.exists():
            folder.mkdir()
            become = f"setpriv --reuid={user} --regid={user} --clear-groups " if user is not None else ""
            for name in ("munge", "unmunge"):
                program = folder / name
                program.write_text(
                    f'#!/bin/sh\nexec {become}{shutil.which(name)} --socket={self._socket} "$@"\n'
                )
                program.chmod(0o755)
        return f"{folder}:{os.environ['PATH']}"
