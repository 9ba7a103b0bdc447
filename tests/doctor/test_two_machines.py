"""The command as users give it on two machines: they meet, test the network between them, and print one report."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from elastic_agent.agent.preflight import other_addresses
from tests.cli.support import COMMAND, clean_environment, elastic_agent
from tests.ports import free_port
from tests.waiting import GUARD_S, wait_for

pytestmark = pytest.mark.system


def own_host() -> str:
    """Return what names this machine, and is no loopback address as far as there is another one."""
    addresses = [address for address in other_addresses() if ":" not in address]
    return addresses[0] if addresses else socket.gethostname()


def test_two_machines_meet_and_print_the_same_report_with_what_differs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    endpoint = f"{own_host()}:{free_port()}"
    both = ["--rdzv-endpoint", endpoint, "--nnodes", "2", "--wait", f"{GUARD_S:g}", "--json"]
    only_a = ["--paths", str(tmp_path / "missing")]

    def run(node: str, lease_s: str, more: list[str]) -> CompletedProcess[str]:
        own = ["--node-id", node, "--lease-ttl", lease_s, "--state-dir", str(tmp_path / node), *more]
        return elastic_agent("doctor", *both, *own, str(script))

    with ThreadPoolExecutor(2) as threads:
        doctors = [*threads.map(run, "ab", ("30", "60"), (only_a, []))]
    assert "generation 1" not in "".join(doctor.stderr for doctor in doctors), "the log of a run"
    assert not any((tmp_path / node / "status").exists() for node in "ab")
    printed = [doctor.stdout for doctor in doctors]
    assert printed[0] == printed[1]
    report = json.loads(printed[0])
    assert sorted(machine["name"] for machine in report["machines"]) == ["a", "b"]
    causes = [finding["cause"] for finding in report["findings"]]
    lease = "machines differ in --lease-ttl: 60 on b; 30 on a"
    assert any(cause.startswith(lease) for cause in causes), causes
    assert any(cause.startswith("machines differ in --paths: not set on b; ") for cause in causes), causes
    missing = [
        finding for finding in report["findings"] if finding["cause"].endswith("missing does not exist")
    ]
    assert sorted(finding["machine"] for finding in missing) == ["a", "b"]
    assert {finding["remedy"] for finding in missing} == {"check the path, or create it"}
    assert "2 connections" in report["tested"], causes
    assert len({doctor.returncode for doctor in doctors}) == 1


def test_a_machine_that_cannot_join_reports_why_and_what_it_has_found_itself(tmp_path: Path) -> None:
    """Another program has the port of the endpoint, and answers nothing."""
    with socket.create_server((own_host(), 0)) as other:
        endpoint = f"{own_host()}:{other.getsockname()[1]}"
        words = ["--rdzv-endpoint", endpoint, "--nnodes", "2", "--wait", "2", "--node-id", "a"]
        done = elastic_agent("doctor", *words, "--state-dir", str(tmp_path), "missing.py")
    assert done.returncode == 4, done.stderr
    assert (
        f"error    a: the machines cannot be examined together: no store answered at {endpoint}"
        in done.stdout
    )
    assert "another program listens there: `ss -ltnp`" in done.stdout, (
        "also where --wait is shorter than a dial"
    )
    assert 'error    a: script "missing.py" does not exist' in done.stdout
    assert done.stderr == "", "the same as in the report"


def test_ctrl_c_while_it_waits_for_the_others_is_no_finding() -> None:
    port = free_port()
    words = ["--rdzv-endpoint", f"{own_host()}:{port}", "--nnodes", "2", "--wait", f"{GUARD_S:g}"]
    process = subprocess.Popen(
        [*COMMAND, "doctor", *words],
        env=clean_environment({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )

    def serves() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((own_host(), port)) == 0

    wait_for("its store", serves)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=GUARD_S)
    assert (process.returncode, shown) == (130, b"")
    assert re.search(rb"elastic-agent doctor: stopped(: \S.*)?\n", said), said
