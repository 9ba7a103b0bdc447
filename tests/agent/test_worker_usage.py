"""What workers take of the machine, as their node reports it."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from elastic_agent.agent.reporting.worker_reports import WorkerUsage
from elastic_agent.diagnosis.records import NodeReport, Usage, decode_bulletin, encode_bulletin
from elastic_agent.linux import cpu_time_s
from tests.waiting import wait_for

BUSY = "x = bytearray(64 * 2**20)\nwhile True: pass"


def test_processor_time_and_memory_are_those_of_the_worker() -> None:
    usage = WorkerUsage()
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            usage.look({0: busy.pid}, 100.0)
            assert usage.by_slot[0].cpu is None, "two looks are needed"
            before_s = cpu_time_s(busy.pid)
            wait_for("processor time", lambda: cpu_time_s(busy.pid) > before_s + 0.2)
            usage.look({0: busy.pid}, 100.1)
        finally:
            busy.kill()
    cpu, memory = usage.by_slot[0].cpu, usage.by_slot[0].memory_bytes
    assert cpu is not None
    assert cpu >= 2.0, "0.2 s in 0.1 s by the clock that was given"
    assert memory is not None
    assert memory > 64 * 2**20
    usage.look({0: busy.pid}, 200.0)
    assert usage.by_slot == {}, "it has ended"


def test_reports_with_it_are_read_and_those_of_an_older_version_too() -> None:
    report = NodeReport("n1", "i", 1, 1.0, usage={0: Usage(0.5, 2**30), 7: Usage()})
    assert decode_bulletin(encode_bulletin([report])) == (report,)
    older = msgspec.json.decode(encode_bulletin([report]))
    del older["reports"][0]["usage"]
    assert decode_bulletin(msgspec.json.encode(older))[0].usage == {}
