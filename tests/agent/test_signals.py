"""What workers get when they are stopped: the table in docs/script.md, on real agents.

The other rows of that table: `tests/faults/test_notices.py` (notices, and signals to all processes of a job),
`tests/workers/test_guard_progress.py` (a restart), `tests/workers/test_guard_fence.py` (a lost lease, an agent that is
gone), `tests/faults/test_stories_of_workers.py` (a hang, what exited workers leave), `tests/launcher/test_launch.py`
(an interrupted launch).
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import NodeProcess
from tests.agent.support import COMMAND, clean_environment, elastic_agent
from tests.faults.cluster import Cluster
from tests.names import unique
from tests.ports import free_port
from tests.terminal import Terminal
from tests.workers.support import FAMILY, News

PATIENCE_S = 300.0


class AgentTerminal(Terminal):
    """A terminal with an agent on it."""

    def __init__(self, folder: Path, script: str, *arguments: str, options: tuple[str, ...] = ()) -> None:
        self.run_id = unique("run")
        (folder / "train.py").write_text(script)
        command = [
            *(*COMMAND, "run", "--rdzv-id", self.run_id, "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
            *("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP", "--state-dir", str(folder / "state")),
            *("--log-format", "console", *options, str(folder / "train.py"), *arguments),
        ]
        super().__init__(command, clean_environment(), folder)


@pytest.fixture
def news(tmp_path: Path) -> Iterator[News]:
    opened = News(tmp_path)
    yield opened
    opened.close()


COLD = ("--worker-start", "cold", "--notice-time", "0.1")
WITH_TORCH = ("--worker-start", "warm", "--nproc-per-node", "2")


def sends(signum: signal.Signals) -> Callable[[AgentTerminal], None]:
    return lambda here: os.kill(here.process.pid, signum)


def commands(command: str) -> Callable[[AgentTerminal], None]:
    return lambda here: elastic_agent(command, "--run", here.run_id, "--deadline", "0.1").check_returncode()


TO_THE_WORKER_THEN_TO_ITS_CHILD = ["worker SIGTERM", "worker ends", "child SIGTERM"]
TO_THE_WORKER_THAT_HANDLES_IT = ["worker SIGUSR1", "worker ends"]
TO_BOTH = ["child SIGINT", "worker SIGINT", "worker ends", "child SIGTERM"]
PROVE = pytest.mark.prove


@pytest.mark.parametrize(
    ("stop", "told"),
    [
        pytest.param(sends(signal.SIGTERM), TO_THE_WORKER_THEN_TO_ITS_CHILD, id="SIGTERM"),
        pytest.param(sends(signal.SIGHUP), TO_THE_WORKER_THEN_TO_ITS_CHILD, id="SIGHUP", marks=PROVE),
        pytest.param(sends(signal.SIGUSR1), TO_THE_WORKER_THAT_HANDLES_IT, id="SIGUSR1", marks=PROVE),
        pytest.param(commands("drain"), TO_THE_WORKER_THEN_TO_ITS_CHILD, id="drain", marks=PROVE),
        pytest.param(commands("stop"), TO_THE_WORKER_THEN_TO_ITS_CHILD, id="stop", marks=PROVE),
        pytest.param(sends(signal.SIGINT), TO_BOTH, id="SIGINT", marks=PROVE),
        pytest.param(lambda here: here.type(b"\x03"), TO_BOTH, id="Ctrl-C"),
    ],
)
def test_a_worker_and_its_child_get_each_signal_once_and_in_order(
    tmp_path: Path, news: News, stop: Callable[[AgentTerminal], None], told: list[str]
) -> None:
    options = (*COLD, "--notice-time", "300")  # at the end of which it would get SIGTERM
    with AgentTerminal(tmp_path, FAMILY, str(news.path), "handles", options=options) as here:
        assert news.line(PATIENCE_S) == "ready"
        here.wait_shown("1 node, 1 worker")
        stop(here)
        found = [news.line(PATIENCE_S) for _ in told]
        assert (sorted(found[:2]) + found[2:] if len(told) > 3 else found) == told
        assert here.ended() == ExitCode.STOPPED, here.shown
        assert news.silent()


def test_a_second_ctrl_c_kills_the_workers_and_ends_the_agent_at_once(tmp_path: Path, news: News) -> None:
    with AgentTerminal(tmp_path, FAMILY, str(news.path), "stays", options=COLD) as here:
        assert news.line(PATIENCE_S) == "ready"
        here.wait_shown("1 node, 1 worker")
        here.type(b"\x03")
        assert sorted([news.line(PATIENCE_S), news.line(PATIENCE_S)]) == ["child SIGINT", "worker SIGINT"]
        here.type(b"\x03")
        assert here.ended() == 128 + signal.SIGINT
        assert news.silent()


# -- scripts that save ------------------------------------------------------------------------------

SAVES_ON_CTRL_C = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
try:
    for step in range(1_000_000):
        dist.all_reduce(torch.ones(1))
        if rank == 0 and step == 20:
            print("training", flush=True)
except KeyboardInterrupt:
    if rank == 0:
        torch.save({"step": step}, "interrupted.pt")
    os._exit(0)
"""


def test_ctrl_c_lets_workers_save_that_except_keyboard_interrupt(tmp_path: Path) -> None:
    with AgentTerminal(tmp_path, SAVES_ON_CTRL_C, options=WITH_TORCH) as here:
        here.wait_shown("training")
        here.type(b"\x03")
        assert here.ended() == ExitCode.STOPPED
    assert (tmp_path / "interrupted.pt").exists(), here.shown
    assert "may not have saved" not in here.shown


