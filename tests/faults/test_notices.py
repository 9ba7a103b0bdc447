"""Stopped in good order: workers are told, save at one step and leave, and no step is lost or done twice."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent.agent.control.socket import agents_here
from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.node import NodeProcess
from tests.processes import status_field

from .cluster import HANDLING_NOTICES, Cluster
from .conftest import MakeCluster, on_both
from .rules import check_nothing_left

pytestmark = [pytest.mark.system, pytest.mark.prove]


def train(cluster: Cluster, *nodes: str, after: int = 0, arguments: tuple[str, ...] = (), **how: Any) -> int:
    """Start these nodes, the first as the store's host, one worker each; the generation in which all train."""
    cluster.start_host(nodes[0], script=HANDLING_NOTICES, arguments=arguments, **how)
    for node in nodes[1:]:
        cluster.start(node, script=HANDLING_NOTICES, arguments=arguments, **how)
    return cluster.wait_training(*nodes, after=after)


def ask(cluster: Cluster, *words: str) -> subprocess.CompletedProcess[str]:
    """A command typed on this machine."""
    assert cluster.run_id is not None
    return subprocess.run(
        [sys.executable, "-m", "elastic_agent", *words, "--run", cluster.run_id],
        capture_output=True,
        text=True,
        timeout=90,
    )


def check_every_step_once(cluster: Cluster) -> None:
    """Rank 0 took every step exactly once, whichever generation it was in."""
    taken = [one["step"] for one in cluster.steps() if one["rank"] == 0]
    assert taken == list(range(1, len(taken) + 1)), cluster.story()


def check_all_told_and_left(cluster: Cluster, generation: int, reason: str) -> None:
    """Every worker of the generation was told why, and all left after the same step."""
    workers = {one["worker_id"] for one in cluster.born() if one["generation"] == generation}
    left = [one for one in cluster.notes("left") if one["generation"] == generation]
    assert {one["worker_id"] for one in left} == workers, cluster.story()
    assert {one["reason"] for one in left} == {reason}
    assert len({one["step"] for one in left}) == 1, cluster.story()


def check_restarts(cluster: Cluster, restarts: int = 0) -> None:
    assert {one["restarts"] for one in cluster.born()} == {restarts}


# -- the run ends -------------------------------------------------------------------------------


@on_both
def test_a_notice_signal_to_one_agent_saves_on_all_nodes_and_the_run_can_be_resumed(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("3")
    first = train(cluster, "a", "b", "c")
    cluster.agents["b"].signal(signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("abc", ExitCode.STOPPED)
    check_all_told_and_left(cluster, first, "preempted")
    assert check_nothing_left(cluster) is None

    again = train(cluster, "a", "b", "c", after=first)
    assert again > first
    saved = max(one["step"] for one in cluster.notes("left"))
    begun = [one for one in cluster.born() if one["generation"] >= again]
    assert {one["step"] for one in begun} == {saved}
    assert {one["run_id"] for one in cluster.born()} == {cluster.run_id}
    cluster.let_finish()
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}
    check_every_step_once(cluster)
    check_restarts(cluster)


def test_stop_ends_the_run_on_all_nodes_with_the_state_saved(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3")
    first = train(cluster, "a", "b")
    said = ask(cluster, "stop", "--deadline", "40")
    assert said.returncode == 0, said.stderr
    assert f"stopping run {cluster.run_id}; workers that handle notices have 40 s to save" in said.stdout
    assert said.stdout.endswith("to resume it, start it again with this run id\n")
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED)
    check_all_told_and_left(cluster, first, "operator")
    left = [one for one in cluster.notes("left") if one["generation"] == first]
    assert all(30 < one["left_s"] <= 40 for one in left), left


@pytest.mark.parametrize("arguments", [("--blind",), ("--stubborn",)], ids=["blind", "stubborn"])
def test_workers_still_running_at_the_deadline_get_sigterm(
    make_cluster: MakeCluster, arguments: tuple[str, ...]
) -> None:
    cluster = make_cluster("1:2", "--notice-time", "1.5")
    train(cluster, "a", "b", arguments=arguments)
    cluster.agents["a"].signal(signal.SIGUSR1)
    told = cluster.wait_event("notice", "b")
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED)
    stopping = cluster.wait_event("stopping", "b")
    assert stopping["boottime_s"] - told["boottime_s"] > 1.4, "they could go on until then"
    check_nothing_left(cluster)


SLURM_STEP = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}


