"""Clients and the coordinator prove to each other that they have the secret; no recording of it is accepted."""

from __future__ import annotations

import itertools
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from structlog.testing import capture_logs

from elastic_agent.transport import Secret, StoreLostError, WrongKeyError, c10d
from elastic_agent.transport.c10d import greeting
from elastic_agent.transport.c10d.greeting import greeted
from elastic_agent.values import Endpoint
from tests.waiting import wait_for

from .support import PATIENCE_S, lease, member, raw_client

OURS, THEIRS = Secret((b"ours",)), Secret((b"theirs",))


@dataclass
class Store:
    host: c10d.C10dHost
    endpoint: Endpoint

    def dial(self, secret: Secret | None = OURS) -> c10d.C10dLink:
        return c10d.dial(self.endpoint, "run", PATIENCE_S, secret)

    def coordinator(self) -> c10d.C10dCoordinatorLink:
        return self.host.coordinator_link("run")


@contextmanager
def served(secret: Secret | None) -> Iterator[Store]:
    """A store whose inbox is read, as a coordinator does."""
    host = c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S, secret)
    assert host is not None
    inbox, ended = host.inbox(), threading.Event()

    def answer() -> None:
        while not ended.is_set():
            inbox.wait(0.1)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield Store(host, Endpoint("127.0.0.1", host.port))
    finally:
        ended.set()
        thread.join(PATIENCE_S)
        host.close()


def test_clients_with_the_secret_read_each_others_records() -> None:
    with served(OURS) as store:
        node = store.dial()
        assert node.register(member("a"), lease("a")) is not None
        assert list(store.coordinator().read(None).members) == ["a"]
        assert store.dial().read_lease("a") == lease("a")


def test_a_rotation_in_three_steps_keeps_nodes_together() -> None:
    steps = (OURS, Secret((*OURS.values, *THEIRS.values)), Secret((*THEIRS.values, *OURS.values)), THEIRS)
    for before, after in itertools.pairwise(steps):
        for hosting in (before, after):
            with served(hosting) as store:
                for name, secret in (("a", before), ("b", after)):
                    assert store.dial(secret).register(member(name), lease(name)) is not None
                coordinator = store.coordinator()
                assert list(coordinator.read(None).members) == ["a", "b"]
                for name in ("a", "b"):  # what either of them has written can be replaced
                    assert coordinator.revoke(lease(name))
                    assert coordinator.read([name]).leases[name].revoked


