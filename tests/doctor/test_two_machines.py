"""The command as users give it on two machines: they meet, test the network between them, and print one report."""

from __future__ import annotations

import json
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from elastic_agent.doctor.network import interfaces, other_addresses
from tests.cli.support import COMMAND, clean_environment
from tests.ports import free_port
from tests.waiting import GUARD_S

pytestmark = pytest.mark.system


def own_host() -> str:
    """Return what names this machine, and is no loopback address as far as there is another one."""
    addresses = [address for address in other_addresses(interfaces()) if ":" not in address]
    return addresses[0] if addresses else socket.gethostname()


def test_two_machines_meet_and_print_the_same_report_with_what_differs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    endpoint = f"{own_host()}:{free_port()}"
    command = [
        *COMMAND,
        "doctor",
        "--json",
        "--rdzv-endpoint",
        endpoint,
        "--nnodes",
        "2",
        "--wait",
        f"{GUARD_S:g}",
    ]
    leases_s = {"a": "30", "b": "60"}
    with ExitStack() as started:
        doctors = []
        for node_id, lease_s in leases_s.items():
            argv = (
                "--node-id",
                node_id,
                "--lease-ttl",
                lease_s,
                "--state-dir",
                str(tmp_path / node_id),
                "--paths",
                str(tmp_path / "missing"),
                str(script),
            )
            doctor = subprocess.Popen(
                [*command, *argv], env=clean_environment(), stdout=subprocess.PIPE, text=True
            )
            doctors.append(started.enter_context(doctor))
            started.callback(doctor.kill)
        printed = [doctor.communicate()[0] for doctor in doctors]
    assert printed[0] == printed[1]
    report = json.loads(printed[0])
    assert sorted(machine["machine"] for machine in report["machines"]) == ["a", "b"]
    causes = [finding["cause"] for finding in report["findings"]]
    assert any(
        cause.startswith("machines differ in --lease-ttl: 60.0 on b; 30.0 on a") for cause in causes
    ), causes
    (missing,) = (one for one in report["findings"] if one["cause"].endswith("missing does not exist"))
    assert (sorted(missing["machines"]), missing["remedy"]) == (["a", "b"], "check the path, or create it")
    assert "2 connections" in report["tested"], causes
    assert len({doctor.returncode for doctor in doctors}) == 1
