"""Log lines for people and for programs."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.logs.render import console_line, journal_lines, json_line
from elastic_agent.logs.setup import is_journal

PROGRAM = """
import logging, sys, threading, warnings
from elastic_agent.logs import adopt_library_loggers, bind_context, configure_logging, get_logger
configure_logging(sys.argv[1], sys.argv[2], sys.stderr)
log = get_logger()
log.info("before anything is known")
bind_context(run="r1", node="n1")
bind_context(generation=3)
log.debug("details")
import torch
adopt_library_loggers()
thread = threading.Thread(target=lambda: log.info("from a thread", workers=2))
thread.start(); thread.join()
logging.getLogger("torch.distributed").warning("torch says %d", 3)
logging.getLogger("some.library").info("chatter")
warnings.warn("careful")
try:
    raise ValueError("broken")
except ValueError:
    log.exception("it failed", tail="first\\nsecond\\x1b[31m")
"""


def lines_of(log_format: str, level: str = "info") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format, level],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_json_lines_have_run_node_and_generation() -> None:
    lines: list[dict[str, Any]] = [json.loads(line) for line in lines_of("json")]
    first, thread, torch, warning, failure = lines
    assert [first["run"], first["node"], first["generation"]] == [None, None, None]
    for line in lines[1:]:
        assert [line["run"], line["node"], line["generation"]] == ["r1", "n1", 3]
    assert (thread["message"], thread["workers"], thread["level"]) == ("from a thread", 2, "info")
    assert (torch["message"], torch["logger"], torch["level"]) == (
        "torch says 3",
        "torch.distributed",
        "warning",
    )
    assert "UserWarning: careful" in warning["message"]
    assert (failure["level"], failure["tail"]) == ("error", "first\nsecond\x1b[31m")
    assert failure["exception"].endswith("ValueError: broken")
    for line in lines:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None


def test_in_a_pipe_the_log_has_the_lines_of_the_console_without_colours() -> None:
    text = "\n".join(lines_of("auto", "debug"))
    assert "\x1b" not in text
    assert "debug   [r1 n1 g3] details" in text
    assert "info    [r1 n1 g3] from a thread workers=2" in text
    assert "warning [r1 n1 g3] torch says 3 logger=torch.distributed" in text
    assert text.count("torch says 3") == 1
    assert "\n    tail:\n      first\n      second\\x1b[31m" in text
    assert "\n      ValueError: broken" in text


def test_in_systemds_journal_each_line_has_its_priority(tmp_path: Path) -> None:
    program = (
        "import sys; from elastic_agent.logs import configure_logging, get_logger;"
        "configure_logging('auto', 'info', sys.stderr); get_logger().warning('late', tail='one\\ntwo')"
    )
    with (tmp_path / "journal").open("w") as journal:
        found = os.fstat(journal.fileno())
        variables = {**os.environ, "JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}
        subprocess.run([sys.executable, "-c", program], stderr=journal, env=variables, check=True)
    lines = (tmp_path / "journal").read_text().splitlines()
    assert lines[0].startswith("<4>")
    assert lines[0].endswith(" warning late")
    assert lines[1:] == ["<4>    tail:", "<4>      one", "<4>      two"]


def test_only_a_stream_to_the_journal_is_detected_as_one(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream:
        found = os.fstat(stream.fileno())
        assert is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"})
        assert not is_journal(stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino + 1}"})
        assert not is_journal(stream, {})
    assert not is_journal(stream, {"JOURNAL_STREAM": "8:1"}), "it is closed"
    assert not is_journal(io.StringIO(), {"JOURNAL_STREAM": "8:1"})


@pytest.mark.prove
@pytest.mark.parametrize(("level", "heard"), [("debug", 7), ("info", 5), ("warning", 3), ("error", 1)])
def test_messages_below_the_level_are_dropped(level: str, heard: int) -> None:
    assert len(lines_of("json", level)) == heard


def fields(**more: object) -> dict[str, object]:
    return {"time": 0.0, "level": "info", "event": "hello", **more}


def test_json_writes_unknown_types_as_text() -> None:
    assert json.loads(json_line(fields(when=datetime(2026, 1, 1))))["when"] == "2026-01-01 00:00:00"


def test_json_escapes_control_characters_without_loss() -> None:
    unsafe = "\x1b[2J\x9b2J\x7f\u202e\u2066\u2028\udcff"
    line = json_line(fields(tail=unsafe, é="é"))
    assert line.isprintable()
    assert json.loads(line)["tail"] == unsafe
    assert '"é": "é"' in line


def test_values_cannot_forge_or_break_console_lines() -> None:
    line = console_line(fields(node="n\x1b1", x="a b", y="", z="a=b", f=1 / 3), colours=False)
    assert line.endswith('info    [n\\x1b1] hello x="a b" y="" z="a=b" f=0.333333')
    assert "\n" not in line


def test_workers_cannot_forge_priorities() -> None:
    lines = journal_lines(fields(level="error", tail="<0>first\n<7>second")).split("\n")
    assert [line[:3] for line in lines] == ["<3>"] * 4


def test_colours_are_used_only_if_enabled() -> None:
    assert "\x1b[" in console_line(fields(), colours=True)
    assert "\x1b[" not in console_line(fields(), colours=False)


THREADS = """
import sys, threading
from elastic_agent.logs import configure_logging, get_logger
sys.setswitchinterval(1e-6)
configure_logging("console", "info", sys.stderr)
def write(name):
    for _ in range(200):
        get_logger().info(name * 50)
threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_lines_of_different_threads_are_not_mixed() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=True)
    written = done.stderr.splitlines()
    assert len(written) == 800
    assert {line.partition(" info    ")[2] for line in written} == {name * 50 for name in "abcd"}


BESIDE = """
import sys, structlog
from elastic_agent.logs import get_logger, log_beside_program
structlog.configure(processors=[structlog.processors.JSONRenderer()], logger_factory=structlog.PrintLoggerFactory())
log_beside_program("info", open(2, "w", encoding="ascii", closefd=False))
structlog.get_logger().info("the program's")
get_logger().info("ours \u2713", port=1)
"""


def test_the_log_of_a_program_stays_as_it_has_set_it() -> None:
    done = subprocess.run([sys.executable, "-c", BESIDE], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {"event": "the program's"}
    assert done.stderr.endswith("info    ours \\u2713 port=1\n"), "its stream has no such character"
