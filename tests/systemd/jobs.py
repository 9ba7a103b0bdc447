"""Jobs for the agents in containers: their settings, and what their workers wrote down."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .container import ROOT, USER_ID, Container

AGENT = ROOT / "deploy" / "systemd" / "elastic-agent@.service"
RENDEZVOUS = ROOT / "deploy" / "systemd" / "elastic-rendezvous.service"
TRAIN = Path(__file__).parent / "train.py"
Line = dict[str, Any]

SOON = """\
[Service]
RestartSec=200ms
Environment=OMP_NUM_THREADS=1
"""
"""A drop-in: tests need not wait five seconds for the next try, and have two processors."""

SERVER = """\
[Service]
# The Python of these tests may be installed in a home directory.
ProtectHome=read-only
"""
"""A drop-in for ``elastic-rendezvous``."""

PORT = 29400
"""The usual one: a test's machines have a network of their own."""


@dataclass
class Job:
    """One job, installed on machines as its users would install it; its folder is on the disk that they share."""

    name: str
    machines: list[Container]
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Write its script and its settings."""
        self.machine = self.machines[0]
        self.unit = f"elastic-agent@{self.name}.service"
        self.folder = self.machine.shared / self.name
        self.folder.mkdir()
        shutil.copy(TRAIN, self.folder)
        os.chown(self.folder, USER_ID, USER_ID)
        chosen: dict[str, object] = {
            "rdzv_endpoint": f"{self.machine.name}:{PORT}",
            "rdzv_id": self.name,
            "nnodes": "1",
            "nproc_per_node": "1",
            "script": f"/srv/{self.name}/{TRAIN.name}",
            "lease_ttl": 2.0,
            "fence_margin": 0.5,
            "settle": 0.3,
            **self.settings,
        }
        text = "\n".join(f"{key} = {json.dumps(value)}" for key, value in chosen.items())
        for machine in self.machines:
            machine.configure(self.name, text)

    def start(self) -> None:
        """Enable and start it everywhere, and wait until it is up."""
        for machine in self.machines:
            machine.systemctl("enable", "--now", "--no-block", self.unit)
        for machine in self.machines:
            machine.wait_state(self.unit, "active")

    def finish(self) -> None:
        """Training may end."""
        (self.folder / "finish").touch()

    # -- what happened --------------------------------------------------------------------------

    def lines(self, kind: str) -> list[Line]:
        """What workers wrote down, of this kind."""
        try:
            written = (self.folder / "steps.jsonl").read_text()
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in written[: written.rfind("\n") + 1].splitlines()]
        return [line for line in lines if line["kind"] == kind]

    def checkpoint(self) -> Line:
        """The newest checkpoint."""
        found: Line = json.loads((self.folder / "checkpoint.json").read_text())
        return found

    def wait_training(self, *nodes: str, after: int = 0) -> int:
        """Until exactly these nodes take steps together in a generation above ``after``; which one."""

        def look() -> int | None:
            steps = self.lines("step")
            newest = max((line["generation"] for line in steps), default=0)
            taking = {line["node"] for line in steps if line["generation"] == newest}
            return newest if newest > after and taking == {*nodes} else None

        return self.machine.wait(f"steps of {', '.join(nodes)} in a generation above {after}", look)

    def worker(self, machine: Container | None = None) -> int:
        """The newest worker's process on a machine, by its id outside."""
        machine = machine or self.machine
        pids = [line["pid"] for line in self.lines("begun") if line["node"] == machine.name]
        return machine.outside(pids[-1])

    def ranks(self, generation: int) -> dict[str, int]:
        """Which rank each node's worker had."""
        return {line["node"]: line["rank"] for line in self.lines("step") if line["generation"] == generation}

    def steps(self, generation: int) -> list[int]:
        """The steps that were taken in a generation."""
        return [line["step"] for line in self.lines("step") if line["generation"] == generation]

    def ended(self, machine: Container | None = None) -> dict[str, str]:
        """How systemd says that the service ended."""
        return (machine or self.machine).show(
            self.unit, "ActiveState", "Result", "ExecMainStatus", "NRestarts"
        )

    def status(self, machine: Container | None = None) -> str:
        """The status line that systemd shows."""
        return (machine or self.machine).show(self.unit, "StatusText")["StatusText"]

    def wait_status(self, pattern: str, machine: Container | None = None) -> str:
        """Until the status line matches."""
        found = (machine or self.machine).wait(
            f"a status like {pattern!r}", lambda: re.fullmatch(pattern, self.status(machine))
        )
        return found.group()
