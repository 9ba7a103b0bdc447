"""Workers that fail or hang: one job for all of them, in which each generation fails in another way."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .stage import FAULTY, Words, last_lines, plain, staged

CULPRIT = r"worker b/1 \(rank 3\)"
LINE = r'faulty\.py(?:", line |:)\d+'
"""Of a bug in the script, the remedy is to know the line, from the traceback or the root cause."""


@dataclass(frozen=True)
class Kind:
    """One way to fail: its name in the script, what it is, and what is shown."""

    kind: str
    name: str
    cause: str
    remedy: str
    machine: str = f"{CULPRIT} on host-b"


FAILING = (
    Kind("exception", "an exception in the script", "expected 128 features", LINE),
    Kind("exit-3", "sys.exit(3)", "exited with code 3", "elastic-agent logs b/1"),
    Kind("exit-0", "a worker leaves early with code 0", "exited with code 0 while other workers", "same number of batches"),
    Kind("sigkill", "SIGKILL to a worker", "was killed by SIGKILL", "dmesg"),
    Kind("sigsegv", "a crash in native code", "was killed by SIGSEGV", "stack"),
    Kind("sigabrt", "an abort in native code", "was killed by SIGABRT", "remedy|elastic-agent logs b/1"),
    Kind("sigterm", "SIGTERM to a worker", "was terminated by SIGTERM", "to the agent"),
    Kind("disk-full", "a disk is full", r"No space left on device", "free space on that disk"),
    Kind("not-shared", "checkpoints are not shared", "No such file .*only-on-a", "storage that every machine mounts"),
    Kind("other-size", "tensors of different sizes in a collective", r"(?:called (?:all_reduce of|another collective)|op\.preamble).* \(?at faulty\.py:\d+",
         "same sequence of collectives"),
    Kind("atexit", "another error while Python exits", "KeyError: 'labels'", LINE),
    Kind("loader-exception", "an exception in a data loader", "cannot identify image file", LINE),
    Kind("shm", "/dev/shm is too small", "/dev/shm is too small", "--shm-size"),
    Kind("port-taken", "a store on a port that is in use", "another process listens on the port", "ss -ltnp"),
    Kind("nccl", "NCCL without a GPU", "no GPU can be used", "use the gloo backend", r"worker [ab]/\d .*on host-[ab]"),
    Kind("gloo-interface", "GLOO_SOCKET_IFNAME names no interface", "names no interface of this machine", "ip -br address"),
)  # fmt: skip

HANGING = (
    Kind("gloo-timeout", "a rank is later than gloo's time-out", "is one all_reduce behind", r"it is at faulty.py:\d+", CULPRIT),
    Kind("elsewhere", "a rank hangs outside of the collective", "is one all_reduce behind", r"it is at faulty.py:\d+", CULPRIT),
    Kind("sigstop", "SIGSTOP to a worker", "is stopped by a signal", r"kill -CONT \d+ on b", CULPRIT),
    Kind("other-collective", "different collectives", "called broadcast", "same collectives in the same order", CULPRIT),
    Kind("uneven", "a batch less on a rank", "called barrier", "uneven numbers of batches", CULPRIT),
    Kind("deadlocked-loader", "a deadlocked data loader", "waits for its data loader", r"at faulty.py:\d+", CULPRIT),
)  # fmt: skip

HARMLESS = Path(__file__).parents[1] / "diagnosis" / "harmless.txt"

ON_B = """
mount -t tmpfs -o size=64k tmpfs $SCREEN_FOLDER/small
mount -t tmpfs -o size=8m tmpfs /dev/shm"""


def lacking(kinds: Sequence[Kind], folder: Path, patience_s: float, *, noisy: bool = False) -> list[str]:
    """Run the job to its end; return the terminals on which a failure is not explained, with its name.

    Args:
        kinds: the failures, one for each generation.
        folder: is made.
        patience_s: how long the job may take.
        noisy: the worker that fails also writes harmless lines to its stderr, before its error and when it exits.
    """
    for name in ("small", "only-on-a"):
        (folder / name).mkdir(parents=True)
    arguments = (*(kind.kind for kind in kinds), "none")
    options = "--max-restarts", "200", "--restart-window", "0.001", "--hang-timeout", "17"
    noise = {"SCREEN_NOISE": str(HARMLESS)} if noisy else {}
    with staged(folder, options=options) as stage:
        for node, setup in (("a", ""), ("b", ON_B)):
            stage.start(node, slots=2, script=FAULTY, arguments=arguments, setup=setup, **noise)
        with suppress(AssertionError):  # what was not reached by then is not explained
            stage.cluster.wait_end(timeout_s=patience_s)
        texts = {node: stage.cluster.agents[node].said() for node in stage.nodes}
    return [
        f"{kind.name}, on {node}:\n{screen}"
        for number, kind in enumerate(kinds, 1)
        for node, text in texts.items()
        for screen, explanation in [screen_of(number, text)]
        if not Words(kind.cause, kind.machine, "").are_on(explanation) or not re.search(kind.remedy, screen)
    ]


def screen_of(generation: int, text: str) -> tuple[str, str]:
    """The screen on which the explanation of a generation's failure ends, or the warning of a stall, and that itself."""
    head = r"(?m)^\S+ \w+ +\[job \w g"
    stall = re.search(rf"{head}{generation}\] no worker has made progress.*\n", text)
    cause = rf"{head}\d+\] generation {generation}: (?:probable )?root cause.*\n(?:  .*\n)*"
    found = stall or re.search(cause, text)
    return (last_lines(plain(text[: found.end()])), plain(found[0])) if found is not None else ("", "")
