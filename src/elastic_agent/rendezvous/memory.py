"""What an agent keeps on disk of a run, so that generations never repeat when the store is lost."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from elastic_agent.protocol.records import History, RecordError, decode, encode


class RunMemory:
    """One small file per run in the agent's state directory; shared by the agents of a machine.

    Written by rename, without fsync: what must be survived is the death of a process. A machine that loses its
    power is gone for longer than a lease, and by then no worker of the old store's worlds runs any more.
    """

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "runs"

    def load(self, run_id: str) -> History | None:
        """What is remembered of the run, or None; an unreadable file counts as nothing."""
        try:
            return decode(History, self._path(run_id).read_bytes())
        except (OSError, RecordError):
            return None

    def save(self, run_id: str, history: History) -> None:
        """Remember this, unless something newer is remembered already.

        Raises:
            OSError: the state directory cannot be written.
        """
        known = self.load(run_id)
        if known is not None and known.rank > history.rank:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path(run_id), encode(history))

    def settle(self, run_id: str) -> None:
        """If a verdict is remembered: whoever comes from now on begins a new run under that name."""
        known = self.load(run_id)
        if known is None or known.verdict is None or known.settled:
            return
        with contextlib.suppress(OSError):  # then the run is over for whoever comes, which is an answer too
            write_atomically(self._path(run_id), encode(msgspec.structs.replace(known, settled=True)))

    def _path(self, run_id: str) -> Path:
        return self._folder / f"{run_id}.json"  # run ids are file-safe by their character set


def write_atomically(path: Path, data: bytes) -> None:
    """Replace the file's content in one step; a reader sees the old or the new, never a mixture."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
