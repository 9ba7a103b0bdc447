"""The launchers that are measured beside each other: how each is started on one node."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
WORKER = SCRIPTS / "collectives.py"
ADDRESSES = {"host": "127.0.0.1", "peer": "127.0.0.2", "third": "127.0.0.3"}
"""Of the nodes, where each needs one of its own."""
FT_LAUNCHER_COMMAND = "ft_launcher"


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
    keeps_journal: bool = False
    """Whether it is ours, and writes down what happens when."""
    store: Callable[[int, Path], list[str]] | None = None
    """What serves the store on machines that run no workers, by its port and folder; None: the nodes host it."""


def elastic_agent(name: str, nnodes: str = "1:4", *more: str) -> Launcher:
    """Our own, at its defaults but for ``more`` and what keeps two agents of one machine apart."""

    def command(place: Place) -> list[str]:
        own = ["--node-id", place.node, "--state-dir", str(place.folder / place.node)]
        own += ["--event-journal", str(place.journal)]
        start = [sys.executable, "-m", "elastic_agent"]
        return [*start, *_endpoint(place), *_common(place, nnodes), *more, *own, str(WORKER)]

    return Launcher(name, command, keeps_journal=True)


def on_several_hosts(
    name: str, *more: str, store: Callable[[int, Path], list[str]] | None = None
) -> Launcher:
    """Our own with the store on three hosts, of which each node is one unless ``store`` serves it."""

    def command(place: Place) -> list[str]:
        endpoint = ["--rdzv-endpoint", _three(place.port)]
        own = ["--local-addr", ADDRESSES[place.node]] if store is None else []
        return [*OURS.command(place)[:-1], *endpoint, *own, *more, str(WORKER)]

    return replace(OURS, name=name, command=command, store=store)


def _three(port: int) -> str:
    return ",".join(f"{address}:{port}" for address in ADDRESSES.values())


def _serve(port: int, folder: Path) -> list[str]:
    """All three members of an etcd."""
    own = ["--rdzv-endpoint", _three(port), "--state-dir", str(folder / "store")]
    return [sys.executable, "-m", "elastic_agent", "serve", *own]


def running(launcher: Launcher, script: str) -> Launcher:
    """The same launcher with another of the benchmarks' scripts."""

    def command(place: Place) -> list[str]:
        return [*launcher.command(place)[:-1], str(SCRIPTS / script)]

    return replace(launcher, command=command)


def ft_launcher() -> Launcher | None:
    """NVIDIA's (nvidia-resiliency-ext), tuned like torchrun, if its command is on the path."""
    if shutil.which(FT_LAUNCHER_COMMAND) is None:
        return None
    start = [FT_LAUNCHER_COMMAND, "--ignore-missing-fault-tol-cfg"]
    return Launcher("ft_launcher 1:4 tuned", _torch_like(start, "1:4", *TUNED), UNSHARED_STORE)


def _torch_like(start: list[str], nnodes: str, *more: str) -> Callable[[Place], list[str]]:
    def command(place: Place) -> list[str]:
        common = [*_endpoint(place), "--rdzv-backend", "c10d", *_common(place, nnodes)]
        return [*start, *common, *more, str(WORKER)]

    return command


def _torchrun(nnodes: str, *more: str) -> Callable[[Place], list[str]]:
    return _torch_like([sys.executable, "-m", "torch.distributed.run"], nnodes, *more)


def _endpoint(place: Place) -> list[str]:
    return ["--rdzv-endpoint", f"127.0.0.1:{place.port}"]


def _common(place: Place, nnodes: str) -> list[str]:
    return [
        *("--rdzv-id", "benchmark"),
        *("--nnodes", nnodes),
        *("--nproc-per-node", str(place.slots)),
        *("--max-restarts", "100"),
    ]


TUNED = ("--rdzv-conf", "last_call_timeout=1")
UNSHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

OURS = elastic_agent("elastic-agent")
OURS_COLD = elastic_agent("elastic-agent cold", "1:4", "--worker-start", "cold")
OURS_THREE = on_several_hosts("elastic-agent, three hosts named")
OURS_ETCD = on_several_hosts("elastic-agent, etcd", "--rdzv-backend", "etcd", store=_serve)
OURS_FIXED = elastic_agent("elastic-agent 2:2", "2:2")
TORCHRUN = Launcher("torchrun 1:4", _torchrun("1:4"))
TORCHRUN_FIXED = Launcher("torchrun 2:2", _torchrun("2:2"))
TORCHRUN_TUNED = Launcher("torchrun 1:4 tuned", _torchrun("1:4", *TUNED), UNSHARED_STORE)
