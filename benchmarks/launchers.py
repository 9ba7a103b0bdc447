"""The launchers that are measured beside each other: how each is started on one node."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

SCRIPTS = Path(__file__).with_name("scripts")
WORKER = SCRIPTS / "collectives.py"
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
    has_host: bool = True
    """Whether one of the nodes hosts the store at the scene's port."""
    keeps_journal: bool = False
    """Whether it is ours, and writes down what happens when."""


def elastic_agent(name: str, nnodes: str = "1:4", *more: str) -> Launcher:
    """Our own, at its defaults but for ``more`` and what keeps two agents of one machine apart."""

    def command(place: Place) -> list[str]:
        return _our_command(place, _endpoint(place), *_common(place, nnodes), *more)

    return Launcher(name, command, keeps_journal=True)


def elastic_agent_on_etcd(endpoint: str) -> Launcher:
    """Our own, meeting in the etcd at this endpoint; every scene under keys of its own."""

    def command(place: Place) -> list[str]:
        etcd = ["--rdzv-endpoint", endpoint, "--rdzv-backend", "etcd"]
        prefix = ["--etcd-prefix", f"/benchmark/{place.port}"]
        return _our_command(place, etcd, *prefix, *_common(place, "1:4"))

    return Launcher("elastic-agent, etcd", command, has_host=False, keeps_journal=True)


def alone(launcher: Launcher) -> Launcher:
    """The same for a single node: no endpoint and no number of nodes."""
    name = launcher.name.replace(" 1:4", "")

    def command(place: Place) -> list[str]:
        usual = launcher.command(place)
        for option, value in (("--rdzv-endpoint", None), ("--rdzv-backend", None), ("--nnodes", "1")):
            if option in usual:
                at = usual.index(option)
                usual[at : at + 2] = [] if value is None else [option, value]
        at = usual.index("--nproc-per-node")
        return [*usual[:at], "--standalone", *usual[at:]]

    return replace(launcher, name=name, command=command, has_host=False)


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


def _our_command(place: Place, endpoint: list[str], *more: str) -> list[str]:
    command = [sys.executable, "-m", "elastic_agent", *endpoint, *more]
    command += ["--node-id", place.node, "--state-dir", str(place.folder / place.node)]
    return [*command, "--event-journal", str(place.journal), str(WORKER)]


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
OURS_FIXED = elastic_agent("elastic-agent 2:2", "2:2")
TORCHRUN = Launcher("torchrun 1:4", _torchrun("1:4"))
TORCHRUN_FIXED = Launcher("torchrun 2:2", _torchrun("2:2"))
TORCHRUN_TUNED = Launcher("torchrun 1:4 tuned", _torchrun("1:4", *TUNED), UNSHARED_STORE)
