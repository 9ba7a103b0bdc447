"""A job that ended and is started again under the same name, with another machine's store."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from msgspec.structs import replace

from elastic_agent.agent.worker_group.command import job_of
from elastic_agent.config.load import load_settings
from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol.coordinator import Coordinator
from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Lease,
    Member,
    Phase,
    Plan,
    Policy,
    Seat,
    State,
    World,
)
from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.values import Endpoint
from tests.agent.support import COMMAND, clean_environment, elastic_agent
from tests.loop_thread import Blocking, in_loop
from tests.names import unique
from tests.ports import free_port

MINE = unique("mine")
RUN_ID = unique("exp7")
POLICY = Policy(min_nodes=1, max_nodes=2)
WORLD = World(7, (Seat("n1", "old", "10.0.0.1", 1, 0),), Address("10.0.0.1", 1234), "n1")
HERE = Member(RECORD_VERSION, "n2", "new", "10.0.0.2", 1, State.READY, 0, POLICY)


def last_plan(phase: Phase) -> Plan:
    return Plan(RECORD_VERSION, 9, phase, 7, "so it ended", POLICY, world=WORLD, charged=2)


@pytest.fixture
def backend(tmp_path: Path) -> C10dBackend:
    backend = C10dBackend(Endpoint("127.0.0.1"), tmp_path, port_range=None, port_rest_s=1.0)
    backend.run_id = RUN_ID
    return backend


def first_plan_of_a_new_store(backend: C10dBackend) -> Plan:
    """What this machine, as the host of the next store, makes of what it remembers."""
    coordinator = Coordinator(0.0, None, in_loop(backend.history_store.load(RUN_ID)))
    coordinator.observe(HERE, Lease("new", 5.0), 0.0)
    plan = coordinator.decide(100.0).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("outcome", [Phase.FINISHED, Phase.FAILED])
def test_a_node_that_acknowledged_the_outcome_starts_a_new_run_as_the_next_host(
    backend: C10dBackend, outcome: Phase
) -> None:
    backend.remember(last_plan(outcome))
    backend.run_ended()
    plan = first_plan_of_a_new_store(backend)
    assert (plan.phase, plan.generation, plan.charged) == (Phase.FORMING, 8, 0)


def test_an_outcome_is_kept_until_this_nodes_part_has_ended(backend: C10dBackend) -> None:
    backend.remember(last_plan(Phase.FINISHED))
    assert first_plan_of_a_new_store(backend).phase is Phase.FINISHED


def test_an_outcome_is_kept_while_another_process_of_the_machine_hosts_the_store(tmp_path: Path) -> None:
    async def dial(backend: C10dBackend) -> None:
        backend.run_id = RUN_ID
        (await backend.connect()).close()

    endpoint = Endpoint("127.0.0.1", free_port())
    host, other = (C10dBackend(endpoint, tmp_path, port_range=None, port_rest_s=1.0) for _ in range(2))
    with contextlib.closing(Blocking(host)), contextlib.closing(Blocking(other)):
        in_loop(dial(host))
        in_loop(dial(other))
        assert (host.is_host, other.is_host) == (True, False)
        other.remember(last_plan(Phase.FINISHED))
        other.run_ended()
        assert first_plan_of_a_new_store(other).phase is Phase.FINISHED


def test_a_node_that_left_a_running_run_keeps_its_history(backend: C10dBackend) -> None:
    backend.remember(last_plan(Phase.RUNNING))
    backend.run_ended()
    plan = first_plan_of_a_new_store(backend)
    assert (plan.phase, plan.generation, plan.charged) == (Phase.FORMING, 8, 2)


def lines_until(stream: IO[str], words: str) -> Iterator[str]:
    """Lines of a log, the one with these words included."""
    for line in stream:
        yield line
        if words in line:
            return


@contextlib.contextmanager
def started(script: Path, *options: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """An agent, from when its worker, which then waits, is up."""
    script.write_text("print('up', flush=True); input()\n")
    with subprocess.Popen(
        [*COMMAND, *options, str(script)],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **{"stderr": subprocess.DEVNULL, **streams},
    ) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "up\n"
        yield agent


@pytest.mark.prove
@pytest.mark.parametrize(
    ("options", "left"),
    [
        pytest.param([], [], id="unnamed"),
        pytest.param(["--rdzv-id", MINE], [f"{MINE}.run"], id="named"),
    ],
)
def test_a_killed_single_agent_leaves_only_a_history_that_can_be_resumed(
    tmp_path: Path, options: list[str], left: list[str]
) -> None:
    """Its port is a random one, so without a name its next life is another run in any case."""
    with started(tmp_path / "train.py", "--state-dir", str(tmp_path / "state"), *options) as agent:
        agent.kill()
        assert agent.stdout is not None
        agent.stdout.read()  # until its workers are gone, too
    kept = [path.name for folder in ("jobs", "runs") for path in (tmp_path / "state" / folder).glob("*")]
    assert kept == left


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="unnamed", marks=pytest.mark.prove),
        pytest.param(["--rdzv-id", MINE], id="named"),
    ],
)
def test_a_single_agent_that_is_interrupted_stops_its_run_and_tells_how_to_resume_it(
    tmp_path: Path, options: list[str]
) -> None:
    script = tmp_path / "train.py"
    common = ["--state-dir", str(tmp_path / "state"), "--log-format", "console", "--worker-start", "cold"]
    with started(script, *common, *options, stderr=subprocess.PIPE) as agent:
        agent.terminate()
        assert agent.stderr is not None
        log = agent.stderr.read()
    assert agent.returncode == ExitCode.STOPPED, log
    assert "is leaving (SIGTERM received); no other node can continue the run" in log
    assert "forming generation 2" not in log
    last = log.splitlines()[-1]
    resumed = re.search(
        r"to resume the run, start it again with the same command(?: and --rdzv-id (\S+))?$", last
    )
    assert resumed, log
    run_id = resumed[1] or MINE
    script.write_text("")
    again = elastic_agent(*common, "--rdzv-id", run_id, str(script))
    assert again.returncode == 0, again.stderr
    if options:  # without a name, the store of the first start had another port
        assert "generation 2: resuming the run after generation 1, in which it was stopped" in again.stderr
        another = elastic_agent(*common, "--rdzv-id", run_id, str(script))
        assert "generation 3: a run with this id finished before, in generation 2" in another.stderr


@pytest.mark.prove
def test_a_node_on_standby_that_is_interrupted_with_all_others_is_stopped_with_the_run(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "print('up', flush=True)\n"
        "sys.stdin.read()\n"
    )
    options = ["--nnodes", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--log-format", "console"]
    command = [
        *COMMAND,
        *options,
        "--rdzv-id",
        unique("both"),
        "--state-dir",
        str(tmp_path / "state"),
        str(script),
    ]
    with agent_of(command) as seated:
        assert seated.stdout is not None
        assert seated.stdout.readline() == "up\n"
        with agent_of(command) as spare:
            assert spare.stderr is not None
            log = "".join(lines_until(spare.stderr, "on standby"))
            seated.terminate()
            spare.terminate()
            log += spare.stderr.read()
        assert spare.returncode == ExitCode.STOPPED, log
        assert "to resume the run, start it again with the same command" in log.splitlines()[-1]
        _, log = seated.communicate()  # its worker has saved
    assert seated.returncode == ExitCode.STOPPED, log
    assert "to resume the run, start it again with the same command" in log.splitlines()[-1]


def agent_of(command: list[str]) -> subprocess.Popen[str]:
    """An agent that can be read and written."""
    return subprocess.Popen(
        command,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.prove
def test_nothing_is_to_be_resumed_if_no_worker_was_started(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    options = ["--state-dir", str(tmp_path / "state"), "--log-format", "console", "--nnodes", "2"]
    with subprocess.Popen(
        [*COMMAND, *options, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", str(script)],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    ) as agent:
        assert agent.stderr is not None
        log = "".join(lines_until(agent.stderr, "waiting for 1 more node"))
        agent.terminate()
        log += agent.stderr.read()
    assert agent.returncode == ExitCode.STOPPED, log
    assert "the run was stopped" in log
    assert "to resume" not in log


@pytest.mark.prove
def test_a_single_agent_that_was_killed_resumes_its_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    options = ["--state-dir", str(tmp_path / "state"), "--log-format", "console", "--rdzv-id", MINE]
    options += ["--worker-start", "cold"]
    with started(script, *options) as agent:
        agent.kill()
        assert agent.stdout is not None
        agent.stdout.read()
    script.write_text("")
    again = elastic_agent(*options, str(script))
    assert "generation 2: resuming the run after generation 1, which was interrupted" in again.stderr


def test_agents_of_a_finished_run_exit_after_the_agent_that_hosted_the_store(
    backend: C10dBackend, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    policy = replace(POLICY, job=job_of(load_settings([str(script)], {}).settings, None))
    backend.remember(replace(last_plan(Phase.FINISHED), policy=policy))
    backend.run_ended()
    where = ["--rdzv-id", RUN_ID, "--rdzv-endpoint", "192.0.2.1:29400", "--join-timeout", "0.1"]
    done = elastic_agent("--state-dir", str(tmp_path), "--finish-once", *where, str(script))
    assert done.returncode == 0, done.stderr
    assert (
        "the run finished: the run has already finished and is not repeated under the same id" in done.stderr
    )