@pytest.mark.parametrize(
    ("theirs", "ours", "words"),
    [
        (OURS, None, f"accepts only agents with its secret (key id {OURS.ids[0]})"),
        (OURS, THEIRS, f"has another secret (key id {OURS.ids[0]}) than this agent (key id {THEIRS.ids[0]})"),
        (None, OURS, f"was started without a secret, and this agent has one (key id {OURS.ids[0]})"),
    ],
)
def test_a_wrong_missing_or_unexpected_secret_is_named(
    theirs: Secret | None, ours: Secret | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(greeting, "NO_KEY_ANSWER_S", 0.1)
    with served(theirs) as store:
        for dial in (
            lambda: store.dial(ours),
            lambda: c10d.dial_reports(store.endpoint, "run", PATIENCE_S, ours),
            lambda: c10d.agree_run_id(store.endpoint, "job", "proposal", PATIENCE_S, ours),
        ):
            with pytest.raises(WrongKeyError) as caught:
                dial()
            assert words in str(caught.value)


def test_the_host_says_which_machine_an_agent_without_the_secret_is_on(
    monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(greeting, "NO_KEY_ANSWER_S", 0.1)
    agents = (("lab2", None), ("lab2", None), ("lab3.example", THEIRS), ("an odd\x1b[31m name", None))
    with served(OURS) as store:
        for machine, secret in agents:
            monkeypatch.setattr(platform, "node", lambda name=machine: name)
            with pytest.raises(WrongKeyError):
                store.dial(secret)
        other = raw_client(store.endpoint)
        for hint in ("- ", "- two words", "- \x1b[31m", f"- {'x' * 1000}", "- last"):
            push(other, hint)
        wait_for("the last hint", lambda: any(" on last:" in line for line in refused(logged)))
    told = [line.partition(": ")[0].removeprefix("refused an agent on ") for line in refused(logged)]
    assert told == ["lab2", "lab3.example", "an-odd--31m-name", "x" * 64, "last"]
    assert "has no secret; start it with the secret of this run (--secret-file)" in refused(logged)[0]
    assert "another secret" in refused(logged)[1]


def test_a_host_without_a_secret_says_which_machine_an_agent_with_one_is_on(
    monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    monkeypatch.setattr(greeting, "NO_KEY_ANSWER_S", 0.1)
    monkeypatch.setattr(platform, "node", lambda: "lab2")
    with served(None) as store:
        for _ in range(2):
            with pytest.raises(WrongKeyError):
                store.dial(OURS)
        push(raw_client(store.endpoint), f"? {'0' * 32}.last")
        wait_for("the last hint", lambda: any(" on last:" in line for line in refused(logged)))
    words = "it has a secret, and this store has none; start every agent with the same --secret-file, or none"
    assert refused(logged) == [f"refused an agent on {name}: {words}" for name in ("lab2", "last")]
    assert not [one for one in logged if "invalid record" in one["event"]]


def test_the_host_repeats_once_a_minute_that_an_agent_was_refused(logged: list[Any]) -> None:
    doorkeeper, begun_s = greeting.Doorkeeper(OURS), 1000.0
    for later_s in (0, 1, greeting.TOLD_EVERY_S - 1):
        doorkeeper.refused(b"- lab2", begun_s + later_s)
    assert len(refused(logged)) == 1
    doorkeeper.refused(b"- lab2", begun_s + greeting.TOLD_EVERY_S)
    assert len(refused(logged)) == 2
    for number in range(1000):
        doorkeeper.refused(b"- n%d" % number, begun_s)
    assert len(refused(logged)) < 200, "whoever reaches the store cannot fill the log"


def push(client: Any, hint: str) -> None:
    """Put a hint into the coordinator's inbox, as any client of the store can."""
    client.queue_push("elastic-agent/1/inbox", hint)


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


def refused(logged: list[Any]) -> list[str]:
    """Return what the host said of agents that it refused."""
    return [one["event"] for one in logged if one["event"].startswith("refused an agent on")]


def test_a_false_hint_does_not_keep_a_client_with_the_secret_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "NO_KEY_ANSWER_S", PATIENCE_S)
    with served(OURS) as store:
        raw_client(store.endpoint).set("elastic-agent/1/key", THEIRS.ids[0])
        assert store.dial().register(member("a"), lease("a")) is not None


def test_a_recorded_answer_is_not_accepted() -> None:
    with served(OURS) as store:
        client, _, _ = c10d.open_store(store.endpoint, PATIENCE_S)
        recorded: list[bytes] = []
        stranger = raw_client(store.endpoint)

        class Recorder(c10d.StoreClient):
            def wait(self, key: str, timeout_s: float) -> bool:
                there = client.wait(key, timeout_s)
                recorded.append(stranger.get(key))
                return there

        spied = client.storing(client._records)
        spied.__class__ = Recorder
        greeted(spied, store.endpoint, "run", OURS)

        class Replayer(c10d.StoreClient):
            def wait(self, key: str, timeout_s: float) -> bool:
                there = client.wait(key, timeout_s)  # the coordinator's answer does not come later
                stranger.set(key, recorded[0])
                return there

        fooled = client.storing(client._records)
        fooled.__class__ = Replayer
        with pytest.raises(StoreLostError, match="disturbed by another program"):  # it dials again
            greeted(fooled, store.endpoint, "run", OURS)


def test_records_of_an_earlier_life_of_the_run_count_no_more() -> None:
    with served(OURS) as store:
        node, coordinator = store.dial(), store.coordinator()
        assert node.register(member("a"), lease("a")) is not None
        stranger = raw_client(store.endpoint)
        keys = [f"elastic-agent/1/r/run/{kind}/a" for kind in "ml"]
        recorded = [stranger.get(key) for key in keys]
        coordinator.read(None)
        assert coordinator.remove_run()

        again = store.dial()
        assert again.register(member("b"), lease("b")) is not None
        for key, data in zip(keys, recorded, strict=True):
            stranger.set(key, data)
        stranger.append("elastic-agent/1/r/run/roster", "\na\n")
        snapshot = store.coordinator().read(None)
        assert list(snapshot.members) == ["b"]
        assert any("an earlier run" in one for one in snapshot.rejected)
        with pytest.raises(StoreLostError):
            node.register(member("c"), lease("c"))


def test_a_forgotten_node_does_not_come_back_with_its_recorded_records() -> None:
    with served(OURS) as store:
        assert store.dial().register(member("a"), lease("a")) is not None
        coordinator, stranger = store.coordinator(), raw_client(store.endpoint)
        keys = [f"elastic-agent/1/r/run/{kind}/a" for kind in "ml"]
        recorded = [stranger.get(key) for key in keys]
        assert list(coordinator.read(None).members) == ["a"]
        coordinator.forget("a")
        for key, data in zip(keys, recorded, strict=True):
            stranger.set(key, data)
        for one in (coordinator, store.coordinator()):
            assert not one.read(["a"]).members


def test_earlier_leases_that_are_written_back_do_not_count() -> None:
    with served(OURS) as store:
        node, coordinator, stranger = store.dial(), store.coordinator(), raw_client(store.endpoint)
        first = node.register(member("a"), lease("a"))
        assert first is not None
        key = "elastic-agent/1/r/run/l/a"
        recorded = stranger.get(key)
        assert node.renew(first, first.renewed())
        newest = stranger.get(key)
        assert coordinator.read(None).leases["a"] == first.renewed()
        stranger.set(key, recorded)
        assert "a" not in coordinator.read_leases()
        assert "a" not in coordinator.read(["a"]).leases
        assert not coordinator.revoke(first.renewed())
        stranger.set(key, newest)
        assert coordinator.read_leases() == {"a": first.renewed()}, "nothing was renewed"
        assert coordinator.revoke(first.renewed())
        stranger.set(key, newest)
        assert "a" not in coordinator.read_leases(), "it stays revoked"


def test_a_revocation_is_final_also_for_renewals_that_the_coordinator_never_saw() -> None:
    with served(OURS) as store:
        node, coordinator, stranger = store.dial(), store.coordinator(), raw_client(store.endpoint)
        first = node.register(member("a"), lease("a"))
        assert first is not None
        assert coordinator.read(None).leases["a"] == first
        key = "elastic-agent/1/r/run/l/a"
        recorded = stranger.get(key)
        assert node.renew(first, first.renewed())
        renewed = stranger.get(key)
        stranger.set(key, recorded)
        assert coordinator.revoke(first)
        stranger.set(key, renewed)
        assert "a" not in coordinator.read_leases()


def test_a_new_connection_does_not_go_on_from_an_earlier_record() -> None:
    """Else its records would have numbers that were there before, and could be replaced by those."""
    with served(OURS) as store:
        numbers, stranger, key = c10d.Numbers(), raw_client(store.endpoint), "elastic-agent/1/r/run/m/a"

        def dial() -> c10d.C10dLink:
            return c10d.dial(store.endpoint, "run", PATIENCE_S, OURS, numbers)

        node = dial()
        assert node.register(member("a"), lease("a")) is not None
        coordinator = store.coordinator()
        earlier = stranger.get(key)
        for slots in (3, 4):
            node.write(member("a", slots=slots))
        stranger.set(key, earlier)
        dial().write(member("a", slots=5))
        assert coordinator.read(None).members["a"].slots == 5
        stranger.set(key, earlier)
        assert coordinator.read(None).members == {}


@pytest.mark.parametrize("left", ["earlier", "garbage", "nothing"])
def test_a_node_registers_again_over_what_another_client_made_of_its_lease(left: str) -> None:
    with served(OURS) as store:
        numbers, stranger, key = c10d.Numbers(), raw_client(store.endpoint), "elastic-agent/1/r/run/l/a"
        node = c10d.dial(store.endpoint, "run", PATIENCE_S, OURS, numbers)
        held = node.register(member("a"), lease("a"))
        assert held is not None
        coordinator, earlier = store.coordinator(), stranger.get(key)
        assert node.renew(held, held.renewed())
        assert coordinator.read(None).leases["a"] == held.renewed()
        if left == "nothing":
            stranger.delete_key(key)
        else:
            stranger.set(key, earlier if left == "earlier" else b"garbage")
        again = c10d.dial(store.endpoint, "run", PATIENCE_S, OURS, numbers).register(member("a"), lease("a"))
        assert again is not None
        assert again.beat > held.renewed().beat
        assert coordinator.read_leases() == {"a": again}


def test_the_run_of_a_job_cannot_be_chosen_by_others() -> None:
    with served(OURS) as store:
        stranger = raw_client(store.endpoint)

        def agree(proposal: str) -> str:
            return c10d.agree_run_id(store.endpoint, "job", proposal, PATIENCE_S, OURS)

        assert agree("first") == "first"
        stranger.set("elastic-agent/1/default/job", "mallorys")
        assert agree("second") == "first"
        stranger.delete_key("elastic-agent/1/default/job")
        assert agree("third") == "first"
        c10d.release_run_id(store.endpoint, "job", "another", PATIENCE_S, OURS)
        assert agree("fourth") == "first"
        c10d.release_run_id(store.endpoint, "job", "first", PATIENCE_S, OURS)
        assert agree("fifth") == "fifth"
        assert store.host.coordinator_link("fifth").remove_run()
        assert agree("sixth") == "sixth", "the records of the run before were removed"


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    host = c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S, OURS)
    assert host is not None
    endpoint = Endpoint("127.0.0.1", host.port)
    client, _, _ = c10d.open_store(endpoint, PATIENCE_S)
    with pytest.raises(StoreLostError, match="did not answer"):
        greeted(client, endpoint, "run", OURS, answer_s=0.2)
    host.close()


def test_greetings_do_not_wait_for_a_coordinator_that_is_busy_with_a_run() -> None:
    host = c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S, OURS)
    assert host is not None
    host.inbox().wait(0.01)  # and now its thread waits for a disk
    assert c10d.dial(Endpoint("127.0.0.1", host.port), "run", PATIENCE_S, OURS).register(
        member("a"), lease("a")
    )
    host.close()


def test_greetings_leave_nothing_behind() -> None:
    with served(OURS) as store:
        before = raw_client(store.endpoint).num_keys()
        for _ in range(5):
            store.dial().close()
        keys_of_a_run = 1  # its life
        assert raw_client(store.endpoint).num_keys() <= before + keys_of_a_run + 1  # the inbox
