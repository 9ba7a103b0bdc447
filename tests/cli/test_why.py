"""``elastic-agent why`` on a machine with several runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_agent.cli import status
from elastic_agent.config.errors import UsageError
from elastic_agent.monitoring.status import GenerationStatus, RunStatus


def test_of_several_runs_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [SimpleNamespace(status=SimpleNamespace(run_id=name)) for name in ("second", "first")]
    monkeypatch.setattr(status, "_find", lambda *_: runs)
    with pytest.raises(UsageError, match=r"\(first, second\); select one with elastic-agent why RUN$"):
        status.why([])


def test_a_generation_that_nobody_failed_says_why_it_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As when the store was lost: an older failure alone would be taken for the reason."""
    failed = GenerationStatus(
        1, 0.0, 1.0, end="killed", cause="root cause: killed", failed=True, stacks="worker n1/0: in train"
    )
    lost = GenerationStatus(2, 1.0, 2.0, end="the store was lost together with lab1", failed=True)
    grown = GenerationStatus(3, 2.0, 3.0, end="lab3 joins")
    run = RunStatus(
        "train", "lab1:29400", 9.0, generation=4, generations=(failed, lost, grown), problem="no answer"
    )
    monkeypatch.setattr(status, "_find", lambda *_: [status.Found(run, is_saved=False)])
    assert status.why([]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "generation 1: root cause: killed",
        "where the workers were:",
        "worker n1/0: in train",
        "",
        "generation 2: the store was lost together with lab1",
        "",
        "the store at lab1:29400 cannot be read (no answer); this is what was known before",
    ]


def test_of_generations_that_this_machine_has_not_seen_why_does_not_say_that_none_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = GenerationStatus(3, 1.0, nodes=("lab1", "lab3"), began_earlier=True)
    run = RunStatus("train", "lab1:29400", 9.0, generation=3, generations=(running,), node_id="lab3")
    monkeypatch.setattr(status, "_find", lambda *_: [status.Found(run, is_saved=False)])
    assert status.why([]) == 0
    assert capsys.readouterr().out == (
        "run train: no generation has failed, as far as is known on this machine, which knows none before "
        "generation 3; run this command on lab1\n"
    )
