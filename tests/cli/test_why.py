"""``elastic-agent why`` on a machine with several runs."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from elastic_agent.cli import status
from elastic_agent.config.errors import UsageError


def test_of_several_runs_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [SimpleNamespace(status=SimpleNamespace(run_id=name)) for name in ("second", "first")]
    monkeypatch.setattr(status, "_find", lambda *_: runs)
    with pytest.raises(UsageError, match=r"\(first, second\); select one with elastic-agent why RUN$"):
        status.why([])
