"""client.notice(), client.leave() and client.Agreement: what a worker is told, and how all ranks stop at one step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.client._notice import CAUSES
from elastic_agent.linux import boottime_ns, boottime_s
from elastic_agent.protocol.records import Cause
from tests.client.support import SLOT, launched, run_script, running, under_agent
from tests.waiting import GUARD_S

IN_A_WHILE_NS = 60 * 10**9

LOOK_ON_REQUEST = """
import sys, time
from elastic_agent import client

for line in sys.stdin:
    if line.strip() == "leave":
        client.leave()
    elif line.strip().isdigit():  # the machine's clock is set, and stands still
        time.time = lambda now_s=float(line): now_s
    notice = client.notice()
    print(notice and (notice.reason, notice.deadline, notice.seconds_left))
"""


def test_the_agent_and_its_client_number_the_causes_alike() -> None:
    assert tuple(cause.value for cause in Cause) == CAUSES


@pytest.mark.parametrize("cause", CAUSES)
def test_a_notice_is_seen_at_once_with_reason_and_deadline(cells: HeartbeatFile, cause: str) -> None:
    with running(LOOK_ON_REQUEST, under_agent(cells)) as worker:
        assert worker.ask("1000") == "None"
        deadline_ns = boottime_ns() + IN_A_WHILE_NS
        before_s = boottime_s()
        cells.notify(7, cause, deadline_ns)
        reason, unix_s, left_s = eval(worker.ask())
        left_by_another_clock_s = eval(worker.ask("86400"))[2]
        after_s = boottime_s()
    assert reason == cause
    earliest_s, latest_s = deadline_ns / 1e9 - after_s, deadline_ns / 1e9 - before_s
    assert earliest_s <= left_by_another_clock_s <= left_s <= latest_s
    assert earliest_s <= unix_s - 1000 <= latest_s


def test_a_newer_notice_replaces_the_first(cells: HeartbeatFile) -> None:
    with running(LOOK_ON_REQUEST, under_agent(cells)) as worker:
        cells.notify(7, "grow", 10**18)
        assert "grow" in worker.ask()
        cells.notify(9, "preempted", 10**18)
        assert "preempted" in worker.ask()


def test_the_agent_sees_which_workers_handle_notices_and_which_left(cells: HeartbeatFile) -> None:
    with running(LOOK_ON_REQUEST, under_agent(cells)) as worker:
        worker.ask()
        worker.ask()
        assert [cells.handles_notices(slot) for slot in range(3)] == [slot == SLOT for slot in range(3)]
        cells.notify(7, "drain", 10**18)
        worker.ask()
        assert not cells.left(SLOT)
        assert worker.process.stdin is not None
        worker.process.stdin.write("leave\n")
        assert worker.finish()[0] == 0
    assert [cells.left(slot) for slot in range(3)] == [slot == SLOT for slot in range(3)]


def test_without_an_agent_there_are_no_notices() -> None:
    done = run_script("from elastic_agent import client; print(client.notice()); client.leave()", {})
    assert done.stdout == "None\n"


def test_a_child_of_the_worker_gets_no_notice(cells: HeartbeatFile) -> None:
    script = """
    import os
    from elastic_agent import client
    client.heartbeat()
    if os.fork() == 0:
        print(client.notice(), flush=True)
        os._exit(0)
    os.wait()
    print(client.notice().reason)
    """
    cells.notify(1, "drain", 10**18)
    assert run_script(script, under_agent(cells)).stdout == "None\ndrain\n"


# -- all ranks at one step ----------------------------------------------------------------------

AGREE = """
import os, sys, time
import torch.distributed as dist

every, meeting_point, *cells = sys.argv[1:]

def train(rank):
    os.environ["ELASTIC_AGENT_HEARTBEAT"] = cells[rank]
    from elastic_agent import client

    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=3)
    agreement = client.Agreement(every=int(every))
    under_way, all_reduce = [], dist.all_reduce
    dist.all_reduce = lambda *args, **more: under_way.append(all_reduce(*args, **more)) or under_way[-1]
    for step in range(100_000):
        notice = agreement.notice()
        if notice is not None:
            assert all(work.is_completed() for work in under_way), "a rank that leaves would break it"
            print(step, notice.reason, notice.deadline_boottime, flush=True)
            client.leave()
        if step == 20 and rank == 0:
            print("training", flush=True)
        time.sleep(0.001 * (rank + 1))

ranks = []
for rank in range(3):
    if (pid := os.fork()) == 0:
        train(rank)
    ranks.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in ranks] == 3 * [0]
"""


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.prove), 3])
def test_all_ranks_stop_at_the_same_step_even_if_only_one_got_the_notice(tmp_path: Path, every: int) -> None:
    """Only rank 2's agent is quick enough to tell its worker."""
    files = [HeartbeatFile.create(tmp_path, 1) for rank in range(3)]
    command = [
        sys.executable,
        "-c",
        AGREE,
        str(every),
        str(tmp_path / "meet"),
        *(file.path for file in files),
    ]
    environment = launched(under_agent(files[0], slot=0))
    workers = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert workers.stdout is not None
        assert workers.stdout.readline() == "training\n"
        deadline_ns = boottime_ns() + IN_A_WHILE_NS
        before_s = boottime_s()
        files[2].notify(5, "walltime", deadline_ns)
        lines, _ = workers.communicate(timeout=GUARD_S)
        took_s = boottime_s() - before_s
        assert workers.returncode == 0
        said = [line.split() for line in lines.splitlines()]
        assert len(said) == 3
        assert len({step for step, _, _ in said}) == 1, said
        assert {reason for _, reason, _ in said} == {"walltime"}
        late_s = [float(deadline) - deadline_ns / 1e9 for _, _, deadline in said]
        assert all(-0.002 < late <= took_s for late in late_s), (
            "whole milliseconds, and the way to the others"
        )
        assert all(file.left(0) for file in files), "the agents of those who were not told know why they left"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(workers.pid, signal.SIGKILL)
        workers.communicate()
        for file in files:
            file.close()


def test_an_agreement_begins_anew_in_another_world(cells: HeartbeatFile) -> None:
    """Workers that go on in it with newly started ones count their calls as these do."""
    cells.notify(1, "drain", 10**18)
    script = (
        "import os\n"
        "from elastic_agent import client\n"
        "agreement = client.Agreement(every=2)\n"
        "print(agreement.notice())\n"
        "os.environ['ELASTIC_AGENT_GENERATION'] = '7'\n"
        "print(agreement.notice(), agreement.notice().reason)"
    )
    assert run_script(script, under_agent(cells)).stdout == "None\nNone drain\n"


def test_an_agreement_of_a_single_worker_returns_its_notice(cells: HeartbeatFile) -> None:
    cells.notify(1, "drain", 10**18)
    script = "from elastic_agent import client; print(client.Agreement().notice().reason)"
    assert run_script(script, under_agent(cells)).stdout == "drain\n"


def test_every_must_be_a_number_of_calls() -> None:
    done = run_script("from elastic_agent import client; client.Agreement(every=0)", {}, returncode=1)
    assert "ValueError: Agreement: every=0; expected a whole number of at least 1" in done.stderr