# -- those that cannot ------------------------------------------------------------------------------

FAILS = """
import os, signal, sys, time

def save(*_):
    if os.environ["RANK"] == "0":
        raise KeyError("bucket")
    os._exit(int(sys.argv[1]))

signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGINT, save)
os.write(1, f"ready of {os.environ['RANK']}\\n".encode())  # whole, although both write to one terminal
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("signum", "other_code"), [(signal.SIGTERM, 4), pytest.param(signal.SIGINT, 0, marks=PROVE)]
)
def test_a_worker_that_fails_on_the_signal_instead_of_saving_is_named(
    tmp_path: Path, signum: signal.Signals, other_code: int
) -> None:
    options = ("--nproc-per-node", "2", "--worker-start", "cold")
    with AgentTerminal(tmp_path, FAILS, str(other_code), options=options) as here:
        for rank in range(2):
            here.wait_shown(f"ready of {rank}")
        os.kill(here.process.pid, signum)
        assert here.ended() == ExitCode.STOPPED
    who = "it and 1 other worker of this node" if other_code else "it"
    (line,) = [text for text in here.shown.splitlines() if "may not have saved" in text]
    assert line.endswith(
        f"/0 exited with code 1 after {signum.name}: KeyError: 'bucket'; {who} may not have saved"
    )


@pytest.mark.parametrize(
    ("ending", "is_named"),
    [
        ("os._exit(0)", False),
        pytest.param("os._exit(128 + signum)", False, marks=PROVE),
        ("time.sleep(1000)", True),
    ],
)
def test_of_those_that_were_asked_to_exit_only_those_that_were_killed_may_not_have_saved(
    tmp_path: Path, ending: str, is_named: bool
) -> None:
    script = f"""
import os, signal, time
signal.signal(signal.SIGTERM, lambda signum, _: {ending})
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""
    # Only of the one that does not end, the time that it has is to pass.
    options = (*COLD, "--shutdown-timeout", "0.5" if is_named else "300")
    with AgentTerminal(tmp_path, script, options=options) as here:
        here.wait_shown("ready")
        here.wait_shown("1 node, 1 worker")
        os.kill(here.process.pid, signal.SIGTERM)
        assert here.ended() == ExitCode.STOPPED
    assert ("/0 was killed by SIGKILL after SIGTERM; it may not have saved" in here.shown) is is_named
    assert ("may not have saved" in here.shown) is is_named


@pytest.mark.prove
def test_a_worker_that_fails_when_another_node_leaves_is_named_and_one_after_a_failure_is_not(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(FAILS)
    with Cluster(tmp_path, "1:2") as cluster:

        def start(name: str) -> NodeProcess:
            return cluster.start(name, 1, "--worker-start", "cold", script=script, arguments=("3",))

        nodes = [start("a"), start("b")]
        for node in nodes:
            cluster.wait("both to train", lambda node=node: node.lines("2 nodes, 2 workers") or None)
        cluster.wait("rank 1", lambda: nodes[0].lines("ready of 1") or nodes[1].lines("ready of 1") or None)
        cluster.wait("rank 0", lambda: nodes[0].lines("ready of 0") or nodes[1].lines("ready of 0") or None)
        stays, leaves = nodes if nodes[0].lines("hosting the store") else nodes[::-1]
        leaves.signal(signal.SIGTERM)
        cluster.wait("a node to leave", lambda: None if leaves.runs else True)
        for node in nodes:
            cluster.wait("the warning", lambda node=node: node.lines("after SIGTERM", "may not have saved"))
        again = cluster.wait("the other to train alone", lambda: stays.lines("1 node, 1 worker") or None)
        assert len(again) == 1
        told = len(stays.lines("may not have saved"))
        name = "a" if stays is nodes[0] else "b"
        started = cluster.wait("its new worker", lambda: cluster.journal("workers_started", name)[1:] or None)
        worker = started[-1]["pids"]["0"]
        os.kill(worker, signal.SIGTERM)
        cluster.wait("the next generation", lambda: len(stays.lines("1 node, 1 worker")) > 1 or None)
        assert len(stays.lines("may not have saved")) == told


# -- a stop that takes long -------------------------------------------------------------------------

OF_ANOTHER_USER = """
import os, subprocess, sys
command = ["setpriv", "--reuid=65534", "--clear-groups", "sleep", "1000"]
child = subprocess.Popen(command, start_new_session=True)
while open(f"/proc/{child.pid}/comm").read() != "sleep\\n":
    pass
open(sys.argv[1], "w").write(f"{child.pid}\\n")
sys.exit(3)
"""
WITHOUT_KILL = ("setpriv", "--inh-caps=-kill", "--bounding-set=-kill")
"""Before a command of root: without the right to signal the processes of others."""

needs_other_users = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)


@pytest.mark.prove
@needs_other_users
def test_processes_that_keep_a_stop_waiting_are_named(tmp_path: Path, news: News) -> None:
    script = tmp_path / "train.py"
    script.write_text(OF_ANOTHER_USER)
    with Cluster(tmp_path, "1") as cluster:
        agent = cluster.start(
            "a", 1, "--worker-start", "cold", script=script, arguments=(str(news.path),), within=WITHOUT_KILL
        )
        pid = int(news.line(PATIENCE_S))
        try:
            line = cluster.wait("a line about it", lambda: agent.lines("SIGKILL has not ended in 5 s"))[0]
        finally:
            os.kill(pid, signal.SIGKILL)
    assert f"{pid} (sleep, state S, user nobody); " in line
    assert f"sudo kill -9 {pid}" in line
