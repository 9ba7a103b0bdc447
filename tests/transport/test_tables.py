"""A table: values that programs exchange at the endpoint, beside its runs."""

from __future__ import annotations

from .support import Scene


def test_what_one_program_writes_the_others_read(scene: Scene) -> None:
    one, two = scene.beside(), scene.beside()
    one.put("facts/one", b"old")
    one.put("facts/one", b"new")
    two.put("facts/two", b"other")
    two.put("marks/two", b"elsewhere")
    found = {"facts/one": b"new", "facts/two": b"other"}
    assert one.read_folders("facts/") == two.read_folders("facts/") == found


def test_of_two_proposals_the_first_counts_until_it_is_removed(scene: Scene) -> None:
    one, two = scene.beside(), scene.beside()
    assert one.swap("members/decision", None, b"a b") == b"a b"
    assert two.swap("members/decision", None, b"c d") == b"a b"
    two.put("members/two", b"x")
    one.delete((), "members/")
    assert two.read(["members/decision"]) == two.read_folders("members/") == {}


def test_a_run_does_not_see_them(scene: Scene) -> None:
    scene.joined("a")
    before = scene.coordinator().read(None).members
    table = scene.beside()
    table.put("facts/one", b"x")
    table.delete((), "facts/")
    found = scene.reports().read_run()
    assert (found.snapshot.members, found.reports) == (before, {})


def test_addresses_are_those_on_the_way_to_the_store(scene: Scene) -> None:
    assert scene.beside().local_address == "127.0.0.1"
