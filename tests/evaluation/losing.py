"""Agents and machines that are lost or leave while the workers train, and disks that are full."""

from __future__ import annotations

import signal
from collections.abc import Callable

from elastic_agent.testing.processes import NodeProcess

from .connecting import COLLECTIVES
from .stage import Case, Stage, Words


def while_training(what: Callable[[NodeProcess], object], node: str = "b") -> Callable[[Stage], None]:
    """Do something to the agent of a node when all workers train."""

    def play(stage: Stage) -> None:
        stage.start_all(script=COLLECTIVES)
        for each in stage.nodes:
            stage.said(each, "training")
        what(stage.cluster.agents[node])

    return play


def sent(signum: signal.Signals) -> Callable[[Stage], None]:
    return while_training(lambda agent: agent.signal(signum))


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
    Case("an agent is killed", sent(signal.SIGKILL), {"a": GONE}),
    Case("a machine is switched off", while_training(NodeProcess.kill_node), {"a": GONE}),
    Case("a machine freezes", while_training(NodeProcess.freeze_node), {"a": GONE}),
    Case("the machine with the store is switched off", while_training(NodeProcess.kill_node, "a"),
         {"b": Words("(lost the connection to|waiting for) the store", r"node a \(10\.213\.77\.1\)",
                    "start the same command on a again")}),
    Case("Ctrl-C on one machine", sent(signal.SIGINT),
         {"a": LEFT, "b": Words("SIGINT|interrupted|Ctrl-C", "this node|\\bb\\b", "")}),
    Case("SIGTERM to one agent", sent(signal.SIGTERM), {"a": LEFT, "b": Words("SIGTERM", "this node|\\bb\\b", "")}),
    Case("the disk of the workers' output is full", full_log_disk,
         dict.fromkeys("ab", Words("root cause: .*no space for its output", "on host-b", "free space on that disk"))),
)  # fmt: skip
