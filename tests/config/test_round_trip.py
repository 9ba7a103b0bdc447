"""What is shown can be read back: values, and the whole list that ``elastic-agent settings`` prints."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.cli.settings import as_toml
from elastic_agent.config import value_types
from elastic_agent.config.load import load_settings
from elastic_agent.config.settings import Settings, specs
from elastic_agent.config.value_types import Kind
from elastic_agent.config.values import NodeRange, StreamChoice
from elastic_agent.values import Endpoint, PortRange
from tests.config.support import Shell

ports = st.integers(1, 65535)
plain_text = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20)
VALUES: dict[str, tuple[Kind, st.SearchStrategy[object]]] = {
    "nodes": (
        value_types.NODES,
        st.tuples(st.integers(1, 99), st.integers(0, 99)).map(lambda p: NodeRange(p[0], sum(p))),
    ),
    "endpoint": (
        value_types.ENDPOINT,
        st.builds(Endpoint, st.one_of(st.just("node-0"), st.ip_addresses().map(str)), st.integers(0, 65535)),
    ),
    "ports": (value_types.PORT_RANGE, st.tuples(ports, ports).map(lambda p: PortRange(min(p), max(p)))),
    "streams": (
        value_types.STREAMS,
        st.one_of(
            st.integers(0, 3).map(lambda n: StreamChoice(everywhere=n)),
            st.dictionaries(st.integers(0, 999), st.integers(0, 3), min_size=1).map(
                lambda d: StreamChoice(by_rank=tuple(d.items()))
            ),
        ),
    ),
    "ranks": (value_types.RANKS, st.lists(st.integers(0, 999), min_size=1).map(tuple)),
    "filters": (
        value_types.FILTERS,
        st.lists(plain_text.filter(lambda t: "," not in (t[0], t[-1])), min_size=1).map(tuple),
    ),
    "sizes": (
        value_types.SIZE,
        st.just(0) | st.integers(64 * 1024, 2**50) | st.integers(1, 9).map(lambda n: n * 2**30),
    ),
    "seconds": (value_types.seconds(0), st.floats(0, 1e7)),
    "switch": (value_types.SWITCH, st.booleans()),
    "signals": (
        value_types.SIGNALS,
        st.lists(st.sampled_from(["SIGTERM", "SIGUSR1"]), min_size=1, unique=True).map(tuple),
    ),
}


@pytest.mark.parametrize("name", VALUES)
@given(data=st.data())
def test_every_kind_of_value_reads_back_what_it_shows(name: str, data: st.DataObject) -> None:
    kind, values = VALUES[name]
    value = data.draw(values)
    assert kind.parse(kind.show(value)) == value


def test_every_default_reads_back(shell: Shell) -> None:
    for spec in specs():
        if spec.default is not None:
            assert spec.kind.parse(spec.kind.show(spec.kind.parse(spec.default))) == spec.kind.parse(
                spec.default
            )


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
    ["-m", "--log-format", "json", "--role", "träger 'x' \"y\"", "--hang-timeout", "0"],
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
