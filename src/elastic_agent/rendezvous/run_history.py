"""The history of a run on an agent's disk, so that generations never repeat when the store is lost."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import secrets
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec

from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.protocol import Plan, RecordError, decode, encode

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
    """Return a name for a run that was given none."""
    return f"run-{secrets.token_hex(4)}"


def c10d_store(port: int) -> str:
    """Return the name of a c10d store that this machine serves; it does not depend on the name that clients dial."""
    return f"c10d {platform.node()}:{port}"


class RunHistoryStore:
    """A folder per run in the agent's state directory; shared by the agents of a machine.

    Each state of a run has a file of its own, whose name sorts as the states rank: a late write of an older state
    does not overwrite a newer one, and no lock between processes is needed. Older files are removed.

    Written by rename, without fsync: what must be survived is the death of a process. A machine that loses its
    power is gone for longer than a lease, and by then no worker of the old store's worlds runs any more.

    The disk may hang, so it is used in a thread of its own.
    """

    def __init__(
        self, state_dir: Path | None, store: str | None = None, disk: DiskThread | None = None
    ) -> None:
        """Prepare; reads and writes nothing.

        Args:
            state_dir: the agent's; None for runs that cannot be resumed: their histories end with this process.
            store: part of the runs' names on disk besides the run id; None: the run id alone.
            disk: uses the disk; None: a thread of this store's own.
        """
        self._runs = state_dir / "runs" if state_dir is not None else None
        self._in_memory: dict[str, Plan] = {}
        """What is kept without a state directory."""
        self._suffix = f"={hashlib.sha256(store.encode()).hexdigest()[:12]}" if store is not None else ""
        self._disk = disk if disk is not None else DiskThread("state-directory")
        self._lock = threading.Lock()
        self._newest: dict[str, Plan] = {}
        """By run, the newest history that is to be on disk, until it is."""
        self._own: set[str] = set()
        """Runs whose history this process writes."""

    async def load(self, run_id: str) -> Plan | None:
        """Return the history of the run, or None; an unreadable file counts as none.

        Raises:
            TimeoutError: the disk does not answer; a history may exist.
        """
        return await self._disk.call_async(f"load {run_id}", lambda: self._read(run_id), LOAD_TIMEOUT_S)

    async def save(self, run_id: str, history: Plan) -> None:
        """Store this history; returns when it, or a newer one, is on disk.

        Raises:
            TimeoutError: the disk does not answer; this, or what is newer, is written when it does.
            OSError: the state directory cannot be written.
        """
        await self._disk.wait(self.save_soon(run_id, history), SAVE_TIMEOUT_S)

    def save_soon(self, run_id: str, history: Plan) -> Future[None]:
        """Store this history without waiting; the outcome is that of :meth:`save`.

        Of what the disk has not taken yet, only the newest is written: whoever asks later may know less.
        """
        with self._lock:
            newest = max(history, self._newest.get(run_id, history), key=lambda known: known.rank)
            self._newest[run_id] = newest
            return self._disk.submit(f"save {run_id}", lambda: self._write(run_id, newest))

    def settle(self, run_id: str) -> None:
        """Have agents that start from now on begin a new run under that name, if the history has an outcome."""
        # If that fails, the run is over for every later agent, which is an answer too. If it takes long, it is done
        # later, should this process live to see it.
        wait([self._disk.submit(f"settle {run_id}", lambda: self._settle(run_id))], SAVE_TIMEOUT_S)

    # -- in the thread of the disk ---------------------------------------------------------------

    def _read(self, run_id: str) -> Plan | None:
        if self._runs is None:
            return self._in_memory.get(run_id)
        folder = self._folder(self._runs, run_id)
        for name in reversed(_states(folder)):
            with contextlib.suppress(OSError, RecordError):
                return decode(Plan, (folder / name).read_bytes())
        return None

    def _write(self, run_id: str, history: Plan) -> None:
        known = self._read(run_id)
        if known is None or known.rank <= history.rank:
            self._replace(run_id, known, history)
        with self._lock:
            if self._newest.get(run_id) is history:
                del self._newest[run_id]

    def _replace(self, run_id: str, known: Plan | None, history: Plan) -> None:
        if self._runs is None:
            self._in_memory[run_id] = history
            return
        self._own.add(run_id)
        folder = self._folder(self._runs, run_id)
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
            self._prune(self._runs)

    def _settle(self, run_id: str) -> None:
        known = self._read(run_id)
        if known is not None and known.outcome is not None and not known.settled:
            self._write(run_id, msgspec.structs.replace(known, settled=True))

    def _prune(self, runs: Path) -> None:
        """Forget the oldest runs that ended in order (one of that name would begin at generation 1 again), and the
        oldest unnamed ones that were killed.

        A run that begins again meanwhile has a newer state in its folder, which is not touched.
        """
        folders: list[Path] = []
        with contextlib.suppress(OSError):
            folders = [runs / name for name in os.listdir(runs)]
        if len(folders) <= min(KEPT_SETTLED, KEPT_UNNAMED):
            return
        settled: list[Path] = []
        killed: list[Path] = []
        for folder in folders:
            states = _states(folder)
            if states and _SETTLED.fullmatch(states[-1]):
                settled.append(folder / states[-1])
            elif states and self._is_over(folder):
                killed.append(folder / states[-1])
        too_many = all_but_newest(settled, KEPT_SETTLED) + all_but_newest(killed, KEPT_UNNAMED)
        for _, state in too_many:
            with contextlib.suppress(OSError):  # another agent of this machine prunes, too
                state.unlink()
                state.parent.rmdir()  # fails if there is more in it

    def _is_over(self, folder: Path) -> bool:
        """Return whether no agent takes part in an unnamed run: the ids of its nodes are not on disk either."""
        run_id = folder.name.removesuffix(".run").partition("=")[0]
        is_known = run_id in self._own or (folder.parent.parent / "nodes" / run_id).exists()
        return _UNNAMED.fullmatch(run_id) is not None and not is_known

    def _folder(self, runs: Path, run_id: str) -> Path:
        return runs / f"{run_id}{self._suffix}.run"  # run ids are file-safe and without "="


def _state(history: Plan) -> str:
    """Return a file's name; such names sort as the histories rank."""
    generation, sealed, over, settled = history.rank
    return f"{generation:016d}-{sealed + 1:016d}-{over:d}{settled:d}.json"


def _states(folder: Path) -> list[str]:
    """Return the names of all states on disk, in order."""
    try:
        return sorted(
            name for name in os.listdir(folder) if name.endswith(".json") and not name.startswith(".")
        )
    except OSError:
        return []
