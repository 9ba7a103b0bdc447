"""Inputs that once crashed a decoder, or kept it busy for minutes."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

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

from .test_sockets import converse, report, run_loudly

NESTED = b"[" * 5000
"""Deeper than decoders follow."""


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
    run_loudly(converse(b'{"do":' + NESTED + b"\n"))
    run_loudly(report(b'{"unknown":' + NESTED))


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
