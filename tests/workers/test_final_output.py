"""Checks what is read of a failed worker's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.workers.guard.line import TAIL_BYTES
from elastic_agent.workers.output.final_output import NOTHING_READ, FinalOutput, read_final_output


def test_the_error_file_and_the_end_of_stderr_are_read(tmp_path: Path) -> None:
    error, stderr = tmp_path / "error.json", tmp_path / "stderr.log"
    error.write_bytes(b'{"message": "caf\xe9"}')
    stderr.write_text("x" * 100_000 + "the end\n")
    words = read_final_output(str(error), {"stderr": str(stderr), "stdout": str(tmp_path / "missing.log")})
    assert words == FinalOutput(
        '{"message": "caf\N{REPLACEMENT CHARACTER}"}', "x" * (TAIL_BYTES - 8) + "the end\n"
    )


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_fifo, Path.mkdir, make_zeros, lambda path: None])
def test_anything_but_a_file_is_empty_and_does_not_block(tmp_path: Path, make: object) -> None:
    assert callable(make)
    for name in ("error.json", "stderr.log"):
        make(tmp_path / name)
    words = read_final_output(str(tmp_path / "error.json"), {"stderr": str(tmp_path / "stderr.log")})
    assert words == NOTHING_READ
