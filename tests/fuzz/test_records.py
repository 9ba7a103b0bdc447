"""What nodes exchange through the store, as it is decoded, and what is shown of it."""

from __future__ import annotations

import ssl
from typing import Any

import msgspec
import pytest

from elastic_agent.diagnosis.cause import render
from elastic_agent.diagnosis.records import decode_bulletin, encode_bulletin
from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.monitoring.status import RunStatus, run_status
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.printable import escaped
from elastic_agent.protocol import (
    Lease,
    Member,
    Plan,
    RecordError,
    Waiting,
    decode,
    encode,
    waiting_in,
    waiting_text,
)
from elastic_agent.rendezvous.reports import run_reports
from elastic_agent.transport import LifeKeys, RunKeys, RunView
from elastic_agent.transport.certificates import Secret, secret_id_in
from elastic_agent.transport.keys import begun_run_in, name_in
from elastic_agent.transport.record_reader import Plans, RecordReader, lease_in, lease_over
from elastic_agent.web.metrics import metrics_text
from tests.loop_thread import finished
from tests.transport.support import lease

from .damage import check_shown, fuzzed
from .samples import MemoryTable, plans, record_samples, reports

KEYS = LifeKeys(RunKeys("run"), "life")
BULLETIN = encode_bulletin(reports())


@pytest.mark.parametrize("kind", record_samples())
def test_record(kind: type[Any]) -> None:
    @fuzzed(*record_samples()[kind])
    def check(data: bytes) -> None:
        try:
            record = decode(kind, data)
        except RecordError as problem:
            check_shown(escaped(str(problem), keep_lines=True))
        else:
            assert decode(kind, encode(record)) == record

    check()


@fuzzed(BULLETIN)
def test_report(data: bytes) -> None:
    """Show it as ``status``, ``why`` and the metrics do."""
    decode_bulletin(data)
    read = run_reports(RunView(reports={"n0": data})).reports
    running = plans()[1]
    status = run_status(RunStatus("run", "n0", 1.7e9), running, reports=read)
    check_shown(escaped(status_text(status, 1.7e9), keep_lines=True))
    msgspec.json.decode(msgspec.json.encode(status), type=type(status))
    metrics_text(status)
    cause = root_cause(read, running, running.world)
    if cause is not None:
        check_shown(escaped(render(cause), keep_lines=True))


@fuzzed(waiting_text(Waiting("waiting for n1", lacks_nodes=True)).encode())
def test_what_is_waited_for(data: bytes) -> None:
    read = waiting_in(data.decode("utf-8", "replace"))
    check_shown(read.reason)
    assert waiting_in(waiting_text(read)).lacks_nodes == read.lacks_nodes


@fuzzed(*record_samples()[Member], *record_samples()[Lease], b"-", b"")
def test_members_and_leases_of_a_store(data: bytes) -> None:
    reader = RecordReader("run/", lambda problem: None)
    for name in ("a", "full"):
        reader.member(name, data)
    reader.leases({"a": data})
    lease_in(data, "a")
    lease_over(data, lease("a"))


@fuzzed(*record_samples()[Plan])
def test_plan_of_a_store(data: bytes) -> None:
    problems: list[str] = []
    finished(Plans(MemoryTable({KEYS.plan: data}), KEYS, problems.append).read())  # type: ignore[arg-type]


@fuzzed(b"node-1.x", b"..", b"r/run/life/m/a", b"r/../life/plan")
def test_names(data: bytes) -> None:
    for name in (name_in(data), begun_run_in(data.decode(errors="surrogateescape"))):
        if name is not None:
            assert name not in (".", "..")
            assert "/" not in name
            assert name_in(name.encode()) == name


def test_certificate() -> None:
    pem = Secret((b"a secret of this test's own",)).issue(("node1", "10.0.0.1"))

    @fuzzed(ssl.PEM_cert_to_DER_cert(pem.certificate.decode()))
    def check(data: bytes) -> None:
        found = secret_id_in(data)
        if found is not None:
            check_shown(found)

    check()
