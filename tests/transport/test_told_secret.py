"""The host of a store tells agents of its own user the secret, through a real MUNGE, and no others."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_agent.transport import Munge, MungeError, Secret, StoreLostError, WrongKeyError, c10d
from elastic_agent.transport.c10d.told_secret import ToldSecret, telling
from elastic_agent.transport.munge import decode
from elastic_agent.values import Endpoint
from tests.munge import STRANGER, MungeDaemon, need_munge

from .support import PATIENCE_S, lease, member, raw_client
from .test_greeting import OURS, served

pytestmark = pytest.mark.prove  # in `make test`: test_told_secret_without_munge.py

ROOT = "elastic-agent/1"


@pytest.fixture(scope="module")
def daemon() -> Iterator[MungeDaemon]:
    need_munge()
    with MungeDaemon() as running:
        yield running


@pytest.fixture(autouse=True)
def munge(daemon: MungeDaemon, monkeypatch: pytest.MonkeyPatch) -> Munge:
    monkeypatch.setenv("PATH", daemon.path())
    return Munge.of_this_user()


def registers(secret: ToldSecret, endpoint: Endpoint, name: str) -> c10d.C10dLink:
    link = c10d.dial(endpoint, "run", PATIENCE_S, secret)
    assert link.register(member(name), lease(name)) is not None
    return link


@contextmanager
def served_by_no_one() -> Iterator[Endpoint]:
    """A store whose inbox is not read."""
    host = c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S)
    assert host is not None
    try:
        yield Endpoint("127.0.0.1", host.port)
    finally:
        host.close()


class Impostor:
    """Answers questions for the secret itself, at a store whose host does not."""

    def __init__(self, endpoint: Endpoint, daemon: MungeDaemon, user: int | None) -> None:
        raw_client(endpoint).set(f"{ROOT}/key", "munge")
        self._client = raw_client(endpoint)
        self._environ = {**os.environ, "PATH": daemon.path(user)}
        self._thread = threading.Thread(target=self._answer)
        self._thread.start()
        self.name = ""

    def _answer(self) -> None:
        self.name = self._client.queue_pop(f"{ROOT}/inbox").decode().removeprefix("! ")
        self._client.set(f"{ROOT}/told/{self.name}", self.credential())

    def credential(self) -> bytes:
        payload = telling(self.name, Secret((b"0" * 64,)))
        command = ["munge", f"--restrict-uid={os.getuid()}"]
        return subprocess.run(
            command, input=payload, env=self._environ, capture_output=True, check=True
        ).stdout

    def end(self) -> None:
        self._thread.join(PATIENCE_S)


def test_agents_of_the_hosts_user_learn_the_secret(munge: Munge) -> None:
    hosting, joining = ToldSecret(munge), ToldSecret(munge)
    with served(hosting) as store:
        registers(hosting, store.endpoint, "a")
        node = registers(joining, store.endpoint, "b")
        assert joining.own() == hosting.own()
        assert node.read_lease("a") == lease("a")
        c10d.dial_reports(store.endpoint, "run", PATIENCE_S, ToldSecret(munge)).write_report("a", b"{}")
        assert (
            c10d.agree_run_id(store.endpoint, "job", "proposal", PATIENCE_S, ToldSecret(munge)) == "proposal"
        )
        c10d.release_run_id(store.endpoint, "job", "proposal", PATIENCE_S, ToldSecret(munge))


def test_a_later_store_is_asked_again_and_an_agent_that_hosts_it_keeps_its_secret(munge: Munge) -> None:
    secret, other = ToldSecret(munge), ToldSecret(munge)
    with served(ToldSecret(munge)) as store:
        registers(secret, store.endpoint, "a")
        registers(other, store.endpoint, "b")
    before = secret.own()
    with served(secret) as store:  # it takes over: nothing is to be told to those that know it
        assert registers(other, store.endpoint, "b").read_lease("b") == lease("b")
        assert secret.own() == before == other.own()
    with served(ToldSecret(munge)) as store:  # a program that was not part of the run
        registers(secret, store.endpoint, "a")
        assert secret.own() != before


def test_questions_leave_nothing_behind(munge: Munge) -> None:
    with served(ToldSecret(munge)) as store:
        before = raw_client(store.endpoint).num_keys()
        for _ in range(3):
            c10d.dial(store.endpoint, "run", PATIENCE_S, ToldSecret(munge)).close()
        keys_of_a_run = 1  # its life
        assert raw_client(store.endpoint).num_keys() <= before + keys_of_a_run + 1  # the inbox


def test_another_user_cannot_learn_the_secret(munge: Munge, daemon: MungeDaemon) -> None:
    credential = munge.encode(b"for this user")
    reading = {**os.environ, "PATH": daemon.path(STRANGER)}
    done = subprocess.run(["unmunge"], input=credential, env=reading, capture_output=True, check=False)
    assert done.returncode == 18
    assert b"for this user" not in done.stdout
    assert decode(credential) == (os.getuid(), b"for this user")


def test_another_user_cannot_answer_for_the_host(munge: Munge, daemon: MungeDaemon) -> None:
    with served_by_no_one() as endpoint:
        impostor = Impostor(endpoint, daemon, STRANGER)
        with pytest.raises(
            WrongKeyError, match=f"user {STRANGER} answers .* expected the user of this agent"
        ):
            c10d.dial(endpoint, "run", PATIENCE_S, ToldSecret(munge))
        impostor.end()


def test_the_answer_to_another_question_is_not_accepted(munge: Munge, daemon: MungeDaemon) -> None:
    """As another program of the store could record it, or have it made by another store of this user."""

    class Replayer(Impostor):
        def credential(self) -> bytes:
            self.name = "0" * 32
            return super().credential()

    with served_by_no_one() as endpoint:
        impostor = Replayer(endpoint, daemon, None)
        impostor.name = "0" * 32
        with pytest.raises(StoreLostError, match="was disturbed by another program"):
            c10d.dial(endpoint, "run", PATIENCE_S, ToldSecret(munge))
        impostor.end()


@pytest.mark.parametrize(("theirs", "words"), [(None, "was started without"), (OURS, "was started without")])
def test_an_agent_does_not_use_a_store_without_munge(munge: Munge, theirs: Secret | None, words: str) -> None:
    with (
        served(theirs) as store,
        pytest.raises(WrongKeyError, match=f"{words} --secret-source munge, which this"),
    ):
        c10d.dial(store.endpoint, "run", PATIENCE_S, ToldSecret(munge))


@pytest.mark.parametrize("ours", [None, OURS])
def test_agents_without_munge_are_told_what_the_store_wants(munge: Munge, ours: Secret | None) -> None:
    with (
        served(ToldSecret(munge)) as store,
        pytest.raises(WrongKeyError, match="the same --secret-source munge"),
    ):
        c10d.dial(store.endpoint, "run", PATIENCE_S, ours)


def test_a_munge_that_is_missing_or_does_not_run_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("programs")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(MungeError, match=r"cannot start munge on this machine: No such file .*package munge"):
        Munge.of_this_user()
    program = folder / "munge"
    program.write_text('#!/bin/sh\nexec /usr/bin/munge --socket=/nonexistent/socket "$@"\n')
    program.chmod(0o755)
    with pytest.raises(
        MungeError, match=r"Did you start munged\?.* \(exit code 6\); expected a running munged"
    ):
        Munge.of_this_user()
