"""An agent as a service of a real systemd: start, stop, crash, hang, and what a person sees meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent import linux
from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.processes import freeze
from tests.processes import without_first_thread

from .container import Container, booted
from .jobs import AGENT, SOON, Job

pytestmark = [pytest.mark.system, pytest.mark.prove]

WATCHED = f"{SOON}WatchdogSec=2\n"


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """One machine for all tests here; each has a job of its own on it."""
    with booted(tmp_path_factory.mktemp("systemd"), "n1") as (machine,):
        machine.install(AGENT)
        machine.edit(AGENT.name, SOON)
        machine.boot()
        yield machine


def ended_well(code: int) -> dict[str, str]:
    """How systemd says that the service ended with this exit code, without another start."""
    return {
        "ActiveState": "inactive",
        "Result": "success",
        "ExecMainStatus": str(int(code)),
        "NRestarts": "0",
    }


def left_of(processes: list[int]) -> list[int]:
    return [pid for pid in processes if Path(f"/proc/{pid}").exists()]


# -- start and stop -----------------------------------------------------------------------------


def test_the_unit_is_ready_with_the_world_and_a_stop_lets_workers_save(machine: Container) -> None:
    job = Job("digits", [machine])
    machine.systemctl("enable", "--now", job.unit)
    assert job.status().startswith("generation 1: 1 node, 1 worker"), "the world is up when the start is over"
    job.wait_training("n1")
    job.wait_status(r"generation 1: 1 node, 1 worker, step \d+")
    shown = machine.systemctl("status", job.unit)
    assert "active (running)" in shown
    assert 'Status: "generation 1: 1 node, 1 worker, step ' in shown
    assert [line["inherited"] for line in job.lines("begun")] == [[]], "no worker may speak for the agent"

    processes = machine.processes(job.unit)
    assert len(processes) >= 4, "agent, guard, worker, and what the worker left"
    group = machine.group(job.unit)
    machine.systemctl("stop", job.unit)
    last = job.lines("step")[-1]["step"]
    assert job.checkpoint() == {"step": last, "why": "told"}
    assert job.ended() == ended_well(ExitCode.STOPPED), "it was the only node"
    assert job.status() == "stopped: n1 leaves (SIGTERM received); no other node can continue the run"
    assert left_of(processes) == []
    assert not group.exists()


def test_a_stopped_run_resumes_and_a_stop_waits_for_workers_to_save(machine: Container) -> None:
    job = Job("noticed", [machine])
    machine.edit(job.unit, f"{SOON}TimeoutStopSec=1\n")
    machine.systemctl("daemon-reload")
    (job.folder / "notices").touch()
    job.start()
    first = job.wait_training("n1")
    asked = machine.run("/opt/elastic-agent/bin/elastic-agent", "stop", "--run", job.name)
    assert asked.returncode == 0, asked.stderr
    machine.wait_state(job.unit, "inactive")
    assert job.ended() == ended_well(ExitCode.STOPPED)
    saved = job.checkpoint()
    assert saved["why"] == "operator"

    machine.systemctl("start", job.unit)
    second = job.wait_training("n1", after=first)
    assert min(job.steps(second)) == saved["step"] + 1
    (job.folder / "slow").write_text("2.5")
    machine.systemctl("stop", "--no-block", job.unit)
    job.wait_status(
        r"SIGTERM received: generation \d: 1 node, 1 worker, step \d+; .*: workers may save and exit"
    )
    machine.wait_state(job.unit, "inactive", "failed")
    assert job.checkpoint() == {"step": job.steps(second)[-1], "why": "drain"}
    assert job.ended()["Result"] == "success"


def test_the_unit_is_ready_while_it_waits_for_other_machines(machine: Container) -> None:
    job = Job("pair", [machine], {"nnodes": "2"})
    machine.systemctl("enable", "--now", job.unit)
    job.wait_status(r"waiting for 1 more node \(at least 2 required\).*")
    machine.systemctl("stop", job.unit)
    assert job.ended()["Result"] == "success"


def test_the_unit_is_not_ready_while_dialling_the_store_and_can_be_stopped(machine: Container) -> None:
    unreachable = "n1:9"
    job = Job("lonely", [machine], {"rdzv_backend": "etcd", "rdzv_endpoint": unreachable})
    machine.systemctl("enable", "--now", "--no-block", job.unit)
    job.wait_status(rf"waiting for the store at {unreachable}: .+")
    assert machine.show(job.unit, "ActiveState")["ActiveState"] == "activating"
    processes = machine.processes(job.unit)
    machine.systemctl("stop", job.unit)
    assert job.ended()["ActiveState"] == "inactive"
    assert left_of(processes) == []


def test_a_run_that_has_finished_is_a_success_and_is_not_started_again(machine: Container) -> None:
    job = Job("short", [machine])
    job.finish()
    machine.systemctl("enable", "--now", job.unit)
    machine.wait_state(job.unit, "inactive")
    assert job.ended() == ended_well(ExitCode.FINISHED)
    assert job.status().startswith("finished: ")


def test_an_unknown_key_in_the_settings_file_is_one_line_and_not_retried(
    machine: Container,
) -> None:
    job = Job("typo", [machine], {"nnode": "1:4"})
    assert machine.run("systemctl", "enable", "--now", job.unit).returncode != 0
    machine.wait_state(job.unit, "failed")
    assert job.ended()["ExecMainStatus"] == str(int(ExitCode.USAGE))
    assert job.ended()["NRestarts"] == "0"
    said = machine.journal("--unit", job.unit, "--identifier", "elastic-agent")
    assert [entry["MESSAGE"] for entry in said] == [
        'elastic-agent: /etc/elastic-agent/typo.toml: unknown key "nnode"; did you mean nnodes?'
    ]


# -- crash and hang -----------------------------------------------------------------------------


def test_the_agent_restarts_killed_workers_and_systemd_a_killed_agent(
    machine: Container,
) -> None:
    job = Job("crashes", [machine])
    job.start()
    agent = machine.main_process(job.unit)
    first = job.wait_training("n1")
    linux.send_signal(job.worker(), signal.SIGKILL)
    second = job.wait_training("n1", after=first)
    assert machine.main_process(job.unit) == agent
    check_journal(machine, job, failed=first)

    processes = machine.processes(job.unit)
    linux.send_signal(agent, signal.SIGKILL)
    job.wait_training("n1", after=second)
    assert left_of(processes) == [], "the workers of the agent that was killed"
    machine.wait_state(job.unit, "active")
    assert job.ended()["NRestarts"] == "1"
    machine.systemctl("disable", "--now", job.unit)


def check_journal(machine: Container, job: Job, failed: int) -> None:
    """It has the agent's lines, which can be searched by priority, and the output of the workers."""
    said = "--unit", job.unit, "_TRANSPORT=stdout"
    failure = machine.journal(*said, "--priority=err")[0]["MESSAGE"]
    assert "SIGKILL" in failure
    assert f"[{job.name} n1 g{failed}]" in failure
    priorities = {entry["MESSAGE"]: entry["PRIORITY"] for entry in machine.journal(*said)}
    started = {priority for line, priority in priorities.items() if f"[{job.name} n1 g{failed + 1}]" in line}
    assert "6" in started
    assert "a line of the worker's own" in priorities


