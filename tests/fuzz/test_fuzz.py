"""No input crashes a decoder: a few of those of ``make fuzz``, and inputs that once did."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path

import pytest
import structlog

import elastic_agent
from elastic_agent import linux
from elastic_agent.agent import identity
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.run_claim import _read
from elastic_agent.config.errors import BadValueError, UsageError, nearest, quoted
from elastic_agent.config.settings import spec_by_name
from elastic_agent.config.sources.base import Layer, Source
from elastic_agent.config.sources.slurm import expand_hosts
from elastic_agent.config.sources.toml_file import _load
from elastic_agent.diagnosis.known_errors import known_error, possible_error
from elastic_agent.rendezvous.backends.c10d.job_files import _run_in
from elastic_agent.workers import facts

from .mutator import Mutator
from .targets import all_targets
from .targets.sockets import _converse, _Loop, _Progress

PACKAGE = Path(elastic_agent.__file__).parent
NESTED = b"[" * 5000
"""Deeper than decoders follow."""

OWN_PROCESSES = {
    "agent/control/socket.py _peer": "the kernel writes it",
    "agent/worker_group/datagrams.py _is_own": "the kernel writes it",
    "doctor/pairs.py _converse": "eight bytes are a number, whatever they are",
    "integrations/collectives/private_names.py Recorders._status": "torch, in this process",
    "integrations/collectives/private_names.py Recorders._entries": "torch, in this process",
    "launch_outcome.py LaunchOutcome.read": "its own agent, in a folder of its own",
    "launcher/agent_process.py _result": "its own workers' results, in a folder of its own; they are pickled",
    "launcher/function.py _call": "its own launcher, in a folder of its own; the function is pickled",
    "workers/guard/warm.py WarmPool._read_one": "its own spawner, over a socket pair",
    "workers/spawner/__main__.py ": "its own guard, as an argument",
    "workers/spawner/preloaded.py _named": "the source of a package that was imported before",
    "workers/spawner/server.py _fork_on_request": "its own guard, over a socket pair",
    "workers/spawner/server.py _stand_by": "its own guard, over a socket pair",
    "workers/spawner/server.py _prepare": "its own guard, in a file that only it can write",
    "transport/peers.py _owner": "the kernel writes it",
    "store_servers.py _end_with_agent": "the kernel writes it",
    "store_servers.py _receive": "its own agent, over a socket pair",
    "transport/c10d/server_process.py StoreServers._receive": "its own process of stores, over a socket pair",
    "transport/c10d/wire.py size_in": "eight bytes of any value: test_tcpstore.py feeds its client other answers",
    "transport/c10d/wire.py number_in": "the same",
}
"""What is decoded but not fuzzed, and by whom it is written: no other process can."""

DECODERS = {"json.loads", "json.load", "tomllib.loads", "ast.parse", "msgspec.json.decode", "pickle.loads"}


def decoding_functions() -> set[str]:
    """Those of the package that decode, as far as their calls show it."""
    found: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        _visit(ast.parse(path.read_bytes()), f"{path.relative_to(PACKAGE)} ", (), found)
    return found


def _visit(node: ast.AST, file: str, inside: tuple[str, ...], found: set[str]) -> None:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and _decodes(child.func):
            found.add(file + ".".join(inside))
        _visit(child, file, (*inside, child.name) if named else inside, found)


def _decodes(function: ast.Attribute) -> bool:
    name = ast.unparse(function)
    of = name.rpartition(".")[0].rpartition(".")[2].partition("[")[0]
    is_decoder = of.upper().endswith(("DECODER", "DECODERS", "_HEADER", "_ENVELOPES", "_ORDERS"))
    return (
        name in DECODERS
        or function.attr in ("unpack", "unpack_from")
        or (function.attr == "decode" and is_decoder)
    )


@pytest.mark.prove
def test_every_decoder_is_fuzzed() -> None:
    targets = all_targets()
    covered = {one for target in targets for one in target.covers}
    for target in targets:
        target.close()
    assert decoding_functions() == covered | set(OWN_PROCESSES), "add a target to tests/fuzz/targets"


def test_valid_inputs_and_damaged_ones_are_decoded_or_refused() -> None:
    """``make fuzz`` feeds more, and also looks at the time and the memory that they take."""
    with structlog.testing.capture_logs():
        for target in all_targets():
            mutator = Mutator(target.samples, target.name)
            damaged = [mutator.next() for _ in range(40)]
            # Very deep sources leave Python's own parser unusable, which pytest needs.
            for data in () if target.name == "script" else (*target.samples, *damaged):
                target.feed(data)
            target.close()


def test_deep_nesting_in_a_file_counts_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "status" / "run" / "n0.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(NESTED)
    (tmp_path / "n0.lock").write_bytes(NESTED)
    assert saved_statuses(tmp_path) == []
    assert _run_in(path) is None
    assert identity._holder(tmp_path, "n0") == ""
    with path.open("rb") as file:
        assert _read(file.fileno()) is None
        assert identity._proven_gone(file.fileno(), 0.0) is None


def test_a_file_that_is_no_utf8_counts_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_bytes(b'{"run_id":"\xff"}')
    assert _run_in(path) is None


@pytest.mark.parametrize("number", ["1e999", "9" * 30])
def test_an_impossible_process_number_is_no_process(number: str, tmp_path: Path) -> None:
    own = {
        "incarnation": "ab",
        "boot": linux.boot_id(),
        "namespace": linux.pid_namespace(),
        "processes": [["P", 1]],
    }
    path = tmp_path / "n0.lock"
    path.write_text(json.dumps(own).replace('"P"', number))
    with path.open("rb") as file:
        assert identity._proven_gone(file.fileno(), 0.0) in (None, "ab")


def test_deep_nesting_in_a_command_or_report_is_refused() -> None:
    loop = _Loop()
    loop.run(_converse(b'{"do":' + NESTED + b"\n"))
    progress = _Progress(loop)
    progress.feed(b'{"unknown":' + NESTED)
    progress.close()
    loop.close()


def test_a_separator_in_the_name_of_a_cgroup_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux, "_read", lambda _: "0::/a\x1eb\u2028c\n".encode())
    assert linux.cgroups() == {"": "/a\x1eb\u2028c"}


def test_too_many_ranges_in_a_host_name_are_refused() -> None:
    with pytest.raises(ValueError, match="ranges"):
        expand_hosts("[1]" * 3000)
    assert expand_hosts("n[" + "9" * 5000 + "-1]") == ["n" + "9" * 5000 + "-1"]


def test_long_values_are_refused() -> None:
    with pytest.raises(BadValueError):
        spec_by_name()["lease_ttl"].kind.parse("9" * 50_000 + "x")
    assert nearest("x" * 70_000, ["nnodes"]) is None
    assert "secret" not in quoted("//a:" * 20_000 + "secret@host")


@pytest.mark.prove
def test_long_values_are_refused_without_delay() -> None:
    begun_s = time.process_time()
    test_long_values_are_refused()
    assert time.process_time() - begun_s < 5  # minutes before


def test_an_impossible_time_in_the_kernel_log_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(b"6,1234," + b"9" * 400 + b",-;Killed process 4711 (python)\n")
    monkeypatch.setattr(facts, "_KERNEL_LOG", str(log))
    monkeypatch.setattr(facts, "_MOST_RECORDS", 1)
    assert list(facts._kernel_messages()) == []


def test_a_number_of_thousands_of_digits_in_a_settings_file_is_a_mistake_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("max_restarts = " + "9" * 5000)
    with pytest.raises(UsageError, match=r"settings\.toml: not valid TOML: .*4300 digits"):
        _load(path, Source(Layer.FILE, "--config"))


def test_a_host_name_that_no_host_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 255 characters"):
        expand_hosts("[1-99999]" + "x" * 70_000)


@pytest.mark.prove
def test_long_lines_in_the_output_of_a_worker_are_understood_without_delay() -> None:
    begun_s = time.process_time()
    for text in ("Rank 2" + "9" * 40_000, "pair.cc:534] " * 4000, "TCPStore.cpp:106] " * 4000):
        known_error(text, text)
        possible_error(text)
    assert time.process_time() - begun_s < 3  # 4 to 15 s before
