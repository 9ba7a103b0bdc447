"""A forked child with the few methods of `subprocess.Popen` that a guard's owner needs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time

from elastic_agent import linux


class ForkedChild:
    """A child made by `os.fork`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Its exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        ends = time.monotonic() + timeout
        while self.returncode is None:
            self._reap()
            left_s = ends - time.monotonic()
            if self.returncode is None:
                if left_s <= 0:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
                linux.await_exit(self.pid, left_s)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def _reap(self) -> None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # it was reaped elsewhere
            self.returncode = 0
        else:
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
