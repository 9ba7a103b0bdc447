"""Which run a job without a given run id was part of when its agent was killed."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import msgspec

from elastic_agent.files import all_but_newest, write_atomically
from elastic_agent.protocol import Name

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
        return self._folder / f"{hashlib.sha256(job.encode()).hexdigest()[:32]}.json"


def _run_in(file: Path) -> str | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_JobFile).run_id
    except (OSError, ValueError, RecursionError):
        return None
