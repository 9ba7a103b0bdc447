"""A generation's workers: how they ended, and their output."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.workers.context import BackgroundCloser, WorkerContext
from elastic_agent.workers.facts import Started
from elastic_agent.workers.failure import WorkerFailure
from elastic_agent.workers.guard.client import Exited, Stopped
from elastic_agent.workers.output.generation_logs import GenerationLogs, Streams
from tests.workers.support import PATIENCE_S, Driver

RAISE = "raise RuntimeError('boom')"


class Contexts:
    """Makes contexts with two workers or more, each running code of its own."""

    def __init__(self, driver: Driver, directory: Path) -> None:
        self.driver = driver
        self.directory = directory
        self.closer = BackgroundCloser()
        self.generation = 0

    def start(self, *codes: str, logs: dict[str, Any] | None = None, **options: Any) -> WorkerContext:
        args = {slot: ("-I", "-S", "-c", textwrap.dedent(code)) for slot, code in enumerate(codes)}
        self.generation += 1
        envs = {
            slot: {
                "ELASTIC_AGENT_RUN_ID": "run",
                "ELASTIC_AGENT_NODE_ID": "n2",
                "ELASTIC_AGENT_GENERATION": str(self.generation),
                "LOCAL_RANK": str(slot),
            }
            for slot in args
        }
        specs = GenerationLogs(str(self.directory), **(logs or {}))
        context = WorkerContext(
            self.driver.guard, self.generation, "w", sys.executable, args, envs, specs, self.closer, **options
        )
        context.start()
        return context

    def feed(self, context: WorkerContext, kind: type) -> None:
        """Hand events in, up to one of that kind, as the agent's loop does."""
        before = len(self.driver.events)
        self.driver.until(kind)
        for event in self.driver.events[before:]:
            context.handle(event)

    def stop(self, context: WorkerContext) -> None:
        self.driver.guard.stop(0.0)
        self.feed(context, Stopped)

    def finish(self, context: WorkerContext) -> None:
        """Wait for the end of both workers, and until all their output has been shown."""
        self.feed(context, Exited)
        self.feed(context, Exited)
        self.stop(context)
        context.close_later()
        assert self.closer.drain_closing(PATIENCE_S)


@pytest.fixture
def contexts(driver: Driver, tmp_path: Path) -> Iterator[Contexts]:
    made = Contexts(driver, tmp_path / "logs")
    yield made
    assert made.closer.drain_closing(PATIENCE_S)


def reported(context: WorkerContext, slot: int = 0) -> WorkerFailure:
    return context.with_files(context.exits[slot]).failure()


def test_the_exits_of_workers_are_known(contexts: Contexts) -> None:
    context = contexts.start("import time; time.sleep(1000)", RAISE)
    contexts.feed(context, Exited)
    assert set(context.pids) == {0, 1}
    assert {slot: exited.returncode for slot, exited in context.exits.items()} == {1: 1}
    assert reported(context, 1).summary("n2") == "worker n2/1 exited with code 1: RuntimeError: boom"
    contexts.stop(context)
    context.close_later()


@pytest.mark.parametrize(
    ("others", "remedy"),
    [(0, "install the package in the version"), (2, "install the same packages on every machine")],
)
def test_a_missing_package_is_explained_by_the_number_of_machines(
    contexts: Contexts, others: int, remedy: str
) -> None:
    context = contexts.start(
        "import absent", started=Started(python="/venv/bin/python", other_machines=others)
    )
    contexts.feed(context, Exited)
    found = reported(context).summary("n2")
    assert found.endswith("(the workers run /venv/bin/python)")
    known = reported(context).recognised
    assert known is not None
    assert remedy in known.remedy
    assert ("machine" in known.remedy) == bool(others)
    contexts.stop(context)


RELATIVE = "open('data/train.bin')"
SAVES = "raise RuntimeError('Parent directory ckpt does not exist.')"


@pytest.mark.parametrize("code", ["import os; os.getcwd()", RELATIVE, SAVES])
def test_the_failure_of_workers_whose_folder_was_removed_is_explained(
    contexts: Contexts, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exp"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code = f"import os; os.chdir('{folder}'); os.rmdir('{folder}')\n{code}"
    context = contexts.start(code, started=Started(str(folder)))
    contexts.feed(context, Exited)
    found = reported(context).summary("n2")
    assert f"the folder the run was started in is gone: {folder}" in found
    known = reported(context).recognised
    assert known is not None
    assert "start the run again from a folder that stays" in known.remedy
    assert "machine" not in found + known.remedy
    assert {"working_folder", "open_files", "shm"} <= context.machine_facts().keys()
    contexts.stop(context)


def test_tee_shows_lines_with_their_worker_and_keeps_them(
    contexts: Contexts, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line of it, also the last one, which gets the end that it lacks, once `drain_closing` is through."""
    context = contexts.start(
        "import sys; print('hello'); sys.stderr.write('oh no')",
        "print('other'); print('unfinished', end='')",
        logs={"tee": dict.fromkeys(range(2), Streams.ALL)},
    )
    contexts.finish(context)
    captured = capsys.readouterr()
    assert sorted(captured.out.split("[w")) == ["", "0]:hello\n", "1]:other\n", "1]:unfinished\n"]
    assert captured.err == "[w0]:oh no\n"
    assert Path(context.stdouts[0]).read_text() == "hello\n"
    assert Path(context.stderrs[0]).read_text() == "oh no"


def test_prefixes_and_filters_of_torchrun(contexts: Contexts, capsys: pytest.CaptureFixture[str]) -> None:
    context = contexts.start(
        "print('loss 1'); print('noise')",
        "print('loss 2')",
        logs={"tee": dict.fromkeys(range(2), Streams.OUT), "local_ranks_filter": {1}},
        log_line_prefixes={0: "<a> ", 1: "<b> "},
        duplicate_stdout_filters=["loss"],
    )
    contexts.finish(context)
    assert capsys.readouterr().out == "<b> loss 2\n"
    filtered = Path(context.stdouts[0]).parent.parent / "filtered_stdout.log"
    assert filtered.read_text() == "<b> loss 2\n"
    assert Path(context.stdouts[0]).read_text() == "loss 1\nnoise\n"


def test_private_interfaces_of_torch_are_unchanged() -> None:
    from torch.numa import binding

    parameters = inspect.signature(binding._maybe_wrap_command_args_with_numa_binding).parameters
    is_known = "numa_options" in parameters and not {"device_index", "gpu_index"}.isdisjoint(parameters)
    assert is_known, f"adapt elastic_agent/workers/context.py to this torch: {[*parameters]}"
