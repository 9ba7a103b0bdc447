"""Runs that do not start, or not as intended: no worker of them fails."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .stage import SLEEPER, SUBNET, Case, Stage, Words

Play = Callable[[Stage], None]

SLOW_NAMES = "echo nameserver 10.213.77.3 > {0}; mount --bind {0} /etc/resolv.conf"
WAITS = Words("waiting for 1 more node", r"joined: a\b", "common causes: .*firewall")
"""What a machine can know of another one that never reached it."""


def b_with(*options: str, **how: Any) -> Play:
    """Start both agents, the second one with more; a callable is called with the stage."""

    def play(stage: Stage) -> None:
        stage.start("a")
        port = stage.cluster.port
        given = {name: value(stage) if callable(value) else value for name, value in how.items()}
        stage.start("b", *(option.format(port=port, other=port + 1) for option in options), **given)

    return play


def all_at(host: str) -> Play:
    return lambda stage: stage.start_all("--rdzv-endpoint", f"{host}:{stage.cluster.port}")


def filtered(rule: str) -> Play:
    def play(stage: Stage) -> None:
        stage.block("a", rule.format(stage.cluster.port))
        stage.start_all()

    return play


def listening(server: str) -> Play:
    """A program of Python, which is given the port of the endpoint, listens there."""

    def play(stage: Stage) -> None:
        port = stage.cluster.port
        stage.background("a", sys.executable, "-c", server.format(port), port=port)
        stage.start_all()

    return play


WEB_SERVER = "import http.server as h; h.HTTPServer(('', {0}), h.SimpleHTTPRequestHandler).serve_forever()"
SILENT_SERVER = "import socket, threading; s = socket.create_server(('', {0})); threading.Event().wait()"


def secret_of_b(text: str) -> Play:
    """Machine a has a secret; b has this one, or with an empty text none."""

    def play(stage: Stage) -> None:
        stage.start("a", ELASTIC_AGENT_SECRET="the secret of this run")
        stage.said("a", "forming generation 1")
        stage.start("b", **({"ELASTIC_AGENT_SECRET": text} if text else {}))

    return play


def once_a_says(text: str, *starts: dict[str, Any]) -> Play:
    """Start agents, the last one when the first one says so."""

    def play(stage: Stage) -> None:
        for how in starts[:-1]:
            stage.start(**how)
        stage.said("a", text)
        stage.start(**starts[-1])

    return play


def slow_endpoint(stage: Stage) -> None:
    """The third machine, which is to look up names, drops what it is asked."""
    stage.block("c", "udp dport 53 drop")
    stage.start("a")
    endpoint = "--rdzv-endpoint", f"store.example:{stage.cluster.port}"
    stage.start("b", *endpoint, setup=SLOW_NAMES.format(stage.folder / "resolv"))


def loopback_name(stage: Stage) -> None:
    hosts = stage.write("hosts-b", f"127.0.0.1 localhost\n127.0.1.1 host-a\n{SUBNET}.2 host-b\n")
    endpoint = "--rdzv-endpoint", f"host-a:{stage.cluster.port}"
    stage.start("a", *endpoint)
    stage.start("b", *endpoint, setup=f"mount --bind {hosts} /etc/hosts")


def read_only_state(stage: Stage) -> str:
    state = stage.folder / "state-b"
    state.mkdir()
    return f"mount -t tmpfs -o ro tmpfs {state}"


def other_version(package: str, number: str) -> Play:
    def folder(stage: Stage) -> str:
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n"
        return str(stage.write(f"other/{package}-{number}.dist-info/METADATA", metadata).parents[1])

    return b_with(PYTHONPATH=folder)


def other_script(stage: Stage) -> Path:
    return stage.write("two/sleeper.py", f"# version 2\n{SLEEPER}")


def etcd_is_down(stage: Stage) -> None:
    stage.start_all("--rdzv-backend", "etcd", "--rdzv-endpoint", f"{SUBNET}.1:{stage.cluster.port}")


STORE = SUBNET + r"\.1:\d+"
PASS_AN_ADDRESS = "pass an address of one of the machines"
SAME_COMMAND = "start all agents with the same command"


def both(cause: str, machine: str, remedy: str) -> dict[str, Words]:
    """The same on both terminals."""
    return dict.fromkeys(("a", "b"), Words(cause, machine, remedy))


def only_b_knows(cause: str, machine: str, remedy: str) -> dict[str, Words]:
    """Nothing of it reaches the other machine."""
    return {"a": WAITS, "b": Words(cause, machine, remedy)}


STARTING = (
    Case("the endpoint's agent is not started", lambda stage: stage.start("b"),
         {"b": Words("connection refused", STORE, "start the same command on")}),
    Case("one machine is not started", lambda stage: stage.start("a"), {"a": WAITS}),
    Case("a firewall drops packets to the store", filtered("tcp dport {} drop"),
         only_b_knows("no answer within .*firewall drops", STORE, "open the port there: firewall-cmd")),
    Case("a firewall rejects connections to the store", filtered("tcp dport {} reject"),
         only_b_knows("connection refused|unreachable", STORE, "and its firewall|open the port there")),
    Case("the endpoint's name is unknown on a machine", b_with("--rdzv-endpoint", "no-such-machine.invalid:{port}"),
         only_b_knows("no-such-machine.invalid does not resolve", "on this machine", "give an address, or a name")),
    Case("localhost as endpoint on all machines", all_at("localhost"),
         both("localhost:\\d+ means a different machine", "on every machine", PASS_AN_ADDRESS)),
    Case("an endpoint that is no machine's address", all_at(f"{SUBNET}.99"),
         both("the host is unreachable", SUBNET + r"\.99", "check that the endpoint is an address of one")),
    Case("an endpoint in a network without a route", b_with("--rdzv-endpoint", "192.0.2.1:{port}"),
         only_b_knows("no route to the network", r"192\.0\.2\.1", "check that the endpoint is an address of one")),
    Case("different ports on the machines", b_with("--rdzv-endpoint", SUBNET + ".1:{other}"),
         only_b_knows("connection refused", STORE, "compare its port with")),
    Case("different run ids on the machines", b_with("--rdzv-id", "jobb"),
         both(r"run jobb? of \w \(.* waits", r"of [ab] \(", "pass the same --rdzv-id")),
    Case("different versions of the script, no run id", b_with(script=other_script),
         both("waits .* another version of it", r"of [ab] \(", "copy the same version of the script"), run_id=None),
    Case("different versions of the script", b_with(script=other_script),
         both("differ in the script: ", r"\b[ab] and [ab]\b", "copy the same version")),
    Case("the script is missing on a machine", b_with(script=lambda stage: stage.folder / "elsewhere" / "sleeper.py"),
         {"a": Words("waiting for 1 more node", "joined: a", "ended with an error"),
          "b": Words('sleeper.py" does not exist', "", "copy it to this machine")}),
    Case("--nnodes forgotten on a machine", b_with("--nnodes", "1"),
         both("differ in --nnodes: ", "1 on b|2 on a", SAME_COMMAND)),
    Case("different --nnodes", b_with("--nnodes", "3"), both("differ in --nnodes: ", "3 on b|2 on a", SAME_COMMAND)),
    Case("a web server has the endpoint's port", listening(WEB_SERVER),
         both("is used by another program", STORE, "use another port, or stop")),
    Case("a silent program has the endpoint's port", listening(SILENT_SERVER),
         both("accepts connections but did not answer", STORE, "(ss -ltnp|has the port).*use another port")),
    Case("an agent of an earlier start still runs on a machine",
         once_a_says("generation 1: 2 nodes", {"node": "a"}, {"node": "b", "node_id": None, "name": "b-before"},
                     {"node": "b", "node_id": None}),
         {"b": Words("another agent on this machine .* as node host-b", r"process \d+, started", "stop that process")}),
    Case("more machines than --nnodes allows", once_a_says("generation 1: 2 nodes", *({"node": node} for node in "abc")),
         {"c": Words("on standby: .*maximum 2", r"a \(.*, b \(", "larger --nnodes")}, nodes=("a", "b", "c"), nnodes="2"),
    Case("two machines have the same node id", once_a_says("forming generation 1", *({"node": node, "node_id": "n1"} for node in "ab")),
         {"b": Words("node id n1 is held", SUBNET + r"\.1", "another --node-id")}),
    Case("a longer lease on a machine", b_with("--lease-ttl", "9"),
         {"b": Words("lease of 9 s, longer|differ in --lease-ttl", "b requests|9 on b", "same (--lease-ttl|command)")}),
    Case("the state directory is read-only", b_with(setup=read_only_state),
         only_b_knows("state-b.* is not (usable|writable)", "", "expected a writable directory")),
    Case("the endpoint's name means loopback on another machine", loopback_name,
         only_b_knows(r"host-a resolves to 127.0.1.1 on this machine", "this machine", "/etc/hosts")),
    Case("the name of the endpoint cannot be looked up", slow_endpoint,
         only_b_knows("store.example does not resolve", "this machine", "repair the name|give an address"),
         nodes=("a", "b", "c"), nnodes="2"),
    Case("different versions of torch", other_version("torch", "2.12.1"),
         both("differ in torch: ", "2.12.1 on b", "install the same version")),
    Case("the secret is missing on a machine", secret_of_b(""),
         {"a": WAITS, "b": Words("accepts only agents with its secret", "this agent has none", "pass the same --secret-file")}),
    Case("different secrets on the machines", secret_of_b("another secret: xyz"),
         {"a": Words("refused an agent", "with another secret", "with the secret of this run"),
          "b": Words("has another secret", "than this agent", "give every agent the same --secret-file")}),
    Case("different arguments of the script", b_with(arguments=("--lr", "0.1")),
         both("differ in the arguments", "on b", SAME_COMMAND)),
    Case("different variables of NCCL", b_with(NCCL_DEBUG="INFO"),
         both("differ in NCCL_DEBUG: ", "INFO on b", "set it alike everywhere")),
    Case("etcd does not run", etcd_is_down, both("etcd at .*refused", STORE, "start etcd on")),
    Case("too few open files are allowed for the agent", b_with(under=("prlimit", "--nofile=40")),
         {"b": Words("can have only 40 open files", "", "ulimit -n")}),
)  # fmt: skip
