"""The history of a run on an agent's disk, so that generations never repeat when the store is lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
from concurrent.futures import Future
from pathlib import Path

import msgspec

from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.protocol import History, RecordError, decode, encode

from .disk_thread import DiskThread

KEPT_SETTLED = 200
"""How many runs that ended in order are kept, the newest."""

KEPT_UNNAMED = 200
"""How many runs without a given name that did not end in order are kept, the newest; named ones all are."""

SAVE_TIMEOUT_S = 1.0
"""How long a write is waited for. What it records is less urgent than the leases that go on meanwhile."""

LOAD_TIMEOUT_S = 5.0
"""The same of a read, without whose result a run cannot be resumed."""

_SETTLED = re.compile(r"\d{16}-\d{16}-11\.json")
_UNNAMED = re.compile(r"run-[0-9a-f]{8}")


def new_run_id() -> str:
    """A name for a run that was given none."""
    return f"run-{secrets.token_hex(4)}"


def c10d_store(port: int) -> str:
    """The name of a c10d store that this machine serves; it does not depend on the name that clients dial."""
    return f"c10d {platform.node()}:{port}"


class RunHistoryStore:
    """A folder per run in the agent's state directory; shared by the agents of a machine.

    Each state of a run has a file of its own, whose name sorts as the states rank: a late write of an older state
    does not overwrite a newer one, and no lock is needed. Older files are removed.

    Written by rename, without fsync: what must be survived is the death of a process. A machine that loses its
    power is gone for longer than a lease, and by then no worker of the old store's worlds runs any more.
    """

    def __init__(self, state_dir: Path, store: str | None = None) -> None:
        """``store``: part of the runs' names on disk besides the run id; None: the run id alone."""
        self._runs = state_dir / "runs"
        self._suffix = f"={hashlib.sha256(store.encode()).hexdigest()[:12]}" if store is not None else ""
        self._nodes = state_dir / "nodes"
        self._own: set[str] = set()
        """Runs whose history this process writes."""

    def load(self, run_id: str) -> History | None:
        """The history of the run, or None; an unreadable file counts as none."""
        folder = self._folder(run_id)
        for name in reversed(_states(folder)):
            with contextlib.suppress(OSError, RecordError):
                return decode(History, (folder / name).read_bytes())
        return None

    def save(self, run_id: str, history: History) -> None:
        """Store this history, unless a newer one is stored.

        Raises:
            OSError: the state directory cannot be written.
        """
        known = self.load(run_id)
        if known is not None and known.rank > history.rank:
            return
        self._own.add(run_id)
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
        if known is None or (history.settled and not known.settled):
            self._prune()

    def settle(self, run_id: str) -> None:
        """If the history has an outcome: agents that start from now on begin a new run under that name."""
        known = self.load(run_id)
        if known is not None and known.outcome is not None and not known.settled:
            # If that fails, the run is over for every later agent, which is an answer too.
            with contextlib.suppress(OSError):
                self.save(run_id, msgspec.structs.replace(known, settled=True))

    def _prune(self) -> None:
        """Forget the oldest runs that ended in order (one of that name would begin at generation 1 again), and the
        oldest unnamed ones that were killed.

        A run that begins again meanwhile has a newer state in its folder, which is not touched.
        """
        folders: list[Path] = []
        with contextlib.suppress(OSError):
            folders = [self._runs / name for name in os.listdir(self._runs)]
        if len(folders) <= min(KEPT_SETTLED, KEPT_UNNAMED):
            return
        settled: list[Path] = []
        killed: list[Path] = []
        for folder in folders:
            states = _states(folder)
            if states and _SETTLED.fullmatch(states[-1]):
                settled.append(folder / states[-1])
            elif states and self._is_over(folder.name.removesuffix(".run").partition("=")[0]):
                killed.append(folder / states[-1])
        too_many = all_but_newest(settled, KEPT_SETTLED) + all_but_newest(killed, KEPT_UNNAMED)
        for _, state in too_many:
            with contextlib.suppress(OSError):  # another agent of this machine prunes, too
                state.unlink()
                state.parent.rmdir()  # fails if there is more in it

    def _is_over(self, run_id: str) -> bool:
        """Whether no agent takes part in an unnamed run: the ids of its nodes are not on disk either."""
        is_known = run_id in self._own or (self._nodes / run_id).exists()
        return _UNNAMED.fullmatch(run_id) is not None and not is_known

    def _folder(self, run_id: str) -> Path:
        return self._runs / f"{run_id}{self._suffix}.run"  # run ids are file-safe and without "="


class BoundedRunHistoryStore(RunHistoryStore):
    """The same on a disk that may hang, with time limits. May be used by several threads."""

    def __init__(self, history_store: RunHistoryStore) -> None:
        """``history_store``: is used in a thread of its own."""
        self._history_store = history_store
        self._disk = DiskThread("state-directory")

    def load(self, run_id: str) -> History | None:
        """The history of the run, or None.

        Raises:
            TimeoutError: the disk does not answer; a history may exist.
        """
        return self._disk.call(f"load {run_id}", lambda: self._history_store.load(run_id), LOAD_TIMEOUT_S)

    def save(self, run_id: str, history: History) -> None:
        """Store this history, unless a newer one is stored.

        Raises:
            TimeoutError: the disk does not answer; this, or what is to be saved later, is written when it does.
            OSError: the state directory cannot be written.
        """
        self._disk.call(f"save {run_id}", lambda: self._history_store.save(run_id, history), SAVE_TIMEOUT_S)

    def save_soon(self, run_id: str, history: History) -> Future[None]:
        """The same without waiting: in order, and only the newest of what the disk has not taken yet."""
        return self._disk.submit(f"save {run_id}", lambda: self._history_store.save(run_id, history))

    def settle(self, run_id: str) -> None:
        """If the history has an outcome: agents that start from now on begin a new run under that name."""
        with contextlib.suppress(TimeoutError):  # it is done later, if this process lives to see it
            self._disk.call(f"settle {run_id}", lambda: self._history_store.settle(run_id), SAVE_TIMEOUT_S)


class VolatileRunHistoryStore(RunHistoryStore):
    """For a run that cannot be resumed: it ends with this process, and so does its history."""

    def __init__(self) -> None:
        self._histories: dict[str, History] = {}

    def load(self, run_id: str) -> History | None:
        """The history of the run, or None."""
        return self._histories.get(run_id)

    def save(self, run_id: str, history: History) -> None:
        """Store this history, unless a newer one is stored."""
        known = self.load(run_id)
        if known is None or known.rank <= history.rank:
            self._histories[run_id] = history


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
