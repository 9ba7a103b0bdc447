"""Clusters whose store no node hosts, so that every node can be lost, and whose store can be lost as well."""

from __future__ import annotations

import base64
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastic_agent.testing import LocalCluster
from elastic_agent.transport import Secret
from elastic_agent.transport.c10d import reach
from elastic_agent.transport.record_reader import KEPT_BELLS
from elastic_agent.values import Endpoint
from elastic_agent.worker_variables import PREFIX
from tests.etcd import EtcdCluster
from tests.loop_thread import in_loop
from tests.relay import Relay

SCRIPT = Path(__file__).parent / "train.py"
ETCD_PREFIX = "/soak"
SETTLE_S = 0.02
"""A node that is lost for the n-th time in a row waits for 2 ** n times this until it is admitted."""
REMOVED_BYTES = 32
"""What stands for a removed record, so that it cannot be written again for an hour, takes at most as much."""
ANSWER_S = 2.0
Repair = Callable[[], object]


class SoakCluster(LocalCluster):
    """Nodes that meet in a store that none of them hosts, through relays that can cut them off."""

    def __init__(self, folder: Path, checkpoints: Path, *, nodes: int, pace_s: float) -> None:
        """``pace_s``: how long each step takes at least."""
        super().__init__(
            [str(SCRIPT), str(checkpoints), str(pace_s), "0"],
            folder,
            nodes=nodes,
            max_nodes=nodes + 1,
            hang_timeout_s=6.0,
            options=("--preload", "torch._dynamo", "--settle", str(SETTLE_S)),
        )
        self.checkpoints = checkpoints
        self.nnodes = f"1:{nodes + 1}"
        self.witness = ""
        """The node whose processes are watched over the whole time."""
        self.lost: set[str] = set()
        """Nodes that a fault has hit already."""
        self._relays: dict[str, list[Relay]] = {}
        self._stack = ExitStack()

    def __exit__(self, *how: object) -> None:
        super().__exit__(*how)
        self._stack.close()

    def rendezvous(self, name: str) -> tuple[str, ...]:
        return "--rdzv-endpoint", f"127.0.0.1:{self.relayed(name, [self._port])[0]}"

    def relayed(self, name: str, ports: Sequence[int]) -> list[int]:
        """The ports of relays to these, over which :meth:`cut_off` has power; the same at every call."""
        if name not in self._relays:
            self._relays[name] = [self._stack.enter_context(Relay(port, both_ways=True)) for port in ports]
        return [relay.endpoint.port for relay in self._relays[name]]

    def cut_off(self, name: str) -> None:
        """Nothing gets from this node to the store or back any more; connections stay open."""
        for relay in self._relays[name]:
            relay.hold()

    def reconnect(self, name: str) -> None:
        """End the partition."""
        for relay in self._relays[name]:
            relay.release()

    @property
    def spared(self) -> set[str]:
        return {self.witness, *self.lost}

    @property
    def host(self) -> str:
        return ""

    def let_finish(self) -> None:
        """Training may end."""
        (self.checkpoints / "finish").touch()

    def start_store(self) -> None:
        """Start what the nodes meet in."""
        raise NotImplementedError

    def stop_store(self) -> None:
        """End it: its processes are not what a run left behind."""

    def lose_store(self, rng: random.Random) -> tuple[str, Repair]:
        """Kill it or a part of it: what was done, and what brings it back."""
        raise NotImplementedError

    def keys(self) -> list[str]:
        """The keys of records in the store.

        Not what stands for removed ones, nor the newest plans, of which 16 are kept.
        """
        records = {key for key, size in self.stored().items() if size > REMOVED_BYTES}
        plans = {key for key in records if key.endswith("/plan") or "/bell/" in key}
        return sorted(records - plans if len(plans) <= KEPT_BELLS + 2 else records)

    def stored(self) -> dict[str, int]:
        """The keys in the store, and how many bytes each has."""
        raise NotImplementedError


class C10dCluster(SoakCluster):
    """With a c10d store in a process of its own (``elastic-agent serve``)."""

    def start_store(self) -> None:
        command = [
            *(sys.executable, "-m", "elastic_agent", "serve", "--rdzv-endpoint", f"127.0.0.1:{self._port}"),
            *("--state-dir", str(self.folder / "state-of-the-store")),
        ]
        self.servers["store"] = self.launch("store", command, {PREFIX + "SECRET": self._secret})
        self.wait_said("store", "serving at")

    def lose_store(self, rng: random.Random) -> tuple[str, Repair]:
        self.servers["store"].kill_node()
        self.servers["store"].process.wait()
        pause_s = rng.uniform(0, 3)

        def repair() -> None:
            time.sleep(pause_s)  # the machine boots
            self.start_store()

        return f"store killed with all its data, started again after {pause_s:.1f} s", repair

    def stop_store(self) -> None:
        store = self.servers["store"]
        store.signal(signal.SIGTERM)
        store.process.wait()

    def stored(self) -> dict[str, int]:
        return in_loop(self._stored())

    async def _stored(self) -> dict[str, int]:
        endpoint, secret = Endpoint("127.0.0.1", self._port), Secret((self._secret.encode(),))
        store = await reach(endpoint, ANSWER_S, secret, ANSWER_S)
        try:
            keys = await store.list_keys()
            return dict(zip(keys, map(len, await store.get(keys)), strict=True))
        finally:
            store.close()


class ThreeMembersCluster(SoakCluster):
    """With an etcd of three members."""

    def __init__(self, folder: Path, checkpoints: Path, **how: Any) -> None:
        super().__init__(folder, checkpoints, **how)
        (folder / "etcd").mkdir()
        file = folder / "secret"
        file.touch(mode=0o600)
        file.write_text(self._secret)
        self._etcd = EtcdCluster.with_secret(folder / "etcd", file, size=3)

    def start_store(self) -> None:
        self._stack.enter_context(self._etcd)
        self._etcd.ctl("put", f"{ETCD_PREFIX}/1/id", "d00d")  # one that others have used before

    def rendezvous(self, name: str) -> tuple[str, ...]:
        ports = self.relayed(name, [member.client_port for member in self._etcd.members])
        endpoint = ",".join(f"127.0.0.1:{port}" for port in ports)
        return "--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--etcd-prefix", ETCD_PREFIX

    def lose_store(self, rng: random.Random) -> tuple[str, Repair]:
        how = rng.choice(("member killed", "member frozen", "all members killed"))
        pause_s = rng.uniform(0, 3)
        lost = self._etcd.members if how == "all members killed" else [rng.choice(self._etcd.members)]
        for member in lost:
            (member.freeze if how == "member frozen" else member.kill)()

        def repair() -> None:
            time.sleep(pause_s)  # the machine boots
            for member in lost:
                (member.thaw if how == "member frozen" else member.start)()
            self._etcd.wait_ready()

        names = ", ".join(member.name for member in lost)
        return f"etcd: {how} ({names}), back after {pause_s:.1f} s", repair

    def stored(self) -> dict[str, int]:
        found = json.loads(self._etcd.ctl("get", "--prefix", ETCD_PREFIX, "--write-out", "json"))
        return {
            base64.b64decode(record["key"]).decode(): len(base64.b64decode(record.get("value", "")))
            for record in found["kvs"]
        }
