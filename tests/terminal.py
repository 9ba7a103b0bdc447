"""A terminal with a program in its foreground."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import termios
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from .waiting import GUARD_S


class Terminal:
    """A pseudo-terminal, what a program shows on it, and what is typed."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], folder: Path) -> None:
        """Start the program in this folder."""
        self._ours, theirs = os.openpty()
        self._shown = bytearray()
        self.process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environ,
            cwd=folder,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self._news, self._is_closed = threading.Condition(), os.eventfd(0)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # EIO: nobody has the terminal open any more
            while self._is_closed not in select.select([self._ours, self._is_closed], [], [])[0]:
                data = os.read(self._ours, 4096)
                with self._news:
                    self._shown += data
                    self._news.notify()

    @property
    def shown(self) -> str:
        """What the program has written so far."""
        return self._shown.decode(errors="replace").replace("\r\n", "\n")

    def wait_shown(self, text: str) -> None:
        """Wait until the program has written this."""
        with self._news:
            assert self._news.wait_for(lambda: text in self.shown, GUARD_S), self.shown

    def type(self, keys: bytes) -> None:
        """Type this at the terminal."""
        os.write(self._ours, keys)

    def close(self) -> None:
        """Close the terminal, as a user closes a window."""
        os.eventfd_write(self._is_closed, 1)
        self._reader.join(GUARD_S)
        if self._ours >= 0:
            os.close(self._ours)
        self._ours = -1

    def ended(self) -> int:
        """Wait for the program; returns its exit code."""
        code = self.process.wait(GUARD_S)
        self._reader.join(GUARD_S)
        return code

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.close()
        os.close(self._is_closed)