def test_a_signal_to_all_processes_of_a_slurm_step_lets_workers_save(make_cluster: MakeCluster) -> None:
    """Warm workers and cold ones, and the processes beside them. The controller cannot be asked here."""
    cluster = make_cluster("2", "--requeue", "never")
    step = {**SLURM_STEP, "SLURM_CONF": "/dev/null"}
    cluster.start_host("a", 2, script=HANDLING_NOTICES, **step)
    cluster.start("b", 1, "--worker-start", "cold", script=HANDLING_NOTICES, **{**step, "SLURM_PROCID": "1"})
    first = cluster.wait_training("a", "b")
    cluster.wait_event("spawner_ready", "a")
    for name in "ab":
        cluster.agents[name].signal_all(signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED), cluster.story()
    check_all_told_and_left(cluster, first, "walltime")
    check_every_step_once(cluster)
    assert not cluster.journal("spawner_died") + cluster.journal("guard_lost")
    check_nothing_left(cluster)


def test_workers_that_exit_on_the_signal_do_not_finish_the_run(
    make_cluster: MakeCluster,
) -> None:
    """The script knows nothing of notices; the signal reaches it, as in a systemd scope."""
    arguments = ("--blind", "--handles", "SIGUSR1")
    cluster = make_cluster("2")
    first = train(cluster, "a", "b", arguments=arguments)
    for name in "ab":
        cluster.agents[name].signal_all(signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("ab", ExitCode.STOPPED), cluster.story()
    check_all_told_and_left(cluster, first, "SIGUSR1")
    train(cluster, "a", "b", after=first, arguments=arguments)
    cluster.let_finish()
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}
    check_every_step_once(cluster)
    check_restarts(cluster)


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_workers_killed_by_the_signal_are_not_restarted_or_charged(
    make_cluster: MakeCluster, signum: signal.Signals
) -> None:
    """With no restart allowed, one that was charged would fail the run."""
    cluster = make_cluster("2", "--max-restarts", "0")
    first = train(cluster, "a", "b")
    for name in "ab":
        cluster.agents[name].signal_all(signum)
    ends = set(cluster.wait_end().values())
    may_leave = (
        {ExitCode.DRAINED} if signum == signal.SIGTERM else set()
    )  # but for the last node, which ends the run
    assert ends - may_leave == {ExitCode.STOPPED}, cluster.story()
    assert max(cluster.worlds()) == first
    assert not cluster.journal("spawner_died") + cluster.journal("guard_lost")


def test_training_that_completes_during_a_stop_is_finished(make_cluster: MakeCluster) -> None:
    """Workers of a Slurm step ignore the signal, so their success is one: requeued, they would only do it again."""
    cluster = make_cluster("1", "--requeue", "never")
    cluster.start_host(
        "a", 2, script=HANDLING_NOTICES, arguments=("--blind",), SLURM_CONF="/dev/null", **SLURM_STEP
    )
    cluster.wait_training("a")
    cluster.agents["a"].signal_all(signal.SIGUSR1)
    cluster.wait_event("notice", "a")
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED}, cluster.story()


def hears(agent: NodeProcess, signum: signal.Signals) -> bool:
    """Whether the signal has a handler there."""
    return bool(int(status_field(agent.pid, "SigCgt"), 16) >> (signum - 1) & 1)


