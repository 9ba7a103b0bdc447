"""What ``elastic-agent settings`` prints can be read back."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from elastic_agent.cli.settings import as_toml
from elastic_agent.config import value_types
from elastic_agent.config.load import load_settings
from elastic_agent.config.settings import Settings, specs
from elastic_agent.values import PortRange
from tests.config.support import Shell

COMMANDS = [
    [],
    ["--rdzv-endpoint", "n0", "--nnodes", "1:4", "--rdzv-id", "a.b", "--max-restarts", "0"],
    ["--nnodes", "2", "--node-rank", "1", "--master-addr", "n0", "--rdzv-backend", "static"],
    [
        "--standalone",
        "-t",
        "0:3,11:1",
        "--local-ranks-filter",
        "0,11",
        "--duplicate-stdout-filters",
        'a,,b,"c\\',
    ],
    ["--rdzv-conf", "timeout=9,is_host=1", "--port-range", "30000:30100", "--rdzv-endpoint", "[::1]:5"],
    ["-m", "--log-format", "json", "--role", "träger 'x' \"y\"", "--hang-timeout", "0", "--log-limit", "96K"],
]


@pytest.mark.parametrize("argv", COMMANDS, ids=[" ".join(argv) or "nothing" for argv in COMMANDS])
def test_the_printed_settings_are_a_file_that_gives_the_same_settings(shell: Shell, argv: list[str]) -> None:
    first = shell.load([*argv])
    file = shell.write("printed.toml", as_toml(first))
    again = load_settings(["--config", file], shell.environ)
    assert replace(again.settings, config=None) == first.settings
    assert [n for n in again.notes if n.level == "warning"] == []


def test_settings_are_complete_and_typed_by_default() -> None:
    settings = Settings()
    assert {f.name for f in fields(settings)} == {"script", "script_args", *(spec.name for spec in specs())}
    assert isinstance(settings.state_dir, Path)
    assert settings.nproc_per_node == "gpu-or-1"


def test_the_streams_of_a_rank_are_resolved() -> None:
    choice = value_types.STREAMS.parse("0:3,11:1")
    assert [choice.of(rank) for rank in (0, 1, 11)] == [3, 0, 1]
    assert value_types.STREAMS.parse("2").of(11) == 2
    assert list(PortRange(5, 7)) == [5, 6, 7]
