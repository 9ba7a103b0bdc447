"""How a worker ends: the same code and the same output, byte by byte, as under ``python -u``."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from .launchers import BARE, GUARDED_WARM, LAUNCHERS, SCRIPTS, Job, Outcome, functions_of, run_everywhere

ENDINGS = SCRIPTS / "endings.py"
GOOD = functions_of(ENDINGS, "succeeds")
BAD = functions_of(ENDINGS, "fails")

SAID_OTHERWISE = {
    # Documented: faulthandler writes the stacks when native code crashes.
    "aborts": re.compile(
        rb"^Fatal Python error: .*\n(?:\n|(?:Current thread|Thread) 0x.*\n|  File .*\n|Extension modules: .*\n)*",
        re.MULTILINE,
    ),
    # What stands above the module may be named by a warning about its caller: by bare Python as "sys:1".
    "warns": re.compile(rb"^\S+:\d+: (?=UserWarning: of its caller)|^  .*\n", re.MULTILINE),
}
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")
PID = re.compile(rb"\d+_$", re.MULTILINE)

Outcomes = dict[str, Outcome]
Place = tuple[int, int]
"""Attempt and slot."""


def plain(name: str, output: bytes) -> bytes:
    """Output without what is never the same twice."""
    if name in SAID_OTHERWISE:
        output = SAID_OTHERWISE[name].sub(b"", output)
    return PID.sub(b"(pid)", ADDRESS.sub(b"(address)", output))


def compare(outcomes: Outcomes, launcher: str, name: str, place: Place, folder: Path | None = None) -> None:
    """`folder`: its name is left out of the output, as are times."""
    ended, expected = outcomes[launcher].worker(*place), outcomes[BARE.name].worker(*place)
    for stream in ("stdout", "stderr"):
        seen, wanted = (plain(name, getattr(worker, stream)) for worker in (ended, expected))
        if folder is not None:
            seen, wanted = (
                TIMES.sub(b"", output).replace(bytes(folder / by), b"")
                for output, by in ((seen, launcher), (wanted, BARE.name))
            )
        assert seen.decode(errors="replace") == wanted.decode(errors="replace"), f"{name}: {stream}"
    assert ended.code == expected.code, f"{name}: code {ended.code}, under python -u {expected.code}"


def compare_all(outcomes: Outcomes, launcher: str, places: dict[str, Place]) -> None:
    for name, place in places.items():
        expected = outcomes[BARE.name].worker(*place)
        assert (expected.code == 0) == (name in GOOD), f"{name}: {expected}"
        compare(outcomes, launcher, name, place)


def test_workers_end_as_under_plain_python(tmp_path: Path) -> None:
    """Each ending is that of a worker of its own; all run at once."""
    names = [*GOOD, *BAD]
    job = Job("endings.py", ("slots:" + ",".join(names),), slots=len(names))
    outcomes = run_everywhere(job, tmp_path, [BARE, GUARDED_WARM])
    compare_all(outcomes, GUARDED_WARM.name, {name: (0, slot) for slot, name in enumerate(names)})


@pytest.mark.prove
@pytest.mark.parametrize("succeeds", [True, False])
def test_workers_of_an_agent_end_as_under_plain_python(succeeds: bool, tmp_path: Path) -> None:
    """One that fails is that of an attempt; the last attempt succeeds."""
    if succeeds:
        job = Job("endings.py", ("slots:" + ",".join(GOOD),), slots=len(GOOD))
        places = {name: (0, slot) for slot, name in enumerate(GOOD)}
    else:
        job = Job("endings.py", ("attempts:" + ",".join([*BAD, GOOD[0]]),), restarts=len(BAD))
        places = {name: (attempt, 0) for attempt, name in enumerate(BAD)}
    outcomes = run_everywhere(job, tmp_path)
    for launcher in LAUNCHERS:
        compare_all(outcomes, launcher.name, places)


TRAINED = ("falls_off_the_end", "exits_with_3", "raises", "is_terminated", "exits_at_once")
TIMES = re.compile(rb"'train_runtime': .*|\d+\.\d+s|/\S*/warnings\.py")


@pytest.mark.parametrize(
    ("framework", "endings"),
    [
        ("torch", ("raises",)),
        *(pytest.param(framework, TRAINED, marks=pytest.mark.prove) for framework in ("torch", "lightning")),
    ],
)
def test_workers_that_have_trained_end_as_under_plain_python(
    framework: str, endings: tuple[str, ...], tmp_path: Path
) -> None:
    """With triton, which torch imports when the first optimizer is made: what is left of it is told at the end."""
    names = ",".join(f"{framework}.{ending}" for ending in endings)
    job = Job("trained_endings.py", (names,), slots=len(endings))
    outcomes = run_everywhere(job, tmp_path, [BARE, GUARDED_WARM])
    for slot, ending in enumerate(endings):
        assert b"trained" in outcomes[BARE.name].worker(0, slot).stdout
        compare(outcomes, GUARDED_WARM.name, ending, (0, slot), tmp_path)


@pytest.mark.parametrize("imports", ["nothing", "torch"])
def test_an_interrupt_while_a_worker_ends_leaves_what_it_leaves_under_plain_python(
    imports: str, tmp_path: Path
) -> None:
    """As Ctrl-C at a terminal does: preloaded modules that are being destroyed then are not told of."""
    outcomes = run_everywhere(Job("interrupted_at_exit.py", (imports,)), tmp_path, [BARE, GUARDED_WARM])
    assert outcomes[BARE.name].worker(0, 0).stdout == b"ends\n"
    compare(outcomes, GUARDED_WARM.name, imports, (0, 0))


def test_triton_is_there() -> None:
    """Builds of torch for GPUs come with it; it works without one."""
    assert find_spec("triton") is not None
