"""Handlers of metrics and events that were written for torchrun get the same from elastic-agent."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic import metrics
from torch.distributed.elastic.events import handlers
from torch.distributed.elastic.events.api import Event, EventSource

from elastic_agent.agent.reporting.torch_handlers import MOST_WAITING, TorchHandlers
from tests.cli.support import COMMAND, clean_environment

PLUGIN = """
import json, logging, os

def register():
    from torch.distributed.elastic import metrics
    from torch.distributed.elastic.events import handlers

    def write(kind, data):
        with open(os.environ["WRITTEN"], "a") as file:
            file.write(json.dumps([kind, data]) + "\\n")

    class Events(logging.Handler):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def emit(self, record):
            write(self.kind, json.loads(record.getMessage()))

    class Metrics(metrics.MetricHandler):
        def emit(self, data):
            write("metric", {"group": data.group_name, "name": data.name, "value": data.value})

    handlers._log_handlers["written"] = Events("event")
    handlers._log_handlers["dynamic_rendezvous"] = Events("rendezvous")
    metrics.configure(Metrics(), group="torchelastic")
"""

STUCK_PLUGIN = """
import logging, threading

def register():
    from torch.distributed.elastic.events import handlers

    class Stuck(logging.Handler):
        def emit(self, record):
            threading.Event().wait()

    handlers._log_handlers["written"] = Stuck()
"""

SCRIPT = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(7)
"""

NOT_PUBLISHED = {
    "metric LocalElasticAgent._monitor_workers.success",
    "metric LocalElasticAgent._monitor_workers.duration.ms",
    "rendezvous c10d_rendezvous_backend.py:_create_tcp_store",
    "rendezvous dynamic_rendezvous.py:_DistributedRendezvousOpExecutor.run",
}
"""Names of torchrun's for what elastic-agent does not do; docs/monitoring.md lists them."""

Record = tuple[str, dict[str, Any]]


def install_plugin(folder: Path, source: str) -> None:
    """A site's plug-in, as pip would install it."""
    info = folder / "site_handlers-1.dist-info"
    info.mkdir(parents=True)
    (folder / "site_handlers.py").write_text(source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: site-handlers\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nsite = site_handlers:register\n")


def run(command: list[str], folder: Path, plugin: str, script: str) -> tuple[str, list[Record]]:
    """What this launcher logged, and what the site's handlers wrote while it ran two workers."""
    install_plugin(folder / "site", plugin)
    written, program = folder / "written.jsonl", folder / "train.py"
    written.touch()
    program.write_text(script)
    options = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "2", "--role", "trainer"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "same"]
    done = subprocess.run(
        [*command, *options, "--event-log-handler", "written", str(program)],
        env=clean_environment({"PYTHONPATH": str(folder / "site"), "WRITTEN": str(written)}),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr, [(kind, data) for kind, data in map(json.loads, written.read_text().splitlines())]


def agent_in(folder: Path) -> list[str]:
    return [*COMMAND, "--state-dir", str(folder / "state"), "--worker-start", "cold"]


def names(records: list[Record]) -> set[str]:
    return {f"{kind} {data['name']}" for kind, data in records}


def test_handlers_get_the_names_and_fields_that_torchrun_gives_them(tmp_path: Path) -> None:
    _, torchrun = run([sys.executable, "-m", "torch.distributed.run"], tmp_path / "torchrun", PLUGIN, SCRIPT)
    _, agent = run(agent_in(tmp_path), tmp_path / "agent", PLUGIN, SCRIPT)
    assert names(torchrun) - names(agent) == NOT_PUBLISHED
    # torchrun does not see that workers are healthy if they end before its first poll.
    assert names(agent) <= names(torchrun) | {"metric workers.trainer.healthy"}

    for kind in ("event", "rendezvous", "metric"):
        expected = {key for one, data in torchrun if one == kind for key in data}
        assert {key for one, data in agent if one == kind for key in data} == expected
    assert metadata(agent) == metadata(torchrun)


def metadata(records: list[Record]) -> list[tuple[Any, ...]]:
    """Of events of workers, all fields that do not differ from run to run; keys of the others."""
    found: list[tuple[Any, ...]] = []
    for kind, event in records:
        if kind != "event":
            continue
        fields = event["metadata"]
        detail = json.loads(fields["metadata"])
        if event["source"] == "WORKER":
            same = ("run_id", "global_rank", "group_rank", "role", "hostname", "state", "raw_error")
            ranks = {key: detail[key] for key in ("local_rank", "role_rank", "role_world_size", "exit_code")}
            found.append((event["name"], *(fields[key] for key in same), fields["agent_restarts"], ranks))
        else:
            found.append((event["name"], *sorted(fields), *sorted(detail)))
    return found


def test_the_run_ends_although_a_handler_of_events_does_not_return(tmp_path: Path) -> None:
    logged, _ = run(agent_in(tmp_path), tmp_path / "agent", STUCK_PLUGIN, "")
    assert "the handlers of torch.distributed.elastic did not return within 2 s" in logged


class Blocking(logging.Handler):
    """Does not return until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.may_return = threading.Event(), threading.Event()
        self.received: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.entered.set()
        self.may_return.wait()
        self.received.append(json.loads(record.getMessage())["name"])


class Failing(metrics.MetricHandler):
    def __init__(self) -> None:
        self.calls = 0

    def emit(self, metric_data: metrics.MetricData) -> None:
        self.calls += 1
        raise SystemExit("no route to the\ndatabase")


@contextmanager
def registered(
    events: logging.Handler | None = None, values: metrics.MetricHandler | None = None
) -> Iterator[str]:
    """With these handlers registered; yields the name for events."""
    name = f"test-{id(events)}"
    if events is not None:
        handlers._log_handlers[name] = events
    metrics.configure(values if values is not None else metrics.NullMetricHandler(), group="torchelastic")
    try:
        yield name if events is not None else "null"
    finally:
        handlers._log_handlers.pop(name, None)
        metrics.configure(metrics.NullMetricHandler(), group="torchelastic")


def event(name: str) -> Event:
    return Event(name, EventSource.AGENT, 0, {})


def test_a_handler_that_does_not_return_delays_neither_the_run_nor_its_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = Blocking()
    with registered(slow) as name:
        hooks = TorchHandlers(name)
        hooks.record(event("first"))
        assert slow.entered.wait(60)
        for number in range(MOST_WAITING + 1):
            hooks.record(event(str(number)))
        hooks.finish(0.05)
        slow.may_return.set()
    told = capsys.readouterr().out
    assert "are slower than the events: more than 1000 wait for them, and the newest are lost" in told
    assert "did not return within 0.05 s; the last metrics and events are lost" in told


def test_a_handler_that_fails_is_logged_once_and_gets_the_next_event(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing = Failing()
    with registered(values=failing) as name:
        hooks = TorchHandlers(name)
        hooks.put_metric("workers.default.healthy", 1)
        hooks.put_metric("workers.default.healthy", 1)
        hooks.finish(60)
    assert failing.calls == 2
    told = capsys.readouterr().out
    assert told.count("torch's handler of metrics failed: SystemExit: no route to the database") == 1


def test_an_unknown_handler_is_reported_with_those_that_are_registered() -> None:
    with pytest.raises(ValueError, match=r"--event-log-handler nope: no such handler .*: console, "):
        TorchHandlers("nope")


def test_without_handlers_no_thread_is_started() -> None:
    before = set(threading.enumerate())
    with registered():
        hooks = TorchHandlers("null")
        hooks.put_metric("workers.default.healthy", 1)
        hooks.record(event("first"))
        assert set(threading.enumerate()) <= before
