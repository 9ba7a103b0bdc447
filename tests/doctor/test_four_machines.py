"""Four machines, in network namespaces, with faults on each of them, and without any."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.cli.support import elastic_agent
from tests.etcd import need_etcd
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


def examine(
    machines: Machines,
    folder: Path,
    options: Mapping[str, list[str]],
    variables: Mapping[str, Mapping[str, str]] | None = None,
    under: Mapping[str, list[str]] | None = None,
    endpoint: str = f"{SUBNET}.1:29400",
) -> dict[str, CompletedProcess[str]]:
    """Run it on all machines to the end. ``options`` end with the script; ``under``: a command before it."""

    def run(node: str) -> CompletedProcess[str]:
        return elastic_agent(
            *("doctor", "--rdzv-endpoint", endpoint, "--node-id", node, *options[node]),
            variables={"XDG_STATE_HOME": str(folder / f"state-{node}"), **(variables or {}).get(node, {})},
            under=[*machines.within(node), *(under or {}).get(node, [])],
        )

    with ThreadPoolExecutor(len(options)) as threads:
        return dict(zip(options, threads.map(run, options), strict=True))


def write(file: Path, text: str) -> str:
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def filter_packets(machines: Machines, node: str, *rules: str) -> None:
    """Filter what comes to this machine from others, by rules of nftables."""
    lines = ["add table inet lab", "add chain inet lab in { type filter hook input priority 0 ; }"]
    lines += [f"add rule inet lab in {rule}" for rule in ("iifname lo accept", *rules)]
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
    filter_packets(machines, "a", "tcp dport 20000-20009 reject with tcp reset")
    common = ["--nnodes", "4", "--port-range", "20000:20009"]
    usual = [*common, "--paths", str(shared)]
    mounted = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"']
    doctors = examine(
        machines,
        tmp_path,
        {
            "a": [*usual, script],
            "b": [*usual, "--lease-ttl", "9", script],
            "c": [*usual, "--json", script],
            "d": [*usual, other, "--lr", "0.1"],
        },
        {"c": {"GLOO_SOCKET_IFNAME": "^lo", "NCCL_SOCKET_IFNAME": "ib7", "NCCL_DEBUG": "INFO"}},
        {"b": [*mounted, str(elsewhere), str(shared), "prlimit", "--nofile=200"]},
    )
    assert [doctor.returncode for doctor in doctors.values()] == [1, 1, 1, 1], doctors
    assert doctors["a"].stdout == doctors["b"].stdout == doctors["d"].stdout

    report = json.loads(doctors["c"].stdout)
    found = {
        (
            finding["is_error"],
            finding["check"],
            finding["machine"],
        ): f"{finding['cause']}; {finding['remedy']}"
        for finding in report["findings"]
        if finding["check"] != "differs"
    }
    planted = {
        (True, "connection", "b"): "a firewall drops the packets",
        (True, "connection", "a"): "--port-range",
        (True, "gloo-interface", "c"): "GLOO_SOCKET_IFNAME=^lo is a list",
        (False, "nccl-interface", "c"): "set NCCL_SOCKET_IFNAME=eth0",
        (True, "script-master-address", "d"): "train.py:6 sets MASTER_ADDR=localhost",
        (True, "path-not-shared", "b"): "mount the shared storage",
        (False, "open-files", "b"): "ulimit -n",
    }
    assert found.keys() == planted.keys()
    for key, words in planted.items():
        assert words in found[key]

    differences = {
        f"{finding['machine']}: {finding['cause'].removeprefix('machines differ in ').partition(':')[0]}"
        for finding in report["findings"]
        if finding["check"] == "differs"
    }
    assert differences == {"b: --lease-ttl", "c: NCCL_DEBUG", "d: script", "d: the arguments of the script"}
    lines = doctors["a"].stdout.splitlines()
    assert lines[0].startswith("error")
    assert all("Remedy: " in line for line in lines if line.startswith(("error", "warning")))


def test_healthy_machines_have_no_findings(machines: Machines, tmp_path: Path) -> None:
    script = write(tmp_path / "one/train.py", SCRIPT)
    options = ["--nnodes", "2:4", "--port-range", "20000:20009", "--paths", str(tmp_path), script]
    doctors = examine(machines, tmp_path, dict.fromkeys(NAMES, options))
    healthy = (
        "no problems found on 4 machines; tested: 24 connections, 1 shared folder, an all-reduce over gloo ("
    )
    for doctor in doctors.values():
        assert (doctor.returncode, doctor.stdout.startswith(healthy)) == (0, True), doctor
    assert not [file for file in os.listdir(tmp_path) if file.startswith(".")], "files were left behind"


def test_machines_that_host_the_store_together_meet_in_it_and_find_the_port_that_is_closed(
    machines: Machines, tmp_path: Path
) -> None:
    need_etcd()
    if shutil.which("nft") is None:
        pytest.skip("this needs nft (Debian: nftables)")
    script = write(tmp_path / "train.py", SCRIPT)
    words = ["--nnodes", "4", "--json", script]
    options = dict.fromkeys(NAMES, words)
    endpoint = ",".join(map(machines.address, NAMES[:3]))
    for is_closed in (False, True):
        if is_closed:
            filter_packets(machines, "c", "tcp dport 29401 drop")
        report = json.loads(examine(machines, tmp_path, options, endpoint=endpoint)["d"].stdout)
        assert [machine["name"] for machine in report["machines"]] == [*NAMES]
        closed = [(found["machine"], found["cause"]) for found in report["findings"]]
        cause = f"no connection to etcd at {machines.address('c')}:29401"
        assert closed == ([(node, cause) for node in "abd"] if is_closed else [])
