"""The launchers that are measured beside each other: how each is started on one node."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Place:
    """Where one node of a scene is started."""

    node: str
    slots: int
    port: int
    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"


@dataclass(frozen=True)
class Launcher:
    """``name`` is what the tables show."""

    name: str
    command: Callable[[Place], list[str]]
    environment: dict[str, str] = field(default_factory=dict)
    has_host: bool = True
    """Whether one of the nodes hosts the store."""


def _elastic_agent(place: Place) -> list[str]:
    """Our own, at its defaults but for what keeps two agents of one machine apart."""
    command = [sys.executable, "-m", "elastic_agent", *_common(place, "1:4")]
    command += ["--node-id", place.node, "--state-dir", str(place.folder / place.node)]
    return [*command, "--event-journal", str(place.journal), str(WORKER)]


def elastic_agent_on_etcd(endpoint: str) -> Launcher:
    """Our own, meeting in the etcd at this endpoint; every scene under keys of its own."""

    def command(place: Place) -> list[str]:
        common = _common(place, "1:4")
        common[common.index("--rdzv-endpoint") + 1] = endpoint
        etcd = ["--rdzv-backend", "etcd", "--etcd-prefix", f"/benchmark/{place.port}"]
        agent = ["--node-id", place.node, "--state-dir", str(place.folder / place.node)]
        start = [sys.executable, "-m", "elastic_agent", *common, *etcd, *agent]
        return [*start, "--event-journal", str(place.journal), str(WORKER)]

    return Launcher("elastic-agent, etcd", command, has_host=False)


def _torchrun(nnodes: str, *more: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d"]
        return [*start, *_common(place, nnodes), *more, str(WORKER)]

    return command


def _common(place: Place, nnodes: str) -> list[str]:
    return [
        *("--rdzv-endpoint", f"127.0.0.1:{place.port}"),
        *("--rdzv-id", "benchmark"),
        *("--nnodes", nnodes),
        *("--nproc-per-node", str(place.slots)),
        *("--max-restarts", "100"),
    ]


OURS = Launcher("elastic-agent", _elastic_agent)
TORCHRUN = Launcher("torchrun 1:4", _torchrun("1:4"))
TORCHRUN_FIXED = Launcher("torchrun 2:2", _torchrun("2:2"))
TORCHRUN_TUNED = Launcher(
    "torchrun 1:4 tuned",
    _torchrun("1:4", "--rdzv-conf", "last_call_timeout=1"),
    {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
)
