"""Runs that do not start, or not as intended: no worker of them fails."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import sys
from collections.abc import Callable

from .cases import Case
from .stage import SLEEPER, SUBNET, Stage, Words

Play = Callable[[Stage], None]

SLOW_NAMES = "echo nameserver 10.213.77.3 > {0}; mount --bind {0} /etc/resolv.conf"
"""The third machine drops what it is asked."""
WAITS = Words("waiting for 1 more node", r"joined: a\b", "common causes: .*firewall")
"""What a machine can know of another one that never reached it."""


def only_b(stage: Stage) -> None:
    stage.start("b")


def only_a(stage: Stage) -> None:
    stage.start("a")


def drops_store(stage: Stage) -> None:
    stage.block("a", f"tcp dport {stage.cluster.port} drop")
    stage.start_all()


def rejects_store(stage: Stage) -> None:
    stage.block("a", f"tcp dport {stage.cluster.port} reject")
    stage.start_all()


def b_at(host: str) -> Play:
    def play(stage: Stage) -> None:
        stage.start("a")
        stage.start("b", "--rdzv-endpoint", f"{host}:{stage.cluster.port}")

    return play


def all_at(host: str) -> Play:
    return lambda stage: stage.start_all("--rdzv-endpoint", f"{host}:{stage.cluster.port}")


def other_port(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", "--rdzv-endpoint", f"{SUBNET}.1:{stage.cluster.port + 1}")


def other_run_id(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", "--rdzv-id", "jobb")


def other_script(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", script=stage.write("two/sleeper.py", f"# version 2\n{SLEEPER}"))


def missing_script(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", script=stage.folder / "elsewhere" / "sleeper.py")


def b_with(*options: str, **env: str) -> Play:
    def play(stage: Stage) -> None:
        stage.start("a")
        stage.start("b", *options, **env)

    return play


def web_server(stage: Stage) -> None:
    server = "import http.server as h; h.HTTPServer(('', {0}), h.SimpleHTTPRequestHandler).serve_forever()"
    listening(stage, server)


def silent_server(stage: Stage) -> None:
    server = "import socket, threading; s = socket.create_server(('', {0})); threading.Event().wait()"
    listening(stage, server)


def listening(stage: Stage, server: str) -> None:
    stage.background("a", sys.executable, "-c", server.format(stage.cluster.port), port=stage.cluster.port)
    stage.start_all()


def secret_of_b(text: str) -> Play:
    """Machine a has a secret; b has this one, or with an empty text none."""

    def play(stage: Stage) -> None:
        stage.start("a", ELASTIC_AGENT_SECRET="the secret of this run")
        stage.said("a", "forming generation 1")
        stage.start("b", **({"ELASTIC_AGENT_SECRET": text} if text else {}))

    return play


def earlier_agent(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", node_id=None, name="b-before")
    stage.said("a", "generation 1: 2 nodes")
    stage.start("b", node_id=None)


def one_too_many(stage: Stage) -> None:
    stage.start("a")
    stage.start("b")
    stage.said("a", "generation 1: 2 nodes")
    stage.start("c")


def same_node_id(stage: Stage) -> None:
    stage.start("a", node_id="n1")
    stage.said("a", "forming generation 1")
    stage.start("b", node_id="n1")


def read_only_state(stage: Stage) -> None:
    stage.start("a")
    state = stage.folder / "state-b"
    state.mkdir()
    stage.start("b", setup=f"mount -t tmpfs -o ro tmpfs {state}")


def loopback_name(stage: Stage) -> None:
    hosts = stage.write("hosts-b", f"127.0.0.1 localhost\n127.0.1.1 host-a\n{SUBNET}.2 host-b\n")
    endpoint = "--rdzv-endpoint", f"host-a:{stage.cluster.port}"
    stage.start("a", *endpoint)
    stage.start("b", *endpoint, setup=f"mount --bind {hosts} /etc/hosts")


def slow_names(stage: Stage) -> None:
    stage.block("c", "udp dport 53 drop")
    resolver = SLOW_NAMES.format(stage.folder / "resolv")
    stage.start("a")
    stage.start("b", "--rdzv-endpoint", f"store.example:{stage.cluster.port}", setup=resolver)


def slow_reverse(stage: Stage) -> None:
    hosts = stage.write("hosts-b", "127.0.0.1 localhost\n")
    stage.block("c", "udp dport 53 drop")
    resolver = SLOW_NAMES.format(stage.folder / "resolv")
    for node in ("a", "b"):
        stage.start(node, setup=f"mount --bind {hosts} /etc/hosts; {resolver}")


def other_version(package: str, number: str) -> Play:
    def play(stage: Stage) -> None:
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {number}\n"
        stage.write(f"other-{number}/{package}-{number}.dist-info/METADATA", metadata)
        stage.start("a")
        stage.start("b", PYTHONPATH=str(stage.folder / f"other-{number}"))

    return play


def other_arguments(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", arguments=("--lr", "0.1"))


def etcd_is_down(stage: Stage) -> None:
    stage.start_all("--rdzv-backend", "etcd", "--rdzv-endpoint", f"{SUBNET}.1:{stage.cluster.port}")


def few_files(stage: Stage) -> None:
    stage.start("a")
    stage.start("b", under=("prlimit", "--nofile=40"))


def _same(words: Words, *nodes: str) -> dict[str, Words]:
    return dict.fromkeys(nodes or ("a", "b"), words)


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
    Case("the endpoint's agent is not started", 1, only_b,
         {"b": Words("connection refused", STORE, "start the same command on")}),
    Case("one machine is not started", 1, only_a, {"a": WAITS}),
    Case("a firewall drops packets to the store", 1, drops_store,
         only_b_knows("no answer within .*firewall drops", STORE, "open the port there: firewall-cmd")),
    Case("a firewall rejects connections to the store", 9, rejects_store,
         only_b_knows("connection refused|unreachable", STORE, "and its firewall|open the port there")),
    Case("the endpoint's name is unknown on a machine", 1, b_at("no-such-machine.invalid"),
         only_b_knows("no-such-machine.invalid does not resolve", "on this machine", "give an address, or a name")),
    Case("localhost as endpoint on all machines", 1, all_at("localhost"),
         both("localhost:\\d+ means a different machine", "on every machine", PASS_AN_ADDRESS)),
    Case("an endpoint that is no machine's address", 1, all_at(f"{SUBNET}.99"),
         both("the host is unreachable", SUBNET + r"\.99", "check that the endpoint is an address of one")),
    Case("an endpoint in a network without a route", 11, b_at("192.0.2.1"),
         only_b_knows("no route to the network", r"192\.0\.2\.1", "check that the endpoint is an address of one")),
    Case("different ports on the machines", 1, other_port,
         only_b_knows("connection refused", STORE, "compare its port with")),
    Case("different run ids on the machines", 16, other_run_id,
         both(r"run jobb? of \w \(.* waits", r"of [ab] \(", "pass the same --rdzv-id")),
    Case("different versions of the script, no run id", 16, other_script,
         both("waits .* another version of it", r"of [ab] \(", "copy the same version of the script"), run_id=None),
    Case("different versions of the script", 16, other_script,
         both("differ in the script: ", r"\b[ab] and [ab]\b", "copy the same version")),
    Case("the script is missing on a machine", 19, missing_script,
         {"a": Words("waiting for 1 more node", "joined: a", "ended with an error"),
          "b": Words('sleeper.py" does not exist', "", "copy it to this machine")}),
    Case("--nnodes forgotten on a machine", 16, b_with("--nnodes", "1"),
         both("differ in --nnodes: ", "1 on b|2 on a", SAME_COMMAND)),
    Case("different --nnodes", 16, b_with("--nnodes", "3"), both("differ in --nnodes: ", "3 on b|2 on a", SAME_COMMAND)),
    Case("a web server has the endpoint's port", 2, web_server,
         both("is used by another program", STORE, "use another port, or stop")),
    Case("a silent program has the endpoint's port", 2, silent_server,
         both("accepts connections but did not answer", STORE, "(ss -ltnp|has the port).*use another port")),
    Case("an agent of an earlier start still runs on a machine", 2, earlier_agent,
         {"b": Words("another agent on this machine .* as node host-b", r"process \d+, started", "stop that process")}),
    Case("more machines than --nnodes allows", 0, one_too_many,
         {"c": Words("on standby: .*maximum 2", r"a \(.*, b \(", "larger --nnodes")}, nodes=("a", "b", "c"), nnodes="2"),
    Case("two machines have the same node id", 16, same_node_id,
         {"b": Words("node id n1 is held", SUBNET + r"\.1", "another --node-id")}),
    Case("a longer lease on a machine", 16, b_with("--lease-ttl", "9"),
         {"b": Words("lease of 9 s, longer|differ in --lease-ttl", "b requests|9 on b", "same (--lease-ttl|command)")}),
    Case("the state directory is read-only", 20, read_only_state,
         only_b_knows("state-b.* is not (usable|writable)", "", "expected a writable directory")),
    Case("the endpoint's name means loopback on another machine", 5, loopback_name,
         only_b_knows(r"host-a resolves to 127.0.1.1 on this machine", "this machine", "/etc/hosts")),
    Case("the name of the endpoint cannot be looked up", 3, slow_names,
         only_b_knows("looking up store.example takes|store.example does not resolve", "this machine", "repair the name|give an address"),
         nodes=("a", "b", "c"), nnodes="2"),
    Case("slow reverse look-ups of names", 4, slow_reverse,
         both("looking up .* takes more than", "this machine", "/etc/hosts"), nodes=("a", "b", "c"), nnodes="2"),
    Case("different versions of torch", 14, other_version("torch", "2.12.1"),
         both("differ in torch: ", "2.12.1 on b", "install the same version")),
    Case("the secret is missing on a machine", 0, secret_of_b(""),
         {"a": WAITS, "b": Words("accepts only agents with its secret", "this agent has none", "pass the same --secret-file")}),
    Case("different secrets on the machines", 0, secret_of_b("another secret: xyz"),
         {"a": Words("refused an agent", "with another secret", "with the secret of this run"),
          "b": Words("has another secret", "than this agent", "give every agent the same --secret-file")}),
    Case("different arguments of the script", 16, other_arguments,
         both("differ in the arguments", "on b", SAME_COMMAND)),
    Case("different variables of NCCL", 16, b_with(NCCL_DEBUG="INFO"),
         both("differ in NCCL_DEBUG: ", "INFO on b", "set it alike everywhere")),
    Case("etcd does not run", 1, etcd_is_down, both("etcd at .*refused", STORE, "start etcd on")),
    Case("too few open files are allowed for the agent", 26, few_files,
         {"b": Words("can have only 40 open files", "", "ulimit -n")}),
)  # fmt: skip
