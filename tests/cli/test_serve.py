"""`elastic-agent serve` as a user and systemd see it; what happens to runs is in tests/faults."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.cli.support import COMMAND, LONG_LEASE, clean_environment, elastic_agent, refusal
from tests.etcd import need_etcd
from tests.names import unique
from tests.ports import free_port
from tests.waiting import GUARD_S, wait_for


class Serving:
    """A server, and what it told systemd."""

    def __init__(self, folder: Path, address: str, *argv: str) -> None:
        self._manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._manager.bind(address.replace("@", "\0", 1))
        self._manager.settimeout(GUARD_S)
        self.log = folder / "serve.log"
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [*COMMAND, "serve", "--state-dir", str(folder / "state"), "--log-format", "json", *argv],
                env=clean_environment({"NOTIFY_SOCKET": address}),
                stderr=file,
                stdin=subprocess.DEVNULL,
            )

    def hear(self, word: str) -> None:
        """Wait until systemd is told this."""
        while word not in self._manager.recv(4096).decode().splitlines():
            pass

    @property
    def messages(self) -> list[str]:
        return [json.loads(line)["message"] for line in self.log.read_text().splitlines()]

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(GUARD_S)
        self._manager.close()


@contextmanager
def serving(folder: Path, *argv: str, address: str = "") -> Iterator[Serving]:
    with Serving(folder, address or str(folder / "notify"), *argv) as server:
        server.hear("READY=1")
        yield server


@pytest.mark.parametrize(
    ("signum", "abstract"),
    [(signal.SIGTERM, False), (signal.SIGINT, True)],
    ids=["SIGTERM, file", "SIGINT, abstract"],
)
def test_serve_notifies_systemd_and_exits_with_0_on_a_signal(
    tmp_path: Path, signum: signal.Signals, abstract: bool
) -> None:
    port = free_port()
    address = f"@{unique('elastic-agent-test')}" if abstract else ""
    with serving(tmp_path, "--rdzv-endpoint", f"localhost:{port}", address=address) as server:
        socket.create_connection(("127.0.0.1", port), GUARD_S).close()
        server.process.send_signal(signum)
        server.hear("STOPPING=1")
        assert server.process.wait(GUARD_S) == ExitCode.FINISHED
        assert server.messages == [
            f"serving at localhost:{port}",
            f"{signum.name} received: closing the store, which no run uses",
        ]


def test_serve_is_reachable_under_the_name_it_was_given(tmp_path: Path) -> None:
    """Also if that is a loopback address here, and another one elsewhere."""
    port = free_port()
    with serving(tmp_path, "--rdzv-endpoint", f"{socket.gethostname()}:{port}"):
        socket.create_connection((socket.gethostname(), port), GUARD_S).close()
    named = elastic_agent("serve", "--help").stdout
    assert "all addresses of this machine" in named


@pytest.mark.prove
def test_a_second_server_names_the_program_at_the_port(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    with serving(tmp_path, "--rdzv-endpoint", endpoint):
        second = elastic_agent("serve", "--rdzv-endpoint", endpoint, "--state-dir", str(tmp_path / "other"))
    assert second.returncode == ExitCode.NO_STORE == 4
    assert second.stderr.count("\n") == 1
    assert "the port is in use by a store of elastic-agent" in second.stderr


@pytest.mark.prove
def test_servers_with_one_state_directory_keep_their_runs_separate(tmp_path: Path) -> None:
    """As when one user serves two ports: neither inherits generations, restarts or the outcome of the other's run."""
    run_id = unique("run")
    for number in range(2):
        endpoint = f"localhost:{free_port()}"
        notify = f"@{unique('elastic-agent-test')}"
        own = ("--state-dir", str(tmp_path / f"agent-{number}"), "--log-format", "console")
        with serving(tmp_path, "--rdzv-endpoint", endpoint, address=notify):
            argv = ("--rdzv-endpoint", endpoint, "--rdzv-id", run_id, *own, "--no-python", "true")
            run = elastic_agent(*argv, variables=LONG_LEASE)
        assert "generation 1 succeeded" in run.stderr, run.stderr


@pytest.mark.parametrize(
    ("host", "said"),
    [("192.0.2.7", "is not this machine"), ("nowhere.invalid", "does not resolve on this machine")],
)
def test_an_endpoint_that_is_not_this_machine_is_refused(tmp_path: Path, host: str, said: str) -> None:
    done = elastic_agent("serve", "--rdzv-endpoint", host, "--state-dir", str(tmp_path))
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_serve_hosts_a_member_of_etcd_until_a_signal(tmp_path: Path) -> None:
    need_etcd()
    port = free_port()
    cluster = ",".join(f"{host}:{port}" for host in ("localhost", "192.0.2.7", "192.0.2.8"))
    with Serving(tmp_path, str(tmp_path / "manager"), "--rdzv-endpoint", cluster) as serving:
        serving.hear("READY=1")
        wait_for("its member", lambda: any("hosting the etcd member" in line for line in serving.messages))
        (member,) = (tmp_path / "state").glob("members/*/pid")
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(GUARD_S) == 0
    assert not Path(f"/proc/{int(member.read_text())}").exists()


MISTAKES = {
    "port 0": (["--rdzv-endpoint", "localhost:0"], "got port 0"),
    "another command's option": (["--nnodes", "2"], "--nnodes is an option of elastic-agent run"),
    "a page, which agents have": (["--status-port", "0"], "--status-port is an option of elastic-agent run"),
    "a script": (["train.py"], "serve runs no script"),
    "a wrong value": (["--log-level", "loud"], "expected debug, info, warning or error"),
    "several endpoints": (["--rdzv-endpoint", "a:1,b:2"], "expected one, three or five"),
    "an unknown option": (["--no-such-option"], "unknown option"),
    "a file as folder": (["--state-dir", os.devnull], "is not a directory"),
}


@pytest.mark.parametrize(("argv", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_usage_error_of_serve_is_one_line_and_exit_code_2(argv: list[str], said: str) -> None:
    assert said in refusal("serve", *argv)


def test_the_help_of_serve_has_only_its_options() -> None:
    done = elastic_agent("serve", "--help")
    assert re.findall(r"(?m)^  (--[a-z-]+) ", done.stdout) == [
        *("--rdzv-endpoint", "--secret-file", "--config", "--state-dir", "--log-format", "--log-level"),
    ]


def test_the_settings_of_a_job_are_accepted_by_serve(tmp_path: Path) -> None:
    """Settings of other commands are passed over, in the file as in the environment."""
    port = free_port()
    file = tmp_path / "job.toml"
    file.write_text(f'rdzv_endpoint = "localhost:{port}"\nnnodes = "2:4"\nscript = "/nowhere/train.py"\n')
    with serving(tmp_path, "--config", str(file)) as server:
        assert server.messages == [f"serving at localhost:{port}"]
