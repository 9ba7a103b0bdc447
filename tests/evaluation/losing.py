"""Agents and machines that are lost or leave while the workers train, and disks that are full."""

from __future__ import annotations

import signal

from .connecting import COLLECTIVES
from .stage import Case, Stage, Words


def training(stage: Stage) -> None:
    stage.start_all(script=COLLECTIVES)
    for node in stage.nodes:
        stage.said(node, "training")


def agent_killed(stage: Stage) -> None:
    training(stage)
    stage.cluster.agents["b"].signal(signal.SIGKILL)


def machine_killed(stage: Stage) -> None:
    training(stage)
    stage.cluster.agents["b"].kill_node()


def machine_frozen(stage: Stage) -> None:
    training(stage)
    stage.cluster.agents["b"].freeze_node()


def host_killed(stage: Stage) -> None:
    training(stage)
    stage.cluster.agents["a"].kill_node()


def interrupted(stage: Stage) -> None:
    training(stage)
    stage.cluster.agents["b"].signal(signal.SIGINT)


def terminated(stage: Stage) -> None:
    training(stage)
    stage.cluster.agents["b"].signal(signal.SIGTERM)


def full_log_disk(stage: Stage) -> None:
    logs = stage.folder / "logs-b"
    logs.mkdir()
    script = stage.write("noisy.py", NOISY)
    options = "--redirects", "3", "--log-dir", str(logs), "--max-restarts", "3"
    stage.start("a", *options, script=script)
    stage.start("b", *options, script=script, setup=f"mount -t tmpfs -o size=48k tmpfs {logs}")


NOISY = """
import os, threading
if os.environ["ELASTIC_AGENT_NODE_ID"] == "a":
    threading.Event().wait()
print("x" * 100_000, flush=True)
raise ValueError("boom")
"""
GONE = Words("node b (was lost|stopped reporting)", r"\bb\b", "see on that machine|rebooted")
LEFT = Words("b leaves", r"\bb\b", "waiting for 1 more node")

LOSING = (
    Case("an agent is killed", agent_killed, {"a": GONE}),
    Case("a machine is switched off", machine_killed, {"a": GONE}),
    Case("a machine freezes", machine_frozen, {"a": GONE}),
    Case("the machine with the store is switched off", host_killed,
         {"b": Words("(lost the connection to|waiting for) the store", r"node a \(10\.213\.77\.1\)",
                    "start the same command on a again")}),
    Case("Ctrl-C on one machine", interrupted,
         {"a": LEFT, "b": Words("SIGINT|interrupted|Ctrl-C", "this node|\\bb\\b", "")}),
    Case("SIGTERM to one agent", terminated, {"a": LEFT, "b": Words("SIGTERM", "this node|\\bb\\b", "")}),
    Case("the disk of the workers' output is full", full_log_disk,
         dict.fromkeys("ab", Words("root cause: .*no space for its output", "on host-b", "free space on that disk"))),
)  # fmt: skip
