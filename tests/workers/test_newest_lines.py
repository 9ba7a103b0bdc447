"""The ends of the files with workers' output, for those who look at a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.workers.output.newest_lines import LINES, LONGEST, newest_lines


def write(folder: Path, place: str, text: str) -> Path:
    file = folder / place
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode(errors="surrogateescape"))
    return file


def test_each_file_of_the_node_in_the_newest_generation_is_named_with_its_last_lines(tmp_path: Path) -> None:
    write(tmp_path, "000001/n1/0/stdout.log", "old\n")
    out = write(tmp_path, "000002/n1/10/stdout.log", "".join(f"step {step}\n" for step in range(1000)))
    err = write(tmp_path, "000002/n1/2/stderr.log", "a warning")
    write(tmp_path, "000002/n1/2/stdout.log", "")
    write(tmp_path, "000002/n1/2/error.json", "{}")
    write(tmp_path, "000002/n2/0/stdout.log", "of another node\n")
    write(tmp_path, "000009/n1/0/stdout.log", "of an earlier run of this name\n")
    (tmp_path / "latest").symlink_to("000009")
    shown = newest_lines(tmp_path, "n1", 3)
    steps = "".join(f"step {step}\n" for step in range(1000 - LINES, 1000))
    assert shown == f"==> {err} <==\na warning\n\n==> {out} <==\n{steps}"


def test_of_progress_bars_the_last_state_is_shown_and_nothing_commands_a_terminal(tmp_path: Path) -> None:
    write(tmp_path, "000001/n1/0/stderr.log", "\r 0%\r 50%\r100%\n\x1b[31mred\x1b[0m\udcff\r\n\r 10%\r 20%")
    shown = newest_lines(tmp_path, "n1", 1)
    assert shown.splitlines()[1:] == ["100%", "red�", " 20%"]


def test_of_a_file_of_any_size_little_is_read(tmp_path: Path) -> None:
    write(tmp_path, "000001/n1/0/stdout.log", "x" * 5 * LONGEST + "the end")
    shown = newest_lines(tmp_path, "n1", 1)
    assert shown.endswith("xthe end\n")
    assert len(shown) < 2 * LONGEST


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    os.mkfifo(write(tmp_path, "000001/n1/0/stdout.log", "shown").with_name("pipe.log"))
    assert newest_lines(tmp_path, "n1", 1).splitlines()[1:] == ["shown"]
    assert newest_lines(tmp_path, "n2", 1) == ""
    with pytest.raises(FileNotFoundError):
        newest_lines(tmp_path / "none", "n1", 1)
