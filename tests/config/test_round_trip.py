"""The output of ``elastic-agent settings`` can be read back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic_agent.cli.settings import as_toml
from elastic_agent.config.load import load_settings
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