def start_watched(machine: Container, job: Job) -> int:
    """Start a job that systemd watches, and return the generation in which it trains."""
    machine.edit(job.unit, WATCHED)
    machine.systemctl("daemon-reload")
    job.start()
    return job.wait_training("n1")


def test_the_watchdog_ends_an_agent_stopped_by_a_signal(machine: Container) -> None:
    job = Job("frozen", [machine])
    first = start_watched(machine, job)
    processes = machine.processes(job.unit)
    freeze(machine.main_process(job.unit))
    job.wait_training("n1", after=first)
    assert left_of(processes) == []
    assert watchdog_barked(machine, job)
    machine.systemctl("disable", "--now", job.unit)


def test_the_watchdog_ends_an_agent_whose_loop_hangs(machine: Container) -> None:
    job = Job("hung", [machine])
    first = start_watched(machine, job)
    with without_first_thread(machine.main_process(job.unit)):  # in which the loop runs
        machine.wait("the watchdog", lambda: watchdog_barked(machine, job))
    job.wait_training("n1", after=first)
    traceback = [str(entry["MESSAGE"]) for entry in machine.journal("--unit", job.unit, "_TRANSPORT=stdout")]
    assert "Fatal Python error: Aborted" in traceback, "it says where it hung"
    assert any("in run_forever" in line for line in traceback)
    machine.systemctl("disable", "--now", job.unit)


def watchdog_barked(machine: Container, job: Job) -> bool:
    said = machine.journal("--unit", job.unit, "_PID=1")
    return any("Watchdog timeout" in entry["MESSAGE"] for entry in said)


def test_a_crash_loop_of_the_service_ends(machine: Container) -> None:
    job = Job("loop", [machine])
    machine.systemctl("enable", "--now", "--no-block", job.unit)
    for crash in range(5):
        machine.wait(f"start {crash + 1}", lambda: machine.show(job.unit, "MainPID")["MainPID"] != "0")
        linux.send_signal(machine.main_process(job.unit), signal.SIGKILL)
        machine.wait("systemd to know", lambda crash=crash: has_crashed(machine, job, crash + 1))
    machine.wait_state(job.unit, "failed")
    said = machine.journal("--unit", job.unit, "_PID=1")
    assert any("Start request repeated too quickly" in entry["MESSAGE"] for entry in said)
    machine.systemctl("reset-failed", job.unit)
    job.start()
    job.wait_training("n1")
    machine.systemctl("disable", "--now", job.unit)


def has_crashed(machine: Container, job: Job, times: int) -> bool:
    said = machine.journal("--unit", job.unit, "_PID=1")
    return sum("Main process exited" in entry["MESSAGE"] for entry in said) >= times


ENDS = {
    ExitCode.FINISHED: "inactive",
    ExitCode.FAILED: "failed",
    ExitCode.USAGE: "failed",
    ExitCode.REFUSED: "failed",
    ExitCode.DRAINED: "inactive",
    ExitCode.STOPPED: "inactive",
    ExitCode.INTERRUPTED: "inactive",
    ExitCode.TERMINATED: "inactive",
}
"""Exit codes after which it is not started again, and what systemd calls it then."""


@pytest.mark.parametrize("code", list(ExitCode), ids=str)
def test_the_exit_code_decides_whether_the_service_is_restarted(machine: Container, code: int) -> None:
    job = Job(f"code{int(code)}", [machine])
    machine.edit(
        job.unit, f"[Service]\nType=exec\nExecStart=\nExecStart=sh -c 'exit {int(code)}'\nRestartSec=1h\n"
    )
    machine.systemctl("daemon-reload")
    machine.run("systemctl", "enable", "--now", job.unit)  # returns when the program runs, or has ended
    wanted = ENDS.get(code, "activating (auto-restart)")
    assert machine.wait_state(job.unit, "inactive", "failed", "activating (auto-restart)").startswith(wanted)
    machine.systemctl("disable", "--now", job.unit)
