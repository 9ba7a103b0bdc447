"""Four machines, in network namespaces, with faults on each of them, and without any."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.support import COMMAND, clean_environment
from tests.faults.machines import SUBNET, Machines, built

pytestmark = [pytest.mark.system, pytest.mark.prove]

NAMES = ("a", "b", "c", "d")
SCRIPT = "import torch\n\nprint(torch.__version__)\n"
BAD_SCRIPT = """
import os

import torch.distributed as dist

os.environ["MASTER_ADDR"] = "localhost"
dist.init_process_group("gloo")
"""


@pytest.fixture
def machines() -> Iterator[Machines]:
    with built(*NAMES) as found:
        yield found


@dataclass
class Doctor:
    """The command on one machine."""

    process: subprocess.Popen[str]
    out: str = ""
    err: str = ""

    @property
    def code(self) -> int:
        return int(self.process.returncode)


def examine(
    machines: Machines,
    folder: Path,
    options: Mapping[str, list[str]],
    variables: Mapping[str, Mapping[str, str]],
    under: Mapping[str, list[str]] | None = None,
) -> dict[str, Doctor]:
    """Run it on all machines to the end. ``options`` end with the script; ``under``: a command before it."""
    with ExitStack() as started:
        doctors: dict[str, Doctor] = {}
        for node, words in options.items():
            command = [*machines.within(node), *(under or {}).get(node, []), *COMMAND, "doctor"]
            command += ["--rdzv-endpoint", f"{SUBNET}.1:29400", "--node-id", node, *words]
            state = folder / f"state-{node}"
            process = subprocess.Popen(
                command,
                env=clean_environment({"XDG_STATE_HOME": str(state), **variables.get(node, {})}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                stdin=subprocess.DEVNULL,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            doctors[node] = Doctor(process)
        for doctor in doctors.values():
            doctor.out, doctor.err = doctor.process.communicate(timeout=200)
        return doctors


def write(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def filter_packets(machines: Machines, node: str, *rules: str) -> None:
    """Rules of nftables for what comes to this machine."""
    lines = ["add table inet lab", "add chain inet lab in { type filter hook input priority 0 ; }"]
    lines += [f"add rule inet lab in {rule}" for rule in rules]
    subprocess.run(
        [*machines.within(node), "nft", "-f", "-"], input="\n".join(lines) + "\n", text=True, check=True
    )


def test_every_planted_fault_is_reported_with_machine_and_remedy_on_all_machines(
    machines: Machines, tmp_path: Path
) -> None:
    if shutil.which("nft") is None or shutil.which("prlimit") is None:
        pytest.skip("this needs nft and prlimit (Debian: nftables, util-linux)")
    script, other = write(tmp_path / "one/train.py", SCRIPT), write(tmp_path / "two/train.py", BAD_SCRIPT)
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    elsewhere.mkdir()
    filter_packets(machines, "b", "tcp dport 32768-65535 tcp flags & (syn | ack) == syn drop")
    filter_packets(machines, "d", f"ip saddr {machines.address('c')} meta length > 1200 drop")
    filter_packets(machines, "a", "tcp dport 20000-20009 reject with tcp reset")
    common = ["--nnodes", "4", "--port-range", "20000:20009"]
    usual = [*common, "--paths", str(shared)]
    doctors = examine(
        machines,
        tmp_path,
        {
            "a": [*usual, script],
            "b": [*common, "--paths", str(elsewhere), "--lease-ttl", "9", script],
            "c": [*usual, "--json", script],
            "d": [*usual, other, "--lr", "0.1"],
        },
        {
            "c": {"GLOO_SOCKET_IFNAME": "^lo", "NCCL_SOCKET_IFNAME": "ib7", "NCCL_DEBUG": "INFO"},
        },
        {"b": ["prlimit", "--nofile=200"]},
    )
    assert [one.code for one in doctors.values()] == [1, 1, 1, 1], [one.err for one in doctors.values()]
    assert doctors["a"].out == doctors["b"].out == doctors["d"].out

    report = json.loads(doctors["c"].out)
    found = {
        (one["severity"], one["check"], machine): f"{one['cause']}; {one['remedy']}"
        for one in report["findings"]
        for machine in one["machines"]
        if one["check"] != "differs"
    }
    planted = {
        ("error", "connection", "b"): "a firewall drops the packets",
        ("error", "connection", "a"): "--port-range",
        ("error", "large-messages", "c"): "64 kB from c to d",
        ("error", "gloo-interface", "c"): "GLOO_SOCKET_IFNAME=^lo is a list",
        ("warning", "nccl-interface", "c"): "set NCCL_SOCKET_IFNAME=eth0",
        ("error", "script-master-address", "d"): "train.py:6 sets MASTER_ADDR=localhost",
        ("error", "path-not-shared", "b"): "mount the shared storage",
        ("warning", "open-files", "b"): "ulimit -n",
    }
    assert found.keys() == planted.keys()
    for key, words in planted.items():
        assert words in found[key]

    differences = {
        (one["machines"][0], one["cause"].removeprefix("machines differ in ").partition(":")[0])
        for one in report["findings"]
        if one["check"] == "differs"
    }
    assert differences == {
        ("b", "--lease-ttl"),
        ("c", "NCCL_DEBUG"),
        ("d", "script"),
        ("d", "script arguments"),
    }
    lines = doctors["a"].out.splitlines()
    assert lines[0].startswith("error")
    assert all("Remedy: " in line for line in lines if line.startswith(("error", "warning")))


def test_healthy_machines_have_no_findings(machines: Machines, tmp_path: Path) -> None:
    script = write(tmp_path / "one/train.py", SCRIPT)
    options = ["--nnodes", "2:4", "--port-range", "20000:20009", "--paths", str(tmp_path), script]
    doctors = examine(machines, tmp_path, dict.fromkeys(NAMES, options), {})
    for one in doctors.values():
        assert one.out.startswith(
            "no problems found on 4 machines; tested: 24 connections, 1 shared folder, an all-reduce over gloo ("
        ), one
        assert one.code == 0
    assert not [file for file in os.listdir(tmp_path) if file.startswith(".")], "files were left behind"
