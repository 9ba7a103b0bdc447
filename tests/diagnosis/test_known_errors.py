"""Errors that people meet are recognised, as they were reported in issue trackers, and harmless lines are not."""

from __future__ import annotations

import re

import pytest

from elastic_agent.diagnosis.known_errors import (
    CAUSES,
    Case,
    KnownError,
    Nature,
    known_error,
    known_errors,
    possible_error,
)

from .scenes import EXAMPLES, HARMLESS

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, "
ROWS = [*known_errors().values()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_what_its_examples_are_and_nothing_that_is_unlike_it(row: KnownError) -> None:
    assert re.fullmatch(r"[a-z0-9-]{1,64}", row.name)
    for text in EXAMPLES[row.name]["example"]:
        known = known_error(text)
        assert known is not None, text
        assert known.name == row.name, text
        if row.in_output:
            possible = possible_error(f"step 7\n{text}\nstep 8")
            assert possible is not None, text
            assert possible.evidence, text
    for text in EXAMPLES[row.name].get("not_like", ()):
        assert not row.is_in(text), text
    assert set(row.explained_by) <= {*known_errors()}
    assert row.remedy or row.nature not in CAUSES
    assert not row.meaning.endswith(".")
    assert "\n" not in row.meaning + row.remedy
    assert len(row.remedy) < 250


_OTHER_MACHINES = re.compile(r"\b(?:(?:another|other|each|every|all) machines?|the machines)\b")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_other_machines_are_spoken_of_only_if_there_are_any(row: KnownError) -> None:
    for facts in ({}, {"other_environment": "seen"}, {"working_folder": "seen"}, {"address_space": "seen"}):
        said = row.given(facts)
        assert not _OTHER_MACHINES.search(f"{said.meaning} {said.remedy}")


@pytest.mark.parametrize(
    ("facts", "nature", "meaning", "remedy"),
    [
        ({}, Nature.NO_ANSWER, "could not connect to each other", "init_method"),
        ({"other_machines": "1"}, Nature.ENVIRONMENT, "another machine announced", "/etc/hosts"),
    ],
    ids=["one machine", "two machines"],
)
def test_a_loopback_address_is_the_fault_of_another_machine_only_if_there_is_one(
    facts: dict[str, str], nature: Nature, meaning: str, remedy: str
) -> None:
    known = known_error(
        "Gloo connectFullMesh failed with [pair.cc:144] refused, remote=[127.0.0.1]:1", facts=facts
    )
    assert known is not None
    assert known.nature is nature
    assert meaning in known.meaning
    assert remedy in known.remedy


CASES = [(row, case) for row in ROWS for case in row.cases]


@pytest.mark.parametrize(("row", "case"), CASES, ids=[f"{row.name}-{case.given}" for row, case in CASES])
def test_a_row_says_what_is_right_on_a_machine_with_this_observation(row: KnownError, case: Case) -> None:
    for text in EXAMPLES[row.name]["example"]:
        known = known_error(text, facts={case.given: "seen"})
        assert known is not None
        assert known.error is not None
        assert known.name == row.name
        assert known.remedy == (case.remedy or row.remedy)
        assert known.meaning == (case.meaning or row.meaning)
        assert known.error.fact == (case.fact or row.fact)
    assert len(case.remedy) < 250
    assert "\n" not in case.meaning + case.remedy


def test_a_name_is_used_once() -> None:
    text = "".join(f"{row.name}\n" for row in ROWS)
    assert sorted({*text.split()}) == sorted(text.split())
    assert {*text.split()} == EXAMPLES.keys()


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_no_error(line: str) -> None:
    assert possible_error(line) is None
    for row in ROWS:
        if row.explained_by:
            known = known_error(EXAMPLES[row.name]["example"][0], line)
            assert known is not None
            assert (known.name, known.reason) == (row.name, None)


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: boom",
        "ValueError: peer review",
        "train.py: error: unrecognized arguments: --epoch 2",
        "TimeoutError: no batch for 30 s",
        "exited",
        "",
    ],
)
def test_other_errors_are_not_known(text: str) -> None:
    assert known_error(text) is None


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        (f"{GLOO}pair.cc:525] Connection closed by peer [10.0.0.7]:4711. This is", "10.0.0.7"),
        (f"{GLOO}pair.cc:525] Connection closed by peer [::ffff:10.0.0.7]:4711", "10.0.0.7"),
        (f"{GLOO}pair.cc:525] Connection closed by peer [fe80::1%eth0]:4711", "fe80::1%eth0"),
        (f"{NCCL}remote process exited\nLast error:\nsocketProgress: Connection closed by remote peer n2<5>", "n2"),
        (f"{NCCL}unhandled system error\nLast error:\nNet : Call to recv from 10.0.0.8<3> failed : Connection reset",
         "10.0.0.8"),
        (f"{NCCL}internal error\nLast error:\nNet : Connection closed by remote peer n2<4711>", "n2"),
        (f"{NCCL}remote process exited\nLast error:\nNET/IB : Got completion from peer 10.0.0.9<3> with", "10.0.0.9"),
    ],
)  # fmt: skip
def test_the_machine_at_the_other_end_is_read_from_the_error(text: str, peer: str) -> None:
    known = known_error(text)
    assert known is not None
    assert (known.nature, known.peer) == (Nature.PEER, peer)


def test_the_rank_that_missed_a_barrier_is_read_from_the_error() -> None:
    known = known_error("RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors "
                        "while waiting for send/recv from rank 5. Please check rank 5 logs")  # fmt: skip
    assert known is not None
    assert known.rank == 5


def test_a_line_before_a_vague_error_is_a_possible_reason() -> None:
    error = f"{NCCL}unhandled system error, NCCL version 2.21"
    line = "NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9 bytes, error: No space left on device (28)"
    known = known_error(error, f"step 1\n{line}\nstep 2")
    assert known is not None
    assert known.name == "nccl-system"
    assert "docker --shm-size" in known.remedy
    assert known.meaning == f"possibly /dev/shm is too small, as it wrote: {line}"


def test_a_line_before_an_error_that_tells_its_cause_is_none() -> None:
    assert known_error("ValueError: boom", "OSError: [Errno 28] No space left on device") is None
    assert (
        known_error("ValueError: boom\nwandb: Network error (ConnectTimeout), entering retry loop.") is None
    )
