"""The end of the agent's part in a run, as the agent tells `elastic_agent.launch` in a file."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from elastic_agent.files import write_atomically

FILE = "outcome.json"
"""In the folder of the launch."""


class FailedWorker(Struct, frozen=True):
    """A worker of this node that failed; ``returncode`` is negative for a signal."""

    rank: int
    local_rank: int
    pid: int
    returncode: int


class LaunchOutcome(Struct, frozen=True):
    """The end of the agent's part."""

    started: bool
    """The agent took part in a run."""
    reason: str
    generation: int = 0
    """The last one in which workers of this node were started; 0 without any."""
    ranks: tuple[int, ...] = ()
    """The global ranks of this node's workers in it."""
    failed: tuple[FailedWorker, ...] = ()
    """The workers that failed in it, before the others were stopped."""

    @staticmethod
    def read(folder: Path) -> LaunchOutcome | None:
        """Read what the agent wrote into the folder; None: nothing."""
        try:
            return msgspec.json.decode((folder / FILE).read_bytes(), type=LaunchOutcome)
        except FileNotFoundError:
            return None

    def write(self, folder: Path) -> None:
        """Write it into the folder. Raises OSError."""
        write_atomically(folder / FILE, msgspec.json.encode(self))
