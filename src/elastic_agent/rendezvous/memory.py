"""What an agent keeps on disk of a run, so that generations never repeat when the store is lost."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path

import msgspec

from elastic_agent.protocol.records import History, RecordError, decode, encode

KEPT_SETTLED = 200
"""So many runs that ended in order are remembered, the newest; all others are."""

_SETTLED = re.compile(r"\d{16}-\d{16}-11\.json")


class RunMemory:
    """A folder per run in the agent's state directory; shared by the agents of a machine.

    Each state of a run has a file of its own, whose name sorts as the states rank: whoever writes late, with an
    older state, does not write over a newer one, and nobody needs a lock. Older files are removed.

    Written by rename, without fsync: what must be survived is the death of a process. A machine that loses its
    power is gone for longer than a lease, and by then no worker of the old store's worlds runs any more.
    """

    def __init__(self, state_dir: Path) -> None:
        self._runs = state_dir / "runs"

    def load(self, run_id: str) -> History | None:
        """What is remembered of the run, or None; an unreadable file counts as nothing."""
        folder = self._folder(run_id)
        for name in reversed(_states(folder)):
            with contextlib.suppress(OSError, RecordError):
                return decode(History, (folder / name).read_bytes())
        return None

    def save(self, run_id: str, history: History) -> None:
        """Remember this, unless something newer is remembered already.

        Raises:
            OSError: the state directory cannot be written.
        """
        known = self.load(run_id)
        if known is not None and known.rank > history.rank:
            return
        folder = self._folder(run_id)
        state = _state(history)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / state, encode(history))
        except FileNotFoundError:  # removed in between, see _prune
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(folder / state, encode(history))
        for other in _states(folder):
            if other < state:
                (folder / other).unlink(missing_ok=True)
        if history.settled and (known is None or not known.settled):
            self._prune()

    def settle(self, run_id: str) -> None:
        """If a verdict is remembered: whoever comes from now on begins a new run under that name."""
        known = self.load(run_id)
        if known is not None and known.verdict is not None and not known.settled:
            with contextlib.suppress(
                OSError
            ):  # then the run is over for whoever comes, which is an answer too
                self.save(run_id, msgspec.structs.replace(known, settled=True))

    def _prune(self) -> None:
        """Forget the oldest of the runs that ended in order: one of that name would begin at generation 1 again.

        A run that begins again meanwhile has a newer state in its folder, which is not touched.
        """
        folders: list[Path] = []
        with contextlib.suppress(OSError):
            folders = [self._runs / name for name in os.listdir(self._runs)]
        if len(folders) <= KEPT_SETTLED:
            return
        settled: list[tuple[float, Path]] = []
        for folder in folders:
            states = _states(folder)
            if states and _SETTLED.fullmatch(states[-1]):
                with contextlib.suppress(OSError):  # another agent of this machine prunes, too
                    settled.append(((folder / states[-1]).stat().st_mtime, folder / states[-1]))
        settled.sort(reverse=True)
        for _, state in settled[KEPT_SETTLED:]:
            with contextlib.suppress(OSError):
                state.unlink()
                state.parent.rmdir()  # fails if there is more in it

    def _folder(self, run_id: str) -> Path:
        return self._runs / f"{run_id}.run"  # run ids are file-safe by their character set


def _state(history: History) -> str:
    """A file's name; such names sort as the histories rank."""
    generation, sealed, over, settled = history.rank
    return f"{generation:016d}-{sealed + 1:016d}-{over:d}{settled:d}.json"


def _states(folder: Path) -> list[str]:
    """The names of all states on disk, in order."""
    try:
        return sorted(
            name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith(".")
        )
    except OSError:
        return []


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
