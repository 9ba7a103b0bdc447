"""A node is lost whose agent coordinates a run in etcd, beside one whose agent does not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable

from .etcd import Etcd
from .faults import LOST_TARGET_S, Fault, Recovery, measure
from .figures import Figures, Result
from .launchers import elastic_agent_on_etcd
from .options import Options, progress
from .scene import HOST, PEER, Scene, SpoiltError, World

ELECTION_MARGIN_S = 0.4
"""By so much more than another node's may the loss of the coordinator's be noticed late."""

HARM: dict[str, Callable[[Scene, str], float]] = {
    "SIGKILL": Scene.kill_node,
    "frozen": Scene.freeze_node,
}


def run(options: Options) -> Result:
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        return Result("coordinator", [], ["etcd is not installed (Debian: etcd-server, etcd-client)"])
    figures = Figures()
    for _ in range(options.times):
        for harm in HARM:
            for what, node, target_s in (
                ("another node", PEER, LOST_TARGET_S),
                ("the coordinator's node", HOST, LOST_TARGET_S + ELECTION_MARGIN_S),
            ):
                with Etcd() as etcd:
                    launcher = elastic_agent_on_etcd(etcd.endpoint)
                    outcome = measure(launcher, _lose(etcd, node, harm))
                took = outcome.took_s if isinstance(outcome, Recovery) else outcome
                progress(f"{what} {harm}: {took}")
                figures.of(f"{what} {harm}", launcher.name, "s", target_s).add(took)
    return Result(
        "coordinator", list(figures), ["From the fault to the first collective of all that are left."]
    )


def _lose(etcd: Etcd, node: str, harm: str) -> Fault:
    (left,) = {HOST, PEER} - {node}

    def strike(scene: Scene, world: World) -> float:
        if not _coordinates(etcd, scene, HOST):
            raise SpoiltError("the other node coordinates")
        return HARM[harm](scene, node)

    return Fault(harm, strike, (left,))


def _coordinates(etcd: Etcd, scene: Scene, node: str) -> bool:
    leader = f"/benchmark/{scene.port}/1/r/benchmark/leader"
    command = ["etcdctl", "--endpoints", etcd.endpoint, "get", leader, "--print-value-only"]
    holder = subprocess.run(
        command, env={"ETCDCTL_API": "3", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    return holder.stdout.strip().endswith(f":{scene.agents[node].pid}")
