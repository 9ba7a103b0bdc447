"""Records are sealed with a secret: what is accepted, and what is recognised as written by others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.transport import Seal, Secret, Unverified
from elastic_agent.transport.sealing import verified

OLD, NEW, OTHER = (Secret((name,)) for name in (b"the old secret", b"the new secret", b"another one"))
ROTATING = Secret((b"the new secret", b"the old secret"))
SEAL = OLD.seal(b"epoch")
PATH = "elastic-agent/1/r/run/l/a"


def why(seal: Seal, path: str, data: bytes) -> str:
    record = seal.open(path, data)
    assert isinstance(record, Unverified), "accepted"
    assert record.raw == data
    assert verified(record) == b""
    return record.why


@given(st.text(max_size=40), st.binary(max_size=200), st.integers(0, 2**63))
def test_what_was_sealed_is_opened(path: str, record: bytes, number: int) -> None:
    assert SEAL.open_numbered(path, SEAL.close(path, record, number)) == (record, number)
    assert SEAL.close(path, record, number) == SEAL.close(path, record, number), "for compare-and-set"


@given(st.binary(max_size=60), st.data())
def test_no_changed_byte_is_accepted(record: bytes, data: st.DataObject) -> None:
    made = SEAL.close(PATH, record, 3)
    place = data.draw(st.integers(0, len(made) - 1))
    changed = bytes([*made[:place], made[place] ^ data.draw(st.integers(1, 255)), *made[place + 1 :]])
    assert isinstance(SEAL.open(PATH, changed), Unverified)
    assert isinstance(SEAL.open(PATH, made[:place]), Unverified), "cut"


@given(st.text(max_size=30), st.text(max_size=30), st.binary(max_size=30))
def test_a_record_counts_only_under_the_key_it_was_written_to(path: str, other: str, record: bytes) -> None:
    opened = SEAL.open(other, SEAL.close(path, record))
    assert isinstance(opened, Unverified) == (path != other)


def test_path_and_record_cannot_be_shifted_into_each_other() -> None:
    made = SEAL.close("a/b", b"c")
    assert isinstance(SEAL.open("a/", made[:-1] + b"bc"), Unverified)


def test_records_of_another_epoch_are_refused() -> None:
    assert "an earlier run" in why(OLD.seal(b"next epoch"), PATH, SEAL.close(PATH, b"record"))


def test_the_reason_names_what_differs() -> None:
    assert why(SEAL, PATH, b'{"a": 1}') == "it is not authenticated"
    assert OTHER.ids[0] in why(SEAL, PATH, OTHER.seal(b"epoch").close(PATH, b"record"))


def test_during_a_rotation_both_secrets_are_accepted_and_the_first_one_seals() -> None:
    rotating, new = ROTATING.seal(b"epoch"), NEW.seal(b"epoch")
    assert rotating.open(PATH, SEAL.close(PATH, b"record")) == b"record"
    assert new.open(PATH, rotating.close(PATH, b"record")) == b"record"
    assert ROTATING.ids == (*NEW.ids, *OLD.ids)


def test_what_does_not_verify_is_no_record_and_shows_no_secret() -> None:
    opened = SEAL.open(PATH, b'{"ttl_s": 5}')
    assert opened != b'{"ttl_s": 5}'
    assert not opened.startswith(b"{")
    assert "secret" not in repr(OLD).replace("Secret(", "")
