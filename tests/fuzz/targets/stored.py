"""What is read from a store: plans with their parts, greetings, lists of names, records with and without a secret."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace

import msgspec

from elastic_agent.protocol import Plan
from elastic_agent.transport.c10d.greeting import HELLO, Doorkeeper, _ids
from elastic_agent.transport.c10d.keys import ROOT, name_in, names_in
from elastic_agent.transport.c10d.plans import PlanReader, _pack, _parts_of
from elastic_agent.transport.c10d.sealed import KINDS
from elastic_agent.transport.etcd.client import News
from elastic_agent.transport.etcd.plans import PlanReader as EtcdPlanReader
from elastic_agent.transport.record_reader import RecordReader, lease_in, lease_over
from elastic_agent.transport.sealed_records import RunSeal, SealedRecords
from tests.fuzz.target import Target, ViolationError, check_shown
from tests.transport.support import lease

from . import support

_PREFIX = f"{ROOT}/r/run"
_PLAIN = SimpleNamespace(opened=lambda key, data: data)
"""A client of etcd without a secret."""


def targets() -> list[Target]:
    """Of both kinds of stores."""
    samples = support.record_samples()
    records = (*samples[support.Member], *samples[support.Lease], b"-", b"")
    plans = [_pack(plan) for plan in support.plans()]
    envelopes = tuple(msgspec.json.encode(envelope) for envelope, _ in plans)
    parts = tuple(part for _, some in plans for part in some.values())
    seal = RunSeal(support.SECRET.seal(), support.SECRET.seal(b"epoch"))
    sealed = tuple(SealedRecords(seal, KINDS).closed(f"{_PREFIX}/l/a", one) for one in samples[support.Lease])
    greetings = (b"run job-1", b"job abcdef run-1", b"over abcdef run-1")
    plan_reading = ("transport/c10d/plans.py PlanReader.open", "transport/c10d/plans.py _parts_of")
    return [
        Target("store-member", records, _reader),
        Target("store-plan", envelopes, lambda data: _plan(data, parts), plan_reading, weight=0.5),
        Target(
            "store-plan-part",
            parts,
            lambda data: _plan_part(data),
            ("transport/c10d/plans.py _decode_order",),
            weight=0.5,
        ),
        Target("store-latest", (b"1", b"12", b"9" * 16), _latest, weight=0.5),
        Target("store-sealed", sealed, _sealed),
        Target("store-names", (b"\na\nb", b"a\nnode-1.x\n..\n", b"12345678,abcdef01"), _names),
        Target("greeting", greetings, _greeting, weight=0.5),
        Target("greeting-hint", (HELLO + b"a" * 32,), _hint, weight=0.5),
        Target("etcd-plan", samples[Plan], _etcd_plan),
    ]


def _reader(data: bytes) -> None:
    reader, rejected = RecordReader("run"), list[str]()
    for name in ("a", "full"):
        reader.member(name, data, rejected)
    reader.leases({"a": data}, rejected)
    lease_in(data, "a")
    lease_over(data, lease("a"))


def _plan_of(values: dict[str, bytes]) -> Plan | None:
    problems: list[str] = []
    reader = PlanReader(support.MemoryStore(values), _PREFIX, problems.append)  # type: ignore[arg-type]
    return reader.newest()


def _plan(data: bytes, parts: tuple[bytes, ...]) -> None:
    values = {f"{_PREFIX}/part/{hashlib.sha256(part).hexdigest()[:32]}": part for part in parts}
    for version in (1, 5):
        _plan_of(
            {
                **values,
                f"{_PREFIX}/plan/{version}": data,
                f"{_PREFIX}/plan/{version - 1}": b"-",
                f"{_PREFIX}/latest": b"%d" % version,
            }
        )
    _parts_of(data)


def _plan_part(data: bytes) -> None:
    """A plan that names these bytes as its world, and as its order."""
    digest = hashlib.sha256(data).hexdigest()[:32]
    small = _pack(support.plans()[0])[0]
    for which in ("world", "order"):
        envelope = msgspec.json.encode(msgspec.structs.replace(small, **{which: digest}))
        _plan_of({f"{_PREFIX}/part/{digest}": data, f"{_PREFIX}/plan/1": envelope, f"{_PREFIX}/latest": b"1"})


def _latest(data: bytes) -> None:
    _plan_of({f"{_PREFIX}/latest": data})


def _sealed(data: bytes) -> None:
    seal = RunSeal(support.SECRET.seal(), support.SECRET.seal(b"epoch"))
    for key in (f"{_PREFIX}/l/a", f"{_PREFIX}/m/a", f"{_PREFIX}/status", f"{ROOT}/hello/a", f"{ROOT}/runs"):
        records = SealedRecords(seal, KINDS)
        opened = records.opened(key, data)
        if records.expected(key, opened) != data and opened:
            raise ViolationError(f"what was read under {key} cannot be compared with what is stored")


def _names(data: bytes) -> None:
    for name in names_in(data):
        if name in (".", "..") or "/" in name or name_in(name.encode()) != name:
            raise ViolationError(f"{name!r} is no name")
    for shown in _ids(support.MemoryStore({f"{ROOT}/key": data})):  # type: ignore[arg-type]
        check_shown(shown)


def _greeting(data: bytes) -> None:
    """Sealed with the secret, and not."""
    for is_sealed in (True, False):
        keeper, store = Doorkeeper(support.SECRET), support.MemoryStore()
        key = f"{ROOT}/hello/name"
        store.values[key] = support.SECRET.seal().close(key, data) if is_sealed and data else data
        keeper.answer(store, HELLO + b"name")  # type: ignore[arg-type]
        answer = store.values.get(f"{ROOT}/welcome/name")
        if data and answer is None:
            raise ViolationError("a greeting is not answered")


def _hint(data: bytes) -> None:
    keeper, store = Doorkeeper(support.SECRET), support.MemoryStore()
    keeper.answer(store, data)  # type: ignore[arg-type]


def _etcd_plan(data: bytes) -> None:
    reader = EtcdPlanReader(_PLAIN, b"/run/plan", lambda problem: None)  # type: ignore[arg-type]
    reader.follow([News(2, {b"/run/plan": data}, frozenset(), ((b"/run/plan", data),))])
