"""Programs that are no part of a run exchange values at its endpoint."""

from __future__ import annotations

from .support import Scene


def test_what_one_program_writes_the_others_read(scene: Scene) -> None:
    one, two = scene.exchange(), scene.exchange()
    one.write("facts", "one", b"old")
    one.write("facts", "one", b"new")
    two.write("facts", "two", b"other")
    two.write("marks", "two", b"elsewhere")
    assert one.read("facts") == two.read("facts") == {"one": b"new", "two": b"other"}


def test_of_two_proposals_the_first_counts_until_it_is_removed(scene: Scene) -> None:
    one, two = scene.exchange(), scene.exchange()
    assert one.decide("members", b"") == b""
    assert one.decide("members", b"a b") == b"a b"
    assert two.decide("members", b"c d") == b"a b"
    assert two.decide("members", b"") == b"a b"
    two.write("members", "two", b"x")
    one.remove("members")
    assert two.decide("members", b"") == b""
    assert dict(two.read("members")) == {}


def test_a_run_does_not_see_them(scene: Scene) -> None:
    scene.joined("a")
    before = scene.coordinator().read(None).members
    link = scene.exchange()
    link.write("facts", "one", b"x")
    link.remove("facts")
    found = scene.reports().read_run()
    assert (found.snapshot.members, found.reports) == (before, {})


def test_addresses_are_those_on_the_way_to_the_store(scene: Scene) -> None:
    assert scene.exchange().local_address == "127.0.0.1"
