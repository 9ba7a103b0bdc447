"""A job that ended and is started again under the same name, with another machine's store."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

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
from elastic_agent.rendezvous.backends import BackendOptions
from elastic_agent.rendezvous.backends.c10d.backend import C10dBackend
from elastic_agent.values import Endpoint
from tests.agent.support import elastic_agent, options_for, run, started, training
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
    backend = C10dBackend(BackendOptions(Endpoint("127.0.0.1"), tmp_path))
    backend.run_id = RUN_ID
    return backend


def first_plan_of_a_new_store(backend: C10dBackend) -> Plan:
    """What this machine, as the host of the next store, makes of what it remembers."""
    coordinator = Coordinator(0.0, None, in_loop(backend.history_store.load(RUN_ID)))
    coordinator.observe(HERE, Lease("new", 5.0), 0.0)
    plan = coordinator.decide(100.0).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("last", "has_ended", "next_"),
    [
        (Phase.FINISHED, True, (Phase.FORMING, 8, 0)),
        (Phase.FAILED, True, (Phase.FORMING, 8, 0)),
        (Phase.FINISHED, False, (Phase.FINISHED, 7, 2)),
        (Phase.RUNNING, True, (Phase.FORMING, 8, 2)),
    ],
    ids=["finished", "failed", "its part has not ended", "left while the run goes on"],
)
def test_the_next_host_of_the_store_starts_a_new_run_if_this_nodes_part_ended_with_its_outcome(
    backend: C10dBackend, last: Phase, has_ended: bool, next_: tuple[Phase, int, int]
) -> None:
    backend.remember(last_plan(last))
    if has_ended:
        backend.run_ended()
    plan = first_plan_of_a_new_store(backend)
    assert (plan.phase, plan.generation, plan.charged) == next_


def test_an_outcome_is_kept_while_another_process_of_the_machine_hosts_the_store(tmp_path: Path) -> None:
    async def dial(backend: C10dBackend) -> None:
        backend.run_id = RUN_ID
        (await backend.connect()).close()

    endpoint = Endpoint("127.0.0.1", free_port())
    host, other = (C10dBackend(BackendOptions(endpoint, tmp_path)) for _ in range(2))
    with contextlib.closing(Blocking(host)), contextlib.closing(Blocking(other)):
        in_loop(dial(host))
        in_loop(dial(other))
        assert (host.is_host, other.is_host) == (True, False)
        other.remember(last_plan(Phase.FINISHED))
        other.run_ended()
        assert first_plan_of_a_new_store(other).phase is Phase.FINISHED


RESUMED = (
    r"to resume the run, start it again with the same command and --rdzv-id ([^\s:,]+).*: it goes on from "
)


@pytest.mark.parametrize("options", [[], ["--rdzv-id", MINE]], ids=["unnamed", "named"])
def test_a_single_agent_that_is_interrupted_stops_its_run_and_tells_how_to_resume_it(
    tmp_path: Path, options: list[str]
) -> None:
    with training(tmp_path, *options) as agent:
        agent.process.terminate()
        code, log = agent.end()
    assert code == ExitCode.STOPPED, log
    assert "leaves (SIGTERM received); no other node can continue the run" in log
    assert "forming generation 2" not in log
    resumed = re.search(RESUMED, log.splitlines()[-1])
    assert resumed, log
    run_id = resumed[1]
    stopped = f"run {run_id} of the same command was stopped before, "
    new = run(tmp_path, "import sys; sys.exit(3)", "--max-restarts=0")
    assert stopped in new.stderr
    assert "forming generation 1: the run starts" in new.stderr
    again = run(tmp_path, "", "--rdzv-id", run_id)
    assert stopped not in again.stderr
    assert again.returncode == 0, again.stderr
    numbers = re.search(
        r"generation (\d): resuming the run after generation (\d), in which it was", again.stderr
    )
    assert numbers, again.stderr
    # The next one begins to form if the workers have stopped before the coordinator saw that the node leaves.
    assert int(numbers[1]) == int(numbers[2]) + 1
    assert numbers[2] in ("1", "2")
    another = run(tmp_path, "", "--rdzv-id", run_id)
    after = int(numbers[1]) + 1
    assert (
        f"generation {after}: a run with this id finished before, in generation {numbers[1]}"
        in another.stderr
    )
    assert stopped not in run(tmp_path, "").stderr, "the command has finished since"


@pytest.mark.prove
def test_a_node_on_standby_that_is_interrupted_with_all_others_is_stopped_with_the_run(
    tmp_path: Path,
) -> None:
    source = """
        import signal, sys
        signal.signal(signal.SIGTERM, lambda *_: None)
        print("up", flush=True)
        sys.stdin.read()
    """
    options = ["--nnodes", "1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", unique("both")]
    with training(tmp_path, *options, source=source) as seated:
        with started(*options_for(tmp_path, source, *options)) as spare:
            spare.log_until("on standby")
            seated.process.terminate()
            spare.process.terminate()
            ends = [spare.end()]
        ends.append(seated.end())  # its worker has saved
    for code, log in ends:
        assert code == ExitCode.STOPPED, log
        assert re.search(RESUMED, log.splitlines()[-1]), log


@pytest.mark.prove
def test_nothing_is_to_be_resumed_if_no_worker_was_started(tmp_path: Path) -> None:
    options = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    with started(*options_for(tmp_path, "", *options)) as agent:
        agent.log_until("waiting for 1 more node")
        agent.process.terminate()
        code, log = agent.end()
    assert code == ExitCode.STOPPED, log
    assert "the run was stopped" in log
    assert "to resume" not in log


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
