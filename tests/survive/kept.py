"""Agents whose workers are kept, and what these workers have told (see training.py)."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.faults.cluster import LEASE_S, Cluster

TRAINING = Path(__file__).parent / "training.py"
ENDLESS = 10**9
"""Steps, for a training that ends when the test says so."""


class Kept(Cluster):
    """A run of one or two nodes with ``--survive keep``."""

    def __init__(self, folder: Path, *options: str, lease_s: float = LEASE_S) -> None:
        """Nothing is started yet; ``options`` are those of all agents."""
        super().__init__(folder, "1:2", ("--survive", "keep", *options), lease_s=lease_s)

    def begin(self, node: str, slots: int = 2, steps: int = ENDLESS, how: str = "") -> None:
        """Start an agent whose workers train."""
        arguments = (str(self.folder), str(steps), how)
        self.start(node, slots, state=f"state-{node}", script=TRAINING, arguments=arguments)

    def of(self, worker: str, kind: str, key: str) -> list[Any]:
        """Return one value of all notes of a kind, over all processes of the worker."""
        return [note[key] for note in self.notes(kind) if note["worker_id"] == worker]

    def processes_of(self, *workers: str) -> list[int]:
        """Return how many processes of each have trained."""
        return [len({*self.of(worker, "world", "pid")}) for worker in workers]

    def kept(self, *workers: str) -> list[str]:
        """Return those of these workers that have trained in one process only.

        One of them may be missing: after a kill, gloo sometimes leaves another worker waiting for a send whose
        connection has ended. That worker does not park in time, and is started again.
        """
        kept = [worker for worker in workers if self.processes_of(worker) == [1]]
        assert len(kept) >= len(workers) - 1, f"only {kept} of {workers}"
        return kept

    def digests(self) -> set[str]:
        """Return what the workers that have ended the training say of its state."""
        return {note["digest"] for note in self.notes("done")}

    def kill(self, worker: str) -> None:
        """Kill its newest process."""
        os.kill(self.pid_of(worker), signal.SIGKILL)
