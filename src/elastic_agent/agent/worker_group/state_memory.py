"""The memory in which workers keep their state over restarts: files without a name (memfd) that this process holds."""

from __future__ import annotations

import contextlib
import os

_FILES = 2
"""For each worker: while it writes one copy, the other is complete."""


class StateMemory:
    """Two files for each worker of this node; empty until a worker uses :mod:`elastic_agent.survive`.

    They end with this process, and are accounted to the cgroup of the workers that fill them.
    """

    def __init__(self, slots: int) -> None:
        """Make the files.

        Raises:
            OSError: this process may not have more open files.
        """
        self._files: list[list[int]] = []
        try:
            for _ in range(slots):
                self._files.append([])
                for _ in range(_FILES):
                    self._files[-1].append(os.memfd_create("elastic-agent-state", os.MFD_CLOEXEC))
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[str]:
        """For each slot, its files as its worker can open them, with a colon between."""
        folder = f"/proc/{os.getpid()}/fd"
        return [":".join(f"{folder}/{file}" for file in files) for files in self._files]

    def close(self) -> None:
        """Give the memory back. Repeatable; only when no worker runs."""
        for files in self._files:
            for file in files:
                with contextlib.suppress(OSError):
                    os.close(file)
        self._files = []
