"""The host of a store tells agents the secret, by programs that stand in for those of MUNGE."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.transport import Munge, WrongKeyError, c10d
from elastic_agent.transport.c10d.told_secret import ToldSecret

from .support import PATIENCE_S, lease, member
from .test_greeting import served

PROGRAMS = {
    "munge": 'printf %s: "$(id -u)"; exec base64 -w 0',
    "unmunge": 'IFS=: read -r uid payload; printf \'UID: %s\\n\\n\' "$uid"; printf %s "$payload" | base64 -d',
}
"""A credential is the user id and the payload."""


@pytest.fixture
def munge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Munge:
    for name, script in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return Munge.of_this_user()


def test_agents_of_the_hosts_user_learn_the_secret(munge: Munge) -> None:
    hosting, joining = ToldSecret(munge), ToldSecret(munge)
    with served(hosting) as store:
        node = c10d.dial(store.endpoint, "run", PATIENCE_S, joining)
        assert node.register(member("a"), lease("a")) is not None
        assert joining.own() == hosting.own()


def test_another_user_cannot_answer_for_the_host(munge: Munge) -> None:
    with (
        served(ToldSecret(munge)) as store,
        pytest.raises(WrongKeyError, match=f"user {os.getuid()} answers .* expected the user of this agent"),
    ):
        c10d.dial(store.endpoint, "run", PATIENCE_S, ToldSecret(Munge(os.getuid() + 1)))
