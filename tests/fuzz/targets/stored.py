"""What is read from a store: plans with their parts, lists of names, records."""

from __future__ import annotations

import hashlib
import ssl

import msgspec

from elastic_agent.protocol import Plan
from elastic_agent.transport import LifeKeys, RunKeys
from elastic_agent.transport.certificates import Secret, secret_id_in
from elastic_agent.transport.keys import begun_run_in, name_in
from elastic_agent.transport.plans import PlanReader, _pack, _parts_of
from elastic_agent.transport.record_reader import RecordReader, lease_in, lease_over
from tests.fuzz.target import Target, ViolationError, check_shown
from tests.loop_thread import finished
from tests.transport.support import lease

from . import support

_KEYS = LifeKeys(RunKeys("run"), "life")


def targets() -> list[Target]:
    """Of what both kinds of stores hold."""
    samples = support.record_samples()
    records = (*samples[support.Member], *samples[support.Lease], b"-", b"")
    plans = [_pack(plan) for plan in support.plans()]
    envelopes = tuple(msgspec.json.encode(envelope) for envelope, _ in plans)
    parts = tuple(part for _, some in plans for part in some.values())
    plan_reading = ("transport/plans.py PlanReader._open", "transport/plans.py _parts_of")
    return [
        Target("store-member", records, _reader),
        Target("store-plan", envelopes, lambda data: _plan(data, parts), plan_reading, weight=0.5),
        Target(
            "store-plan-part",
            parts,
            lambda data: _plan_part(data),
            ("transport/plans.py _decode_order",),
            weight=0.5,
        ),
        Target("store-latest", (b"1", b"12", b"9" * 16), _latest, weight=0.5),
        Target("store-names", (b"node-1.x", b"..", b"r/run/life/m/a", b"r/../life/latest"), _names),
        Target("certificate", (_certificate(),), _authority),
    ]


def _reader(data: bytes) -> None:
    reader, rejected = RecordReader("run/"), list[str]()
    for name in ("a", "full"):
        reader.member(name, data, rejected)
    reader.leases({"a": data}, rejected)
    lease_in(data, "a")
    lease_over(data, lease("a"))


def _plan_of(values: dict[str, bytes]) -> Plan | None:
    problems: list[str] = []
    reader = PlanReader(support.MemoryTable(values), _KEYS, problems.append)  # type: ignore[arg-type]
    return finished(reader.newest())


def _plan(data: bytes, parts: tuple[bytes, ...]) -> None:
    values = {_KEYS.parts + hashlib.sha256(part).hexdigest()[:32]: part for part in parts}
    for version in (1, 5):
        _plan_of(
            {
                **values,
                _KEYS.plan(version): data,
                _KEYS.latest: b"%d" % version,
            }
        )
    _parts_of(data)


def _plan_part(data: bytes) -> None:
    """A plan that names these bytes as its world, and as its order."""
    digest = hashlib.sha256(data).hexdigest()[:32]
    small = _pack(support.plans()[0])[0]
    for which in ("world", "order"):
        envelope = msgspec.json.encode(msgspec.structs.replace(small, **{which: digest}))
        _plan_of({_KEYS.parts + digest: data, _KEYS.plan(1): envelope, _KEYS.latest: b"1"})


def _latest(data: bytes) -> None:
    _plan_of({_KEYS.latest: data})


def _names(data: bytes) -> None:
    for name in (name_in(data), begun_run_in(data.decode(errors="surrogateescape"))):
        if name is not None and (name in (".", "..") or "/" in name or name_in(name.encode()) != name):
            raise ViolationError(f"{name!r} is no name")


def _certificate() -> bytes:
    pem = Secret((b"a secret of the fuzzer's own",)).issue(("node1", "10.0.0.1"))
    return ssl.PEM_cert_to_DER_cert(pem.certificate.decode())


def _authority(data: bytes) -> None:
    found = secret_id_in(data)
    if found is not None:
        check_shown(found)
