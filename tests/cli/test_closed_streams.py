"""Started with standard streams closed, as by some daemons (``elastic-agent … 0<&- 1>&- 2>&-``)."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cli.support import LONG_LEASE, elastic_agent

STREAMS = (0, 1, 2)
COMBINATIONS = [closed for count in (1, 2, 3) for closed in itertools.combinations(STREAMS, count)]


def closing(descriptors: tuple[int, ...]) -> list[str]:
    """A command that runs another with these descriptors closed."""
    redirections = " ".join(f"{fd}>&-" for fd in descriptors)
    return ["sh", "-c", f'exec "$@" {redirections}', "sh"]


def name_of(closed: tuple[int, ...]) -> str:
    return "".join(map(str, closed))


@pytest.mark.parametrize("closed", COMBINATIONS, ids=name_of)
def test_settings_is_printed_with_any_standard_stream_closed(closed: tuple[int, ...]) -> None:
    done = elastic_agent("settings", under=closing(closed))
    assert done.returncode == 0
    assert ("max_restarts" in done.stdout) == (1 not in closed)
    assert done.stderr == ""


@pytest.mark.parametrize("closed", COMBINATIONS, ids=name_of)
def test_a_usage_error_has_its_exit_code(closed: tuple[int, ...]) -> None:
    done = elastic_agent("--nnodes", "0", "train.py", under=closing(closed))
    assert done.returncode == 2
    assert ("--nnodes: got" in done.stderr) == (2 not in closed)
    assert done.stdout == ""


@pytest.mark.parametrize(
    "closed",
    [*(pytest.param(closed, marks=pytest.mark.prove) for closed in ((2,), (0, 1))), (0, 1, 2)],
    ids=name_of,
)
def test_a_run_finishes_and_nothing_is_written_into_files_of_others(
    tmp_path: Path, closed: tuple[int, ...]
) -> None:
    """Whatever is opened next would get the free number, and then the output meant for the stream."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "with open('seen', 'w') as file:\n"
        "    print('said'); print('said', file=sys.stderr); os.write(1, b'said'); os.write(2, b'said')\n"
        "    file.write('done')\n"
    )
    journal = tmp_path / "journal"
    done = elastic_agent(
        *("--state-dir", str(tmp_path / "state"), "--event-journal", str(journal), str(script)),
        variables=LONG_LEASE,
        under=["env", "-C", str(tmp_path), *closing(closed)],
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "seen").read_text() == "done"
    assert all(line.startswith("{") for line in journal.read_text().splitlines())
    assert ("the run finished" in done.stderr) == (2 not in closed)
    assert ("said" in done.stdout) == (1 not in closed)
