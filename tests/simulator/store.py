"""The store: keys and values, as torch's TCPStore server keeps them; one request after the other.

It lives in a process and is gone with it. What the shipped records write under a key of the run is told to the
checker at that moment (:meth:`Store._wrote`). :class:`SimulatedTable` is a client's side.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.codec import RecordError, decode
from elastic_agent.protocol.records import Member, Plan
from elastic_agent.transport.keys import GONE, LifeKeys, RunKeys, name_in
from elastic_agent.transport.record_reader import lease_in

from .kernel import Inbox, Process
from .machine import RUN
from .network import Connection

if TYPE_CHECKING:
    from .checker import Checker
    from .machine import Machine
    from .network import Network

Answer = Callable[[Any], None]

KEYS = RunKeys(RUN)


class Store:
    """One life of the store of the run."""

    def __init__(
        self, store_id: str, machine: Machine, process: Process, network: Network, checker: Checker
    ) -> None:
        self.store_id = store_id
        self.machine = machine
        self.process = process
        self.network = network
        self.checker = checker
        self.values: dict[str, bytes] = {}
        self.hints: list[Inbox] = []
        """Inboxes of the coordinators that listen (one, but for the time of a change)."""
        self.hint_loss = 0.0
        self.connections: list[Connection] = []
        self._lives = 0
        self._keys_of: dict[str, LifeKeys] = {}
        self._plans: dict[str, Plan] = {}
        """Life of the run's records → the newest plan."""
        self._waits: dict[str, list[Answer]] = {}
        process.when_killed.append(self._die)

    def _die(self) -> None:
        for connection in self.connections:
            connection.reset()

    def connect(self, machine: Machine) -> Connection:
        """A client's connection from this machine."""
        return Connection(self.network, machine, self)

    def listen(self, inbox: Inbox, machine: Machine) -> None:
        """Have hints put into this inbox."""
        self.hints.append(inbox)

    def unlisten(self, inbox: Inbox) -> None:
        """No more hints."""
        self.hints.remove(inbox)

    def serve(self, connection: Connection, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Carry out one request."""
        if method == "wait":
            self._wait(*args, answer)
        else:
            answer(getattr(self, method)(*args))

    # -- requests -------------------------------------------------------------------------------

    def read(self, keys: Collection[str]) -> dict[str, Any]:
        return {key: value for key in keys if (value := self.values.get(key))}

    def keys(self, *folders: str) -> list[str]:
        return [key for key in self.values if key.startswith(folders)]

    def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        if self.values.get(key) == expected:
            if key == KEYS.life:  # the name is drawn at random, which no seed could replay
                self._lives += 1
                desired = f"life{self._lives}".encode()
            self._set(key, desired)
        return self.values.get(key)

    def put(self, key: str, value: bytes) -> None:
        self._set(key, value)

    def delete(self, *keys: str) -> None:
        for key in keys:
            self._remove(key)

    def hint(self, incarnation: str) -> None:
        """Tell the coordinator, late, twice or not at all."""
        random = self.process.kernel.random
        chance = random.random()
        if chance < self.hint_loss:
            return
        for inbox in self.hints:
            for _ in range(2 if chance > 0.98 else 1):
                self.process.kernel.after(random.random() * 0.002, inbox.put, incarnation)

    def _wait(self, key: str, *args: Any) -> None:
        (answer,) = args
        if key in self.values:
            answer(True)
        else:
            self._waits.setdefault(key, []).append(answer)

    # -- values ---------------------------------------------------------------------------------

    def _set(self, key: str, value: bytes) -> None:
        self.values[key] = value
        if self.life is not None:
            self._wrote(self.keys_of(self.life), key, value)
        for answer in self._waits.pop(key, ()):
            answer(True)

    def _remove(self, key: str) -> None:
        if self.values.pop(key, None) is not None and key == KEYS.life:
            self.checker.cluster.story("store", "the run is removed")

    def _wrote(self, keys: LifeKeys, key: str, value: bytes) -> None:
        """Something was written; what is not of the present life of the run's records is read by nobody."""
        if key.startswith(keys.leases):
            lease = lease_in(value, key.removeprefix(keys.leases))
            if lease is not None and lease.revoked:
                self.checker.revoked(self, lease)
            elif lease is not None:
                self.checker.renewed(lease.incarnation)
        elif key == keys.plan:
            before, plan = self.plan, decode(Plan, value)
            self._plans[keys.life] = plan
            self.checker.published(self, before, plan)
            self.checker.cluster.at("plan written", None)

    def scribble(self, name: str, member: bytes, lease: bytes) -> None:
        """Another client writes this as records of an incarnation."""
        if self.life is not None:
            keys = self.keys_of(self.life)
            self._set(keys.member(name), member)
            self._set(keys.lease(name), lease)
            self.hint(name)

    # -- what the checker knows of it -----------------------------------------------------------

    @property
    def life(self) -> str | None:
        """The present life of the run's records."""
        return name_in(self.values[KEYS.life]) if KEYS.life in self.values else None

    def keys_of(self, life: str) -> LifeKeys:
        """The keys of one life of the run's records."""
        if life not in self._keys_of:
            self._keys_of[life] = LifeKeys(KEYS, life)
        return self._keys_of[life]

    @property
    def plan(self) -> Plan | None:
        """The newest plan."""
        return self._plans.get(self.life) if self.life is not None else None

    def members(self) -> dict[str, Member]:
        """The member record of each incarnation that was not forgotten; what is none is left out."""
        found = {}
        for name, data in self._records("members").items():
            try:
                found[name] = decode(Member, data)
            except RecordError:
                continue
        return found

    def leases(self) -> dict[str, bytes]:
        """The lease of each incarnation that was not forgotten."""
        return self._records("leases")

    def _records(self, of: str) -> dict[str, bytes]:
        if self.life is None:
            return {}
        folder: str = getattr(self.keys_of(self.life), of)
        found = {key.removeprefix(folder): self.values[key] for key in Store.keys(self, folder)}
        return {name: data for name, data in found.items() if data != GONE}


@types.coroutine
def ask(connection: Connection, timeout_s: float | None, method: str, *args: Any) -> Generator[Any, Any, Any]:
    """Make one request in a coroutine."""
    return (yield from connection.call(method, *args, timeout_s=timeout_s))


@types.coroutine
def ask_to_wait(connection: Connection, timeout_s: float, *args: Any) -> Generator[Any, Any, bool]:
    """Wait for a key in a coroutine; False at the time-out."""
    return (yield from connection.wait("wait", *args, timeout_s=timeout_s)) is not None


class SimulatedTable:
    """A connection to the store as a :class:`Table`: what takes the real one several requests takes several here."""

    is_shared = False
    root = ""

    def __init__(self, connection: Connection, timeout_s: float | None = None) -> None:
        """``timeout_s``: for how long each answer is waited for."""
        self.connection = connection
        self.store_id = connection.store.store_id
        self.local_address = connection.machine.name
        self._timeout_s = timeout_s

    async def _ask(self, method: str, *args: Any) -> Any:
        return await ask(self.connection, self._timeout_s, method, *args)

    async def _write(self, method: str, *args: Any) -> Any:
        return await self._ask(method, *args)

    async def read(self, keys: Collection[str]) -> dict[str, bytes]:
        found: dict[str, bytes] = await self._ask("read", tuple(keys))
        return found

    async def keys(self, folder: str) -> Sequence[str]:
        found: Sequence[str] = await self._ask("keys", folder)
        return found

    async def read_folders(self, *folders: str) -> dict[str, bytes]:
        return await self.read(await self._ask("keys", *folders))

    async def swap(self, key: str, expected: bytes | None, desired: bytes) -> bytes | None:
        stored: bytes | None = await self._write("swap", key, expected, desired)
        return stored

    async def put(self, key: str, value: bytes, lasts_s: float | None = None) -> None:
        """Write for longer than any seed lasts."""
        await self._write("put", key, value)

    async def delete(self, keys: Collection[str], *folders: str) -> None:
        for key in keys:
            await self._write("delete", key)
        if folders:
            await self.delete(await self._ask("keys", *folders))

    async def wait(self, key: str, timeout_s: float) -> bool:
        return await ask_to_wait(self.connection, self.connection.machine.real_s(timeout_s), key)

    async def hint(self, run_id: str, incarnation: str) -> None:
        self.connection.tell("hint", incarnation)

    def written_by(self, key: str) -> float | None:
        return None

    def close(self) -> None:
        self.connection.close()
