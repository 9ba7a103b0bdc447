"""What meeting in etcd costs beside c10d: recovery, many nodes, requests at rest, and an agent without its etcd."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from elastic_agent.testing.ports import free_port

from .faults import WORKER_KILLED, Recovery, measure_kills
from .figures import Figures, Result
from .launchers import OURS, elastic_agent_on_etcd
from .options import Options, progress
from .processes import processor_s
from .rendezvous import Crowd, meet
from .scene import HOST, Scene, boottime_s
from .stages import RECOVERY_STAGES, Stages, median_stages

FORM_TARGETS_S = {256: 2.0}
SIZES = (64, 256)
NODES_PER_PROCESS = 64
REST_SIZES = (8, 64)
WATCH_S, QUICK_WATCH_S = 20.0, 10.0
KILLS = 5
ON_ETCD = "elastic-agent, etcd"
OUTAGE_TARGET = 2.0
LEASE_S = 5.0
READY_S = 20.0


class Etcd:
    """One member on loopback, with nothing on its disk; gone at the end."""

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-")
        self.port, peer = free_port(), free_port()
        client, other = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self.endpoint = f"127.0.0.1:{self.port}"
        self._process = psutil.Popen(
            [
                *("etcd", "--name", "n0", "--data-dir", self._folder.name),
                *("--listen-client-urls", client, "--advertise-client-urls", client),
                *("--listen-peer-urls", other, "--initial-advertise-peer-urls", other),
                *("--initial-cluster", f"n0={other}", "--unsafe-no-fsync"),
                *("--heartbeat-interval", "20", "--election-timeout", "200"),
                *("--logger", "zap", "--log-outputs", "stderr"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        ends_s = time.monotonic() + READY_S
        while not self._healthy():
            if time.monotonic() > ends_s:
                raise RuntimeError("etcd does not get ready")
            time.sleep(0.05)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()

    def kill(self) -> None:
        """SIGKILL."""
        if self._process.is_running():
            self._process.kill()
        self._process.wait()

    def _healthy(self) -> bool:
        try:
            return bool(json.loads(self._get("health"))["health"] == "true")
        except OSError:
            return False

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.endpoint}/{path}", timeout=5.0) as answer:
            return str(answer.read().decode())

    def requests(self) -> float:
        """How many calls it has taken so far."""
        rows = [
            row for row in self._get("metrics").splitlines() if row.startswith("grpc_server_started_total{")
        ]
        return sum(float(row.rpartition(" ")[2]) for row in rows)


def run(options: Options) -> Result:
    if shutil.which("etcd") is None:
        return Result("etcd", [], ["etcd is not installed (Debian: etcd-server)"])
    figures = Figures()
    stages: dict[str, list[Stages]] = {}

    def add(what: str, who: str, unit: str, outcome: float | str, target: float | None = None) -> None:
        progress(f"{what}, {who}: {outcome}")
        figures.of(what, who, unit, target).add(outcome)

    watch_s = QUICK_WATCH_S if options.quick else WATCH_S
    for _ in range(options.times):
        with Etcd() as etcd:
            for launcher in (OURS, elastic_agent_on_etcd(etcd.endpoint)):
                for outcome in measure_kills(launcher, KILLS):
                    took = outcome if isinstance(outcome, str) else outcome.took_s
                    add(WORKER_KILLED.name, launcher.name, "s", took)
                    if isinstance(outcome, Recovery):
                        stages.setdefault(launcher.name, []).append(outcome.stages)
        for size in SIZES[:1] if options.quick else SIZES:
            with Etcd() as etcd:
                found = meet(size, etcd.port, "--etcd", parts=size // NODES_PER_PROCESS)
                add(f"{size} nodes, form", ON_ETCD, "s", found["form"], FORM_TARGETS_S.get(size))
                add(f"{size} nodes, re-form", ON_ETCD, "s", found.get("re-form", "not formed"))
        for size in REST_SIZES:
            add(f"{size} nodes at rest", "requests per node", "/s", requests_at_rest(size, watch_s))
        if not options.quick:
            add("etcd is down", "one agent", "% of a core", processor_without_etcd(watch_s), OUTAGE_TARGET)
    note = (
        f"Lease {LEASE_S:g} s; one member of etcd, without fsync. {NODES_PER_PROCESS} nodes share a process: gRPC's "
        "threads hinder each other in one interpreter. On real machines every node has one of its own."
    )
    medians = {name: median_stages(RECOVERY_STAGES, samples) for name, samples in stages.items()}
    tables = {"recovery_stages": medians, "all_stages": stages}
    return Result("etcd", list(figures), [note], tables=tables)


def requests_at_rest(size: int, watch_s: float) -> float:
    """Calls to etcd per node and second while a world of that size runs."""
    with Etcd() as etcd, tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-") as folder:
        command = [
            "benchmarks.many_nodes",
            "0",
            str(size),
            str(size),
            str(etcd.port),
            str(Path(folder)),
            "--etcd",
        ]
        with Crowd([command]) as crowd:
            crowd.hear("here")
            crowd.say("begin")
            crowd.hear("calm")
            before, began_s = etcd.requests(), time.monotonic()
            time.sleep(watch_s)
            return round((etcd.requests() - before) / (time.monotonic() - began_s) / size, 2)


def processor_without_etcd(watch_s: float) -> float:
    """What a node's processes use, in percent of a core, after etcd was killed under them and the workers fenced."""
    with Etcd() as etcd, Scene(elastic_agent_on_etcd(etcd.endpoint)) as scene:
        scene.settle_down([HOST])
        etcd.kill()
        time.sleep(2 * LEASE_S)
        processes = scene.processes(HOST)
        before, began_s = processor_s(processes), boottime_s()
        time.sleep(watch_s)
        return round(100 * (processor_s(processes) - before) / (boottime_s() - began_s), 2)
