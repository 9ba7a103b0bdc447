"""Another client of an authenticated store: it reads and writes everything there, but does not have the secret.

It forges records, replays what it recorded in this life of the store and in earlier ones (also under other keys), and
deletes and damages what it finds: at random moments, and just after the agents have written something. It ends before
the faults do. What it does in etcd alone is in :mod:`.etcd_forgers`.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.records import Address, Lease, Member, Phase, Plan, State
from elastic_agent.transport.c10d.greeting import HELLO
from elastic_agent.transport.c10d.keys import ROOT
from elastic_agent.transport.c10d.plans import _pack
from elastic_agent.transport.record_reader import GONE
from elastic_agent.transport.sealing import ID_BYTES, MAGIC, SEQUENCE_BYTES, TAG_BYTES, Secret

from .checker import FORGER
from .keyed import HEAD_BYTES, INBOX, PREFIX, SECRET, KeyedStore
from .keyed_etcd import KeyedEtcd

if TYPE_CHECKING:
    from .cluster import Cluster

Keyed = KeyedStore | KeyedEtcd
OTHER = Secret((b"a secret of the forger's own",))
MOST_RECORDED = 4000
ENDS = 0.85
"""When it ends, as a part of the time in which there are faults."""
KINDS = ("forge", "replay", "move", "renumber", "delete", "damage", "revive", "withhold", "point", "greet")


class Forgers:
    """What such a client does under one seed. It draws from random numbers of its own."""

    all_kinds: tuple[str, ...] = KINDS

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.random = random = Random(f"forgers {seed}")
        self.acts = random.choice((0, 3, 10, 30, 60))
        """How often it may act."""
        self.kinds = tuple(random.sample(self.all_kinds, random.choice((1, 2, 3, len(self.all_kinds)))))
        self._share_after_writes = random.choice((0.0, 0.02, 0.2))
        """After how many writes of the agents it acts at once."""
        for quirk in cluster.quirks:
            if quirk.startswith("forgers "):
                wanted = quirk.removeprefix("forgers ").split(",")
                self.kinds = tuple(kind for kind in wanted if kind in self.all_kinds) or self.kinds
                self.acts, self._share_after_writes = 60, 0.2
        self.recorded: dict[str, list[bytes]] = {}
        """Key → what the agents wrote there, in every life of the store."""
        self._count = 0
        self._names = 0

    @property
    def _ends_s(self) -> float:
        return ENDS * self.cluster.scenario.quiet_s

    def begin(self) -> None:
        """Plan when to act."""
        for _ in range(self.acts):
            at_s = self.random.uniform(0.0, self._ends_s)
            for _ in range(self.random.choice((1, 1, 1, 4))):
                self.cluster.kernel.after(at_s, self._act, None)
                at_s = min(self._ends_s, at_s + 0.01 * self.random.random())

    def record(self, store: Keyed, key: str, value: bytes) -> None:
        """An agent of the run has written this; perhaps something is done with it at once."""
        if self._count < MOST_RECORDED:
            self._count += 1
            self.recorded.setdefault(key, []).append(value)
        if "/hello/" in key and "greet" in self.kinds and self.random.random() < 0.3:
            self.cluster.kernel.after(0.0, self._act_as, "greet", key)
        soon = self.random.random() < self._share_after_writes
        if soon and self.acts > 0 and self.cluster.kernel.now < self._ends_s:
            self.acts -= 1
            self.cluster.kernel.after(self.random.choice((0.0, 0.001, 0.1)), self._act, key)

    def _act(self, key: str | None) -> None:
        self._act_as(self.random.choice(self.kinds), key)

    def _act_as(self, kind: str, key: str | None) -> None:
        store = self.cluster.endpoint.store
        late = self.cluster.calm or self.cluster.over or self.cluster.kernel.now > self._ends_s
        if isinstance(store, Keyed) and not late:
            store.process.do(self._do, store, kind, key)

    def _do(self, store: Any, kind: str, key: str | None) -> None:
        self.cluster.trouble()
        self._acts[kind](store, key)

    @property
    def _acts(self) -> dict[str, Callable[[Any, str | None], None]]:
        return {
            "forge": self._forge,
            "replay": self._replay,
            "move": self._move,
            "renumber": self._renumber,
            "delete": lambda store, key: self._write(store, key or self._some_key(store), None),
            "damage": self._damage,
            "revive": self._revive,
            "withhold": self._withhold,
            "point": self._point,
            "greet": self._greet,
        }

    def _write(self, store: Keyed, key: str, value: bytes | None) -> None:
        there = store.data.get(key)
        if there == value:
            return
        what = (
            "deletes"
            if value is None
            else f"writes {value[:60]!r} over"
            if there
            else f"writes {value[:60]!r} as"
        )
        shown = key.removeprefix(f"{ROOT}/") if isinstance(store, KeyedStore) else key
        self.cluster.story(FORGER, "{} {}", what, shown)
        store.tamper(key, value)

    def _some_key(self, store: Keyed) -> str:
        """Of all that is there, as often of each kind."""
        by_kind: dict[str, list[str]] = {} if store.data else {"": [f"{ROOT}/runs"]}
        for key in store.data:
            kind = key.removeprefix(f"{store.prefix}/").rpartition("/")[0]
            by_kind.setdefault(kind, []).append(key)
        return self.random.choice(by_kind[self.random.choice(sorted(by_kind))])

    # -- forging --------------------------------------------------------------------------------

    def _sealed(self, key: str, record: bytes) -> bytes:
        """As far as it can be sealed without the secret."""
        random = self.random
        how = random.choice(("plain", "other secret", "no tag", "no epoch"))
        if how == "plain":
            return record
        if how == "other secret":
            return OTHER.seal(random.randbytes(16)).close(key, record, random.choice((0, 2**61)))
        own_id = bytes.fromhex(SECRET.ids[0])
        tag = random.randbytes(TAG_BYTES) if how == "no tag" else bytes(TAG_BYTES)
        assert len(own_id) == ID_BYTES
        return b"".join((MAGIC, own_id, tag, random.randbytes(SEQUENCE_BYTES), record))

    def _forge(self, store: Keyed, key: str | None) -> None:
        self.random.choice((self._forge_node, self._forge_change, self._forge_lease, self._forge_plan))(store)

    def _known(self, store: Keyed) -> list[str]:
        return sorted({*store.names(), *store.members, *store.leases})

    def _forge_node(self, store: Keyed) -> None:
        """A node that is none, perhaps with the id of another."""
        self._names += 1
        name = f"{FORGER}-i{self._names}"
        policy = self.cluster.policy
        node_id = self.random.choice((FORGER, self.random.choice(self.cluster.holders).node_id))
        generation = self.random.choice((0, self.cluster.checker.newest_sealed + 1))
        member = Member(
            1, node_id, name, FORGER, 60, State.READY, generation, policy, bootstrap=Address(FORGER, 1)
        )
        self._write_records(store, name, encode(member), encode(Lease(name, policy.lease_ttl_s)))

    def _write_records(self, store: Keyed, name: str, member: bytes, lease: bytes) -> None:
        for kind, record in (("m", member), ("l", lease)):
            key = f"{store.prefix}/{kind}/{name}"
            self._write(store, key, self._sealed(key, record))
        store.enlist(name)
        store.notify(name)

    def _forge_change(self, store: Keyed) -> None:
        """A node says something else of itself."""
        if not store.members:
            return
        name = self.random.choice(sorted(store.members))
        member = decode(Member, store.members[name])
        state = self.random.choice((State.READY, State.SUCCEEDED, State.LEAVING, State.LEFT))
        changed = msgspec.structs.replace(
            member, state=state, slots=60, bootstrap=Address(FORGER, 1), failure=None
        )
        key = f"{store.prefix}/m/{name}"
        self._write(store, key, self._sealed(key, encode(changed)))
        store.notify(name)

    def _forge_lease(self, store: Keyed) -> None:
        names = self._known(store)
        if names:
            name = self.random.choice(names)
            key = f"{store.prefix}/l/{name}"
            revoked = self.random.random() < 0.5
            lease = Lease(
                name, self.cluster.policy.lease_ttl_s, beat=self.random.randrange(10**6), revoked=revoked
            )
            self._write(store, key, self._sealed(key, self.random.choice((GONE, encode(lease)))))

    def _forge_plan(self, store: KeyedStore) -> None:
        """The run has ended, or goes on elsewhere."""
        changed = self._changed_plan(store)
        if changed is None:
            return
        envelope, parts = _pack(changed)
        for digest, body in parts.items():
            self._write(store, f"{PREFIX}/part/{digest}", body)
        key = f"{PREFIX}/plan/{changed.version}"
        self._write(store, key, self._sealed(key, msgspec.json.encode(envelope)))
        if self.random.random() < 0.5:
            self._write(store, f"{PREFIX}/latest", str(changed.version).encode())

    def _changed_plan(self, store: Keyed) -> Plan | None:
        """What the newest plan might have been followed by."""
        if store.plan is None:
            return None
        plan = decode(Plan, store.plan)
        phase = self.random.choice((Phase.FINISHED, Phase.FAILED, Phase.STOPPED, Phase.FORMING))
        version = plan.version + self.random.choice((0, 1, 1, 1, 2, 100))
        generation = plan.generation + self.random.choice((0, 1, 1000))
        return msgspec.structs.replace(
            plan, version=version, phase=phase, generation=generation, reason=f"{FORGER} says so"
        )

    # -- replaying ------------------------------------------------------------------------------

    def _some_recorded(self) -> str | None:
        return self.random.choice(sorted(self.recorded)) if self.recorded else None

    def _replay(self, store: Keyed, key: str | None) -> None:
        """Something that was written there before, in this life of the store or an earlier one."""
        key = key or self._some_recorded()
        if key is not None and key in self.recorded:
            values = self.recorded[key]
            self._write(store, key, self.random.choice((self.random.choice(values), values[0], values[-1])))

    def _move(self, store: Keyed, key: str | None) -> None:
        """Something that was written elsewhere."""
        source = self._some_recorded()
        target = key or self._some_recorded()
        if source is None or target is None:
            return
        kind = source.rpartition("/")[0]
        if self.random.random() < 0.7:
            target = self.random.choice(
                [one for one in sorted(self.recorded) if one.rpartition("/")[0] == kind]
            )
        if isinstance(store, KeyedStore) and kind.endswith("/plan") and self.random.random() < 0.7:
            target = f"{kind}/{store.version + 1}"
        self._write(store, target, self.random.choice(self.recorded[source]))

    def _renumber(self, store: Keyed, key: str | None) -> None:
        """Something that was written there before, as if it were newer."""
        key = key or self._some_recorded()
        if key is not None and key in self.recorded:
            data = self.random.choice(self.recorded[key])
            start, end = HEAD_BYTES - SEQUENCE_BYTES, HEAD_BYTES
            number = self.random.choice((0, 2**20, 2**62)).to_bytes(SEQUENCE_BYTES, "big")
            self._write(store, key, data[:start] + number + data[end:])

    def _revive(self, store: Keyed, key: str | None) -> None:
        """A node that is revoked or forgotten gets its last lease back."""
        gone = [name for name in self._known(store) if self._is_gone(store, name)]
        if not gone:
            return
        name = self.random.choice(gone)
        for kind in self.random.choice(("l", "lm", "m")):
            key = f"{store.prefix}/{kind}/{name}"
            values = self.recorded.get(key, [])
            if values:
                self._write(store, key, self.random.choice((values[0], *values[-3:])))
        store.notify(name)

    def _is_gone(self, store: Keyed, name: str) -> bool:
        agent = self.cluster.agents.get(name)
        dead = agent is None or not agent.process.alive or agent.incarnation != name
        return dead or name not in store.leases or decode(Lease, store.leases[name]).revoked

    # -- deleting and damaging ------------------------------------------------------------------

    def _damage(self, store: Keyed, key: str | None) -> None:
        key = key if key in store.data else self._some_key(store)
        data = bytearray(store.data.get(key, b""))
        if data and self.random.random() < 0.7:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        elif self.random.random() < 0.5:
            data = data[: self.random.randrange(len(data) + 1)]
        else:
            data += self.random.randbytes(40)
        self._write(store, key, bytes(data))

    def _withhold(self, store: KeyedStore, key: str | None) -> None:
        """The newest plan, and the pointer to it."""
        self._write(store, f"{PREFIX}/plan/{store.version}", None)
        if self.random.random() < 0.7:
            self._write(
                store, f"{PREFIX}/latest", self.random.choice((None, b"1", str(store.version - 1).encode()))
            )

    def _point(self, store: KeyedStore, key: str | None) -> None:
        """Names and numbers that are not authenticated."""
        name = self.random.choice(("latest", "roster", "life", "jobs", "status"))
        values: tuple[bytes | None, ...] = (None, b"", b"7", b"\nforger-i0\n", b"\xff" * 40, b"99999999999")
        where = (
            f"{ROOT}/{self.random.choice(('key', 'runs'))}"
            if self.random.random() < 0.3
            else f"{PREFIX}/{name}"
        )
        self._write(store, where, self.random.choice(values))
        store.push(
            INBOX, self.random.choice((b"run forger-i1", b"run", b"\x00" * 600, b"other-run forger-i1"))
        )

    def _greet(self, store: KeyedStore, key: str | None) -> None:
        """Greetings and answers: of its own, and those of others."""
        name = f"{self.random.randrange(2**64):032x}"
        hellos = [one for one in sorted(self.recorded) if "/hello/" in one]
        welcomes = [one for one in sorted(self.recorded) if "/welcome/" in one]
        if hellos and welcomes and self.random.random() < 0.7:
            asked = key if key is not None and "/hello/" in key else self.random.choice(hellos)
            answer = self.recorded[self.random.choice(welcomes)][0]
            asking = asked.rpartition("/")[2]
            self._write(store, f"{ROOT}/welcome/{asking}", self.random.choice((answer, b"!", b"x" * 47)))
            if self.random.random() < 0.6:
                other = self.recorded[self.random.choice(hellos)][0]
                self._write(store, asked, self.random.choice((None, other)))
            name = self.random.choice((name, asking))
        else:
            hello = f"{ROOT}/hello/{name}"
            self._write(store, hello, self._sealed(hello, b"run run"))
        store.push(INBOX, HELLO + name.encode())
