"""elastic-agent talks to this machine only, unless it is given the address of another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INSIDE = '''
"""In a network namespace with nothing but loopback: how often each command tried to leave it."""
import json, socket, subprocess, sys

def attempts():
    """How often the kernel found no route, IPv4 and IPv6; for TCP, UDP and, with them, look-ups of names in DNS."""
    lines = [line.split() for line in open("/proc/net/snmp") if line.startswith("Ip:")]
    ipv4 = dict(zip(*lines))["OutNoRoutes"]
    ipv6 = dict(line.split() for line in open("/proc/net/snmp6"))["Ip6OutNoRoutes"]
    return int(ipv4) + int(ipv6)

def count(run):
    before = attempts()
    run()
    return attempts() - before

def connect():
    for family, address in (socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"):
        for kind in socket.SOCK_STREAM, socket.SOCK_DGRAM:
            with socket.socket(family, kind) as one:
                one.connect_ex((address, 53))

subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
agent = [sys.executable, "-m", "elastic_agent"]
script = sys.argv[1]
words = ["--help"], ["version"], ["--nproc-per-node", "2", script]
found = {command[0]: count(lambda: subprocess.run([*agent, *command], stdout=subprocess.DEVNULL)) for command in words}
print(json.dumps({"control": count(connect), "found": found}))
'''
SCRIPT = """
import os
from pathlib import Path

if os.environ["RANK"] == "0":
    tables = {name: Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6", "udp", "udp6")}
    bound = {line.split()[1].split(":")[0] for lines in tables.values() for line in lines}
    Path(__file__).with_name("bound").write_text(" ".join(sorted(bound)))
"""
LOOPBACK = re.compile(r"[0-9A-F]{6}7F|0{24}01000000|0{16}FFFF0000[0-9A-F]{6}7F")
"""As /proc/net shows 127.0.0.0/8, ::1 and ::ffff:127.0.0.0/104."""


@pytest.mark.prove
@pytest.mark.skipif(
    sys.byteorder != "little", reason="/proc/net shows addresses in the order of this machine"
)
def test_a_run_on_one_machine_reaches_for_no_other(tmp_path: Path) -> None:
    missing = [name for name in ("unshare", "ip") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    apart = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("may not create network namespaces")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*apart, sys.executable, "-c", INSIDE, script],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["control"] == 4, "the kernel counts what tries to leave"
    assert set(report["found"].values()) == {0}, report
    assert "the run finished" in done.stderr
    bound = set((tmp_path / "bound").read_text().split())
    assert bound
    assert [address for address in bound if not LOOPBACK.fullmatch(address)] == []
