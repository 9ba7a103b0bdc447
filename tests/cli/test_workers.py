"""``elastic-agent logs`` and ``elastic-agent stacks``, as users type them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_agent.workers.output.folders import LogFolders
from tests.agent.support import started
from tests.cli.support import elastic_agent, refusal
from tests.names import unique
from tests.ports import free_port
from tests.waiting import wait_for

TRAIN = """
import sys, time
from elastic_agent import client

me = client.current()
print(f"a\\tline of {me.worker_id}\\rover\\x1b[2J", flush=True)
print(f"error of {me.worker_id}", file=sys.stderr, flush=True)
def train():
    for line in sys.stdin:  # until the test ends
        pass
    while True:
        time.sleep(1)
train()
"""


@pytest.mark.system
def test_the_output_and_stacks_of_all_nodes_come_from_any_machine(tmp_path: Path) -> None:
    """Each node has folders of its own, as on machines that share none."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    run_id, port = unique("cats"), free_port()
    with ExitStack() as agents:
        for node in ("n1", "n2"):
            options = ["--rdzv-endpoint", f"127.0.0.1:{port}", "--nnodes", "2", "--rdzv-id", run_id]
            options += ["--node-id", node, "--nproc-per-node", "1", "--tee", "3"]
            options += ["--state-dir", str(tmp_path / node), "--log-dir", str(tmp_path / f"logs-{node}")]
            agents.enter_context(started(*options, str(script)))

        def shown() -> str | None:
            """Nodes that have not begun, or do not answer in time, are asked again."""
            told = elastic_agent("logs", "--run", run_id).stdout
            return told if told.count("error of") == 2 else None

        told = wait_for("the output of both workers", shown)
        one = wait_for(
            "that of one worker",
            lambda: (
                (out := elastic_agent("logs", "--run", run_id, "-n", "1", "n2/0").stdout).count("over")
                and out
            ),
        )
        none = "logs: no output of n2/9; "
        wait_for("the refusal", lambda: none in elastic_agent("logs", "--run", run_id, "n2/9").stderr or None)
        unknown = refusal("logs", "--run", run_id, "n3")

        def everywhere() -> str | None:
            told = elastic_agent("stacks", run_id, "--all-nodes").stdout
            return told if told.count("in train") == 2 else None

        stacks = wait_for("the stacks of both workers", everywhere)
    assert sorted(told.splitlines()) == [
        f"{worker} | {line}"
        for worker in ("n1/0", "n2/0")
        for line in (f"a\tline of {worker}", f"error of {worker}", "over\\x1b[2J")
    ]
    assert "over\\x1b[2J\n" in one
    assert "n2/0 | " not in one
    assert "logs: the run has no node n3 now; it has n1, n2\n" in unknown
    heads = [line for line in stacks.splitlines() if line.startswith("worker")]
    assert [head.partition(",")[0] for head in heads] == ["worker n1/0 (rank 0", "worker n2/0 (rank 1"]
    assert stacks.count("  main thread\n") == 2
    assert f'    File "{script}", line ' in stacks


def test_who_gives_a_run_in_place_of_a_node_is_told_how_to_name_it(tmp_path: Path) -> None:
    LogFolders(str(tmp_path / "logs"), 20).make("cats", 1, "n1")
    line = refusal("logs", "cats", "--log-dir", str(tmp_path / "logs"))
    assert f"no such output in {tmp_path}/logs/latest (--log-dir; for another run, --run ID); " in line
    assert "--run ID" not in refusal("logs", "--run", "dogs", "--log-dir", str(tmp_path / "logs"))


def test_what_lies_on_this_machine_is_printed_when_the_run_has_ended(tmp_path: Path) -> None:
    run_id = unique("ended")
    folder = LogFolders(str(tmp_path / "logs"), 20).make(run_id, 2, "n1")
    for slot in range(2):
        (folder / str(slot)).mkdir()
        (folder / str(slot) / "output.log").write_text("".join(f"line {number}\n" for number in range(30)))
    variables = {"ELASTIC_AGENT_STATE_DIR": str(tmp_path)}
    told = elastic_agent("logs", "--run", run_id, "-n", "1", variables=variables)
    assert told.returncode == 0
    assert told.stdout == "n1/0 | line 29\nn1/1 | line 29\n"
    run = f"{tmp_path / 'logs' / run_id}\n"
    assert told.stderr == f"elastic-agent: no agent was asked; this is of generation 2 in {run}"
    worker = elastic_agent("logs", "--log-dir", str(tmp_path / "logs"), "n1/1", "-f").stdout
    assert worker.splitlines()[-20:] == [f"line {number}" for number in range(10, 30)]
