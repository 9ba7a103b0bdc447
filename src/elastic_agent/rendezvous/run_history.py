"""The records of runs on an agent's disk.

Their histories, so that generations never repeat when the store is lost; and which run a job without a given run id was
part of when its agent was killed, or when it was stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import threading
from concurrent.futures import Future, wait
from pathlib import Path

import msgspec

from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.protocol import Name, Plan, RecordError, decode, encode
from elastic_agent.transport import DiskThread

KEPT_RUNS = 400
"""The number of runs without an agent on this machine that are kept, those that were written last."""

SAVE_TIMEOUT_S = 1.0
"""The time for which a write is waited for. What it records is less urgent than the leases that go on meanwhile."""

LOAD_TIMEOUT_S = 5.0
"""The same of a read, without whose result a run cannot be resumed."""


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

    def __init__(self, state_dir: Path, store: str | None = None, disk: DiskThread | None = None) -> None:
        """Prepare; reads and writes nothing.

        Args:
            state_dir: the agent's.
            store: part of the runs' names on disk besides the run id; None: the run id alone.
            disk: uses the disk; None: a thread of this store's own.
        """
        self._runs = state_dir / "runs"
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
        folder = self._folder(run_id)
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
        (self._own.discard if history.settled else self._own.add)(run_id)
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
        if known is None:
            self._prune()

    def _settle(self, run_id: str) -> None:
        known = self._read(run_id)
        if known is not None and known.is_terminal and not known.settled:
            self._write(run_id, msgspec.structs.replace(known, settled=True))

    def _prune(self) -> None:
        """Forget the oldest runs that no agent here takes part in: one of that name begins at generation 1 again."""
        idle = [folder for folder in self._runs.iterdir() if not self._is_used(folder)]
        for _, folder in all_but_newest(idle, KEPT_RUNS):
            for state in _states(folder):
                (folder / state).unlink(missing_ok=True)  # another agent of this machine prunes, too
            with contextlib.suppress(OSError):  # such an agent has begun the run again
                folder.rmdir()

    def _is_used(self, folder: Path) -> bool:
        """Return whether an agent takes part in the run: then the ids of its nodes are on disk, too."""
        run_id = folder.name.removesuffix(".run").partition("=")[0]
        return run_id in self._own or (folder.parent.parent / "nodes" / run_id).exists()

    def _folder(self, run_id: str) -> Path:
        return self._runs / f"{run_id}{self._suffix}.run"  # run ids are file-safe and without "="


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


KEPT_JOBS = 200
"""So many files of agents that were killed are kept, the newest; an agent that ends removes its own."""


class _JobFile(msgspec.Struct):
    run_id: Name


class JobFiles:
    """A file per job in the agent's state directory. A job is any text: its endpoint, and what its workers run."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / "jobs"
        self._nodes = state_dir / "nodes"

    def run_of(self, job: str) -> str | None:
        """Return the run that this machine was part of when it went down, if it did not end in order."""
        return _run_in(self._file(job))

    def write(self, job: str, run_id: str) -> None:
        """Store the job's run; remove the files of the oldest jobs whose agents were killed.

        Raises:
            OSError: the state directory cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file(job), msgspec.json.encode(_JobFile(run_id)))
        for _, file in all_but_newest(self._folder.glob("*.json"), KEPT_JOBS):
            run_id_there = _run_in(file)
            # Its node ids are removed, too.
            if run_id_there is None or not (self._nodes / run_id_there).exists():
                with contextlib.suppress(OSError):
                    file.unlink()

    def remove(self, job: str) -> None:
        """Have the job's next start be a new run."""
        self._file(job).unlink(missing_ok=True)

    def _file(self, job: str) -> Path:
        name = hashlib.sha256(job.encode(errors="surrogateescape")).hexdigest()[:32]
        return self._folder / f"{name}.json"


def _run_in(file: Path) -> str | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_JobFile).run_id
    except (OSError, ValueError, RecursionError):
        return None