def test_a_notice_signal_to_a_starting_agent_is_kept(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:3")
    first = train(cluster, "a", "b")
    late = cluster.start("c", script=HANDLING_NOTICES)
    cluster.wait("c to hear signals", lambda: hears(late, signal.SIGUSR1) or None)
    assert not cluster.journal(node="c"), "it still imports torch"
    late.signal(signal.SIGUSR1)
    assert cluster.wait_end() == dict.fromkeys("abc", ExitCode.STOPPED)
    check_all_told_and_left(cluster, first, "preempted")


# -- a node leaves, or comes --------------------------------------------------------------------


@on_both
def test_a_drained_node_that_returns_is_let_in_with_a_notice(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:2")
    first = train(cluster, "a", "b")
    said = ask(cluster, "drain", "b")
    assert (said.returncode, said.stderr) == (0, "")
    assert f"run {cluster.run_id}: draining b; workers that handle notices have 30 s to save" in said.stdout
    assert f"run {cluster.run_id}: b has left; the other nodes continue" in said.stdout
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}
    second = cluster.wait_training("a", after=first)
    check_all_told_and_left(cluster, first, "drain")

    cluster.wait("workers to be seen to heed", lambda: heeded(cluster, second))
    cluster.start("b", script=HANDLING_NOTICES)
    cluster.wait_training("a", "b", after=second)
    check_all_told_and_left(cluster, second, "grow")
    cluster.agents["b"].signal(signal.SIGUSR1)
    cluster.wait_end()
    check_every_step_once(cluster)
    check_restarts(cluster)


def heeded(cluster: Cluster, generation: int) -> bool:
    """Whether an agent said that workers of this generation look at notices (its second word that they run)."""
    said = [one for one in cluster.journal("state") if one["generation"] == generation]
    return any(one.get("handles_notices") for one in said)


def test_a_drain_of_workers_that_do_not_handle_notices_is_immediate(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("1:2")
    first = train(cluster, "a", "b", arguments=("--blind",))
    cluster.agents["b"].terminate()
    assert cluster.wait_end("b") == {"b": ExitCode.DRAINED}
    stopping = cluster.wait_event("stopping", "b")
    asked = cluster.wait_event("drain", "b")
    assert stopping["boottime_s"] - asked["boottime_s"] < 2.0, "no node is waited for"
    assert cluster.world(first).keys() == {"a", "b"}


def test_training_is_bit_identical_after_any_number_of_stops(
    make_cluster: MakeCluster,
) -> None:
    """A drain, a growth and two stops, beside a run that nothing happened to."""
    cluster = make_cluster("1:2")
    first = train(cluster, "a", "b")
    cluster.agents["b"].terminate()
    second = cluster.wait_training("a", after=first)
    cluster.wait("workers to be seen to heed", lambda: heeded(cluster, second))
    cluster.start("b", script=HANDLING_NOTICES)
    newest = cluster.wait_training("a", "b", after=second)
    for name in ("b", "a"):
        cluster.agents[name].signal(signal.SIGUSR1)
        cluster.wait_end()
        newest = train(cluster, "a", "b", after=newest)
    cluster.let_finish()
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}
    assert newest >= first + 4
    check_every_step_once(cluster)
    steps = str(max(one["step"] for one in cluster.steps()))

    undisturbed = make_cluster("1")
    undisturbed.start("a", 2, script=HANDLING_NOTICES, arguments=("--steps", steps, "--pause", "0"))
    undisturbed.wait_end()
    weights = [torch.load(one.folder / "weights.pt") for one in (cluster, undisturbed)]
    assert torch.equal(*weights)


# -- what is typed wrongly ----------------------------------------------------------------------


def typed(*words: str) -> tuple[int, str]:
    """Exit code and what stands on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "elastic_agent", *words], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("drain", "a", "b"), "drain: got 'a b'; expected at most one node"),
        (("stop", "a"), "stop: got 'a'; expected no arguments other than options"),
        (("stop", "--deadline", "-5"), "--deadline: got '-5'; expected a number of seconds from now"),
        (("stop", "--deadline", "soon"), "--deadline: got 'soon'; expected a number of seconds from now"),
        (("drain", "--deadline"), "drain: --deadline requires a value"),
        (("drain", "--now"), "drain: unknown option '--now'"),
        (
            ("stop", "--run", "no-such-run"),
            "no running agent of run no-such-run found on this machine for this user",
        ),
    ],
)
def test_an_error_of_drain_or_stop_is_one_line(words: tuple[str, ...], complaint: str) -> None:
    code, said = typed(*words)
    assert code == ExitCode.USAGE
    assert complaint.replace("'", '"') in said, said
    assert len(said.splitlines()) == 1


def test_drain_reports_an_unknown_node_and_stops_the_run_with_its_only_node(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("1")
    train(cluster, "a")
    said = ask(cluster, "drain", "z")
    assert said.returncode == ExitCode.USAGE
    assert f"run {cluster.run_id} has no node z; expected one of a" in said.stderr
    said = ask(cluster, "drain")
    assert (
        f"run {cluster.run_id}: the workers of a have exited, and the run is stopped; to resume it"
        in said.stdout
    )
    assert cluster.wait_end() == {"a": ExitCode.STOPPED}


def test_garbage_on_the_control_socket_has_no_effect(make_cluster: MakeCluster) -> None:
    import socket

    cluster = make_cluster("1")
    train(cluster, "a")
    (agent,) = (one for one in agents_here() if one.pid == cluster.agents["a"].pid)
    for junk in (b"", b"\n", b"{}\n", b'{"do":"dance"}\n', b"\xff" * 100_000, b'{"do":"drain","node":7}\n'):
        with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(ConnectionError):
            sock.connect(f"\0{agent.name}")
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            sock.recv(1000)
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED}
    assert not cluster.agents["a"].lines("Traceback"), Path(cluster.agents["a"].log).read_text()
