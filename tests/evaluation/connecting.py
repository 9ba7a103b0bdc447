"""Networks in which agents meet, and workers do not reach each other; scripts that look in the wrong place."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from collections.abc import Callable

from .stage import FOLDER, SUBNET, Case, Stage, Words

COLLECTIVES = FOLDER / "collectives.py"
EPHEMERAL = "tcp dport 32768-60999 tcp flags & (syn | ack) == syn"
PORTS = "--port-range", "20000:20100"


def blocked(rule: str, *nodes: str, how: str = "") -> Callable[[Stage], None]:
    def play(stage: Stage) -> None:
        for node in nodes:
            stage.block(node, rule)
        stage.start_all(*PORTS, script=COLLECTIVES, arguments=(how,))

    return play


def scripted(name: str, text: str) -> Callable[[Stage], None]:
    return lambda stage: stage.start_all(script=stage.write(name, text))


OWN_ADDRESS = """
import os
import torch.distributed as dist
os.environ["MASTER_ADDR"] = "localhost"
dist.init_process_group("gloo")
dist.barrier()
"""
LOCAL_RANKS = """
import os
import torch.distributed as dist
local_rank = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=local_rank, world_size=int(os.environ["WORLD_SIZE"]))
dist.barrier()
"""
"""What is written for one machine, as in many scripts."""


def docker0(stage: Stage) -> None:
    make = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
    for node in stage.nodes:
        stage.shell(node, make)
    stage.start_all(script=COLLECTIVES, GLOO_SOCKET_IFNAME="docker0")


def cable_pulled(stage: Stage) -> None:
    stage.start_all(script=COLLECTIVES)
    stage.said("a", "training")
    stage.machines.cut_off("b")


BLOCKED = Words(
    r"port \d+, and nothing answers",
    r"\bb/0\b.* to connect to a \(",
    "allow TCP connections between the nodes",
)
TOLD = {"a": BLOCKED, "b": BLOCKED}
LOST = Words(r"data that (it sends|\w+ sends) do not arrive", r"\b[ab]/0\b.*\b[ab] \(", "MTU")

CONNECTING = (
    Case("a firewall drops the workers' connections", blocked(f"{EPHEMERAL} drop", "a", "b"), TOLD),
    Case("a firewall rejects the workers' connections", blocked(f"{EPHEMERAL} reject with tcp reset", "a", "b"),
         dict.fromkeys("ab", Words("could not connect|refused", r"\b[ab]/0\b|host-[ab]", "firewall"))),
    Case("large packets are lost", blocked("meta length > 1200 drop", "a", "b", how="large"), {"a": LOST, "b": LOST}),
    Case("two of three machines do not reach each other", blocked(f"ip saddr {SUBNET}.2 tcp dport 1024-65535 drop", "c"),
         dict.fromkeys("abc", Words("nothing answers", r"\bc/0\b.* b \(|b/0\b.* c \(", "allow TCP")), nodes=("a", "b", "c")),
    Case("a firewall drops connections to the bootstrap store",
         blocked("tcp dport 20000-20100 tcp flags & (syn | ack) == syn drop", "a", "b"),
         dict.fromkeys("ab", Words(r"bootstrap|port 20\d\d\d", r"\b[ab]\b", "--port-range|allow TCP"))),
    Case("gloo is told to use docker0", docker0,
         dict.fromkeys("ab", Words("GLOO_SOCKET_IFNAME=docker0 is an interface for containers", "of this machine", "set GLOO_SOCKET_IFNAME=eth0"))),
    Case("the script sets MASTER_ADDR=localhost", scripted("own_address.py", OWN_ADDRESS),
         dict.fromkeys("ab", Words("sets MASTER_ADDR=localhost", r"own_address.py:\d+", "remove that line"))),
    Case("the script takes LOCAL_RANK for its rank", scripted("local_ranks.py", LOCAL_RANKS),
         dict.fromkeys("ab", Words("passes LOCAL_RANK as rank", r"local_ranks.py:\d+", "use RANK"))),
    Case("a network cable is pulled", cable_pulled,
         {"a": Words("b was lost|b lost", r"\bb\b", "rebooted|network"),
          "b": Words("lost (the connection|its lease)|training is paused", "store", "lease|waiting for the store")}),
)  # fmt: skip
