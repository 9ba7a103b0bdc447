"""The records that nodes exchange through the store, as they are decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from elastic_agent.diagnosis.records import decode_bulletin, encode_bulletin
from elastic_agent.diagnosis.render import render
from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.doctor import records as doctor
from elastic_agent.doctor.findings import error
from elastic_agent.monitoring.status import run_status
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.printable import escaped
from elastic_agent.protocol import RecordError, Waiting, decode, encode
from elastic_agent.rendezvous.reports import run_reports
from elastic_agent.transport import RunView
from elastic_agent.web.metrics import metrics_text
from tests.fuzz.target import Target, check_shown

from . import support


def targets() -> list[Target]:
    """Records of the protocol, reports, and the examination."""
    kinds = [
        Target(
            f"record-{kind.__name__.lower()}",
            samples,
            _record(kind),
            ("protocol/codec.py decode", "protocol/codec.py _check_version"),
        )
        for kind, samples in support.record_samples().items()
    ]
    bulletin = encode_bulletin(support.reports())
    waiting = (Waiting("waiting for n1", lacks_nodes=True).to_text().encode(),)
    examination = [_doctor(record) for record in _doctor_records()]
    return [
        *kinds,
        Target("report", (bulletin,), _report, ("diagnosis/records.py decode_bulletin",)),
        Target("waiting", waiting, _waiting, ("protocol/waiting.py Waiting.from_text",)),
        Target("report-shown", (bulletin,), _report_shown, weight=0.2),
        *examination,
    ]


def _record(kind: type[Any]) -> Callable[[bytes], object]:
    def feed(data: bytes) -> object:
        try:
            record = decode(kind, data)
        except RecordError as problem:
            check_shown(escaped(str(problem), keep_lines=True))
            return None
        support.same(decode(kind, encode(record)), record)
        return record

    return feed


def _waiting(data: bytes) -> object:
    read = Waiting.from_text(data.decode("utf-8", "replace"))
    check_shown(read.reason)
    support.same(Waiting.from_text(read.to_text()).lacks_nodes, read.lacks_nodes)
    return read


def _report(data: bytes) -> object:
    return decode_bulletin(data)


def _report_shown(data: bytes) -> None:
    """What ``status``, ``why`` and the metrics make of reports."""
    reports = run_reports(RunView(reports={"n0": data})).reports
    running = support.plans()[1]
    status = run_status(run_id="run", endpoint="n0", asked_s=1.7e9, plan=running, reports=reports)
    check_shown(escaped(status_text(status, 1.7e9), keep_lines=True))
    msgspec.json.decode(msgspec.json.encode(status), type=type(status))
    metrics_text([status])
    cause = root_cause(reports, running, running.world)
    if cause is not None:
        check_shown(escaped(render(cause), keep_lines=True))


def _doctor_records() -> tuple[msgspec.Struct, ...]:
    finding = error("script", "train.py does not compile", "correct it")
    shared = doctor.Shared("/data", "", True, "12", 10**12)
    facts = {"python": "3.11", "torch": "2.13"}
    return (
        doctor.Attendance("host0", 1, 4, "10.0.0.1", 4000, 4001, 3),
        doctor.MachineFacts(
            "host0", "10.0.0.1", "eth0", True, 8, facts, {"NCCL_DEBUG": "WARN"}, (finding,), (shared,)
        ),
        doctor.Connections((doctor.Connection("n1", "no-route", "refused", 4000, False, 0.1, 0.2, 0.3),)),
        doctor.SeenPaths((("n0", "n1"),)),
        doctor.Collectives((doctor.Reduced("gloo", "", 0.5),)),
    )


def _doctor(record: msgspec.Struct) -> Target:
    kind = type(record)
    name = f"doctor-{kind.__name__.lower()}"
    return Target(
        name,
        (doctor.encode(record),),
        lambda data: doctor.decode_all(kind, {"n0": data}),
        ("doctor/records.py decode_all",),
        weight=0.5,
    )
