"""Checks what is shown of output that workers write in parts, that several write at once, or that they overwrite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.workers.output.tee import Follower
from tests.cli.support import LONG_LEASE, elastic_agent


class Output:
    """A worker's file, and what is shown of it at times that the test sets."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.shown: list[str] = []
        self._follower = Follower(str(path), "", lambda _, line: self.shown.append(line))

    def advance(self, now_s: float, written: bytes = b"", *, ends: bool = False) -> list[str]:
        """Return what is shown now of what is newly ``written``."""
        with self._path.open("ab") as file:
            file.write(written)
        self.shown.clear()
        self._follower.advance(now_s, ends=ends)
        return self.shown.copy()

    def close(self) -> None:
        self._follower.close()


@pytest.fixture
def output(tmp_path: Path) -> Iterator[Output]:
    output = Output(tmp_path / "stdout.log")
    yield output
    output.close()


def test_a_line_written_in_parts_is_shown_whole(output: Output) -> None:
    assert output.advance(0.0, "first\nGrüße ∀ ".encode()) == ["first"]
    assert output.advance(0.5) == []
    assert output.advance(0.9, "é".encode()[:1]) == []
    assert output.advance(0.99, "é".encode()[1:] + b" end\n\nnext\n") == ["Grüße ∀ é end", "", "next"]


def test_an_unfinished_line_is_shown_after_a_second_and_then_its_rest(output: Output) -> None:
    assert output.advance(0.0, b"loading ... ") == []
    assert output.advance(1.0) == ["loading ... "]
    assert output.advance(9.0) == []
    assert output.advance(9.1, b"done\n") == ["done"]
    assert output.advance(9.2, b"waits") == []
    assert output.advance(10.2) == ["waits"]
    assert output.advance(11.0, b"\n") == []


def test_a_line_without_end_is_shown_when_the_output_ends(output: Output) -> None:
    assert output.advance(0.0, b"last \xc3", ends=True) == ["last \N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize("form", ["\r{}%", "{}%\r"])
def test_a_progress_bar_is_shown_once_a_second_and_at_its_end(output: Output, form: str) -> None:
    shown = [output.advance(percent / 20, form.format(percent).encode()) for percent in range(61)]
    assert [lines for lines in shown if lines] == [["20%"], ["41%"]]
    assert output.advance(3.05, b"\n") == ["60%"]
    assert output.advance(3.1, b"line\r\n") == ["line"]


def test_text_above_a_progress_bar_is_shown(output: Output) -> None:
    """As by tqdm.write: the bar is erased, and drawn again below."""
    assert output.advance(0.0, b"\r 1%\r    \rsaved\n\r 1%") == ["saved"]
    assert output.advance(0.5, b"\r 2%\r    \r") == []
    assert output.advance(1.5, b"\n") == []


@pytest.mark.system
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("os._exit(0)", "all workers of this node succeeded"),
        ("os._exit(3)", "worker vm/0 exited with code 3"),
        ("os.kill(os.getpid(), 9)", "worker vm/0 was killed by SIGKILL"),
    ],
)
def test_the_last_words_of_a_worker_come_before_what_the_agent_says_of_its_end(
    tmp_path: Path, end: str, said: str
) -> None:
    """Also without an end of line, which the reader waits for while the worker lives."""
    script, shown = tmp_path / "train.py", tmp_path / "shown"
    script.write_text(f"import os\nos.write(1, b'last words')\nos.write(2, b'last error')\n{end}\n")
    options = ["--node-id", "vm", "--tee", "3", "--log-dir", str(tmp_path / "logs"), "--max-restarts", "0"]
    into_one_file = ["bash", "-c", 'exec "$@" >"$0" 2>&1', str(shown)]
    elastic_agent(*options, str(script), variables=LONG_LEASE, under=into_one_file)
    lines = shown.read_text().splitlines()
    of_the_agent = next(number for number, line in enumerate(lines) if said in line)
    assert {"[default0]:last words", "[default0]:last error"} <= {*lines[:of_the_agent]}, lines
