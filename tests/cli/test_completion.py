"""Completion in the shells that are installed."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import GUARD_S

from .support import elastic_agent, refusal


def script(shell: str, folder: Path) -> Path:
    """Return the file with the script of this shell, which is not tested where the shell is not installed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = elastic_agent("completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    path = folder / shell
    path.write_text(done.stdout)
    return path


def typed(words: str, shell: list[str], before: str, folder: Path, until: str) -> str:
    """Type words and the tabulator into a shell on a terminal; return what it shows up to this text."""
    master, slave = pty.openpty()
    environment = {**os.environ, "HOME": str(folder), "TERM": "xterm", "PS1": "READY "}
    process = subprocess.Popen(
        shell, stdin=slave, stdout=slave, stderr=slave, cwd=folder, env=environment, start_new_session=True
    )
    os.close(slave)
    shown = b""

    def read_until(text: str) -> None:
        nonlocal shown
        while text.encode() not in shown:
            assert select.select([master], [], [], GUARD_S)[0], shown
            shown += os.read(master, 4096)

    try:
        os.write(master, f"{before}; echo SOUR''CED\n".encode())
        read_until("SOURCED")
        os.write(master, f"{words}\t".encode())
        read_until(until)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return shown.decode()


SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
TYPED = [
    ("--rdzv-e", "--rdzv-endpoint"),
    ("status --wa", "--watch"),
    ("compl", "completion"),
    ("--nnodes 2 trai", "train.py"),
    ("train.py confi", "config.yaml"),
    ("exam", "examples/"),
    ("two", r"two\ words/"),
    ("settings --sch", "--schema"),
    ("serve --state", "--state-dir"),
]


@pytest.mark.parametrize(
    ("shell", "words", "completed"),
    [
        *(("bash", *row) for row in TYPED),
        *(pytest.param("zsh", *row, marks=pytest.mark.prove) for row in TYPED[:3]),
    ],
)
def test_shells_complete_commands_options_and_files(
    shell: str, words: str, completed: str, tmp_path: Path
) -> None:
    for file in ("train.py", "config.yaml"):
        (tmp_path / file).touch()
    for folder in ("examples", "two words"):
        (tmp_path / folder).mkdir()
    source = f". {script(shell, tmp_path)}"
    typed(f"elastic-agent {words}", SHELLS[shell], source, tmp_path, completed)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("--rdzv-e", "--rdzv-endpoint"),
        ("status --wa", "--watch"),
        ("compl", "completion"),
        ("logs --fol", "--follow"),
        ("doctor --al", "--alone"),
        ("doctor --rdzv-e", "--rdzv-endpoint"),
    ],
)
def test_fish_completes_commands_and_options(words: str, completed: str, tmp_path: Path) -> None:
    command = f"source {script('fish', tmp_path)}; complete -C 'elastic-agent {words}'"
    environment = {**os.environ, "HOME": str(tmp_path)}
    done = subprocess.run(
        ["fish", "-c", command], env=environment, capture_output=True, text=True, check=True
    )
    assert (done.stdout.split("\t")[0].strip(), done.stderr) == (completed, "")


def test_every_option_that_a_command_accepts_is_completed_and_described_as_in_its_help() -> None:
    bash, fish = (elastic_agent("completion", shell).stdout for shell in ("bash", "fish"))
    for name, option in (
        ("status", "--run"),
        ("why", "--run"),
        ("stacks", "--run"),
        ("logs", "-f"),
        ("logs", "-n"),
    ):
        assert re.search(rf'^    {name}\) options=".* {option}[ "]', bash, re.M), (name, option)
    within = "complete -c elastic-agent -n '__fish_seen_subcommand_from logs'"
    assert f"{within} -l user -d 'only agents of this user (for root)'\n" in fish
    assert f"{within} -s n -d 'begin with so many lines of each file [default: 20]'\n" in fish
    assert "-l node-rank -d " in fish


def test_a_shell_that_is_not_known_is_refused() -> None:
    assert 'got "tcsh"; expected one of bash, zsh, fish' in refusal("completion", "tcsh")
    assert 'got "nothing"; expected one of bash, zsh, fish' in refusal("completion")
