"""Workers that fail or hang: one job for all of them, in which each generation fails in another way."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .cases import Rating
from .stage import FAULTY, Stage, Terminal, Words, last_lines, plain

CULPRIT = r"worker b/1 \(rank 3\)"
LINE = r'faulty\.py(?:", line |:)\d+'
"""Of a bug in the script, the remedy is to know the line, from the traceback or the root cause."""


@dataclass(frozen=True)
class Kind:
    """One way to fail: its name in the script, what it is, its number in the list, what is shown."""

    kind: str
    name: str
    source: int
    cause: str
    remedy: str
    machine: str = f"{CULPRIT} on host-b"


def says(text: str, name: str, source: int, cause: str, remedy: str) -> Kind:
    """An error of hardware that these machines do not have, as text."""
    return Kind(f"says:{text}", name, source, cause, remedy)


NCCL = "NCCL error in: NCCLUtils.hpp:317, "
ADVICE = r"remedy: .*"

FAILING = (
    Kind("exception", "an exception in the script", 31, "expected 128 features", LINE),
    Kind("shapes", "tensors whose shapes do not fit", 16, "mat1 and mat2 shapes", LINE),
    Kind("missing-module", "a package is missing on a machine", 19, "No module named 'apex'", "install the same packages"),
    Kind("exit-3", "sys.exit(3)", 31, "exited with code 3", "read the end of the output"),
    Kind("exit-0", "a worker leaves early with code 0", 31, "exited with code 0 while other workers", "same number of batches"),
    Kind("sigkill", "SIGKILL to a worker", 32, "was killed by SIGKILL", "dmesg"),
    Kind("sigsegv", "a crash in native code", 32, "was killed by SIGSEGV", "stack"),
    Kind("sigabrt", "an abort in native code", 32, "was killed by SIGABRT", "remedy|read the end of the output"),
    Kind("sigterm", "SIGTERM to a worker", 32, "was terminated by SIGTERM", "to the agent"),
    Kind("disk-full", "a disk is full", 20, r"No space left on device", "free space on that disk"),
    Kind("disk-full-torch-save", "a disk is full, in torch.save", 20, r"could not be written completely.* \(.*/small: ", "df -h"),
    Kind("read-only", "a folder is read-only", 20, "Read-only file system", "mount it writable"),
    Kind("not-shared", "checkpoints are not shared", 20, "No such file .*only-on-a", "storage that every machine mounts"),
    Kind("permission", "no access to a folder", 20, "Permission denied", "same user"),
    Kind("too-many-files", "too many open files", 26, "Too many open files", "ulimit -n"),
    Kind("allocation", "no memory, in torch", 32, "can't allocate memory", "smaller batches"),
    Kind("memory-error", "no memory, in Python", 32, "MemoryError", "smaller batches"),
    Kind("corrupt-checkpoint", "half a checkpoint", 20, "checkpoint is incomplete", "temporary file and rename"),
    Kind("other-size", "tensors of different sizes in a collective", 30, r"(?:called (?:all_reduce of|another collective)|op\.preamble).* \(?at faulty\.py:\d+",
         "same sequence of collectives"),
    Kind("init-twice", "init_process_group twice", 16, "initialize the default process group twice", "call it once"),
    Kind("atexit", "another error while Python exits", 31, "KeyError: 'labels'", LINE),
    Kind("loader-exception", "an exception in a data loader", 26, "cannot identify image file", LINE),
    Kind("shm", "/dev/shm is too small", 24, "/dev/shm is too small", "--shm-size"),
    Kind("port-taken", "a store on a port that is in use", 2, "another process listens on the port", "ss -ltnp"),
    Kind("nccl", "NCCL without a GPU", 22, "no GPU can be used", "use the gloo backend", r"worker [ab]/\d .*on host-[ab]"),
    Kind("gloo-interface", "GLOO_SOCKET_IFNAME names no interface", 6, "names no interface of this machine", "ip -br address"),
    Kind("gloo-interface-list", "GLOO_SOCKET_IFNAME is a list", 6, "expects the name of one interface", "one name"),
    Kind("unsets-rank", "a variable is missing", 34, "RANK expected, but not set", "do not unset RANK"),
    Kind("unknown-name", "an unknown name in the script", 3, "cannot be resolved on this machine", "add the name to DNS"),
    says("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "two workers on one GPU", 21,
         "two workers use the same GPU", "cuda.set_device"),
    says("CUDA error: invalid device ordinal", "a GPU that is not visible", 22, "a GPU that it does not see", "--nproc-per-node"),
    says("CUDA out of memory. Tried to allocate 2.00 GiB.", "no GPU memory", 23, "too little free memory", "nvidia-smi"),
    says("Bootstrap : no socket interface found", "NCCL_SOCKET_IFNAME names no interface", 7, "NCCL_SOCKET_IFNAME names", "ip -br"),
    says(f"{NCCL}invalid usage\nMismatched NCCL version detected", "different versions of NCCL", 14,
         "different versions of NCCL", "same PyTorch on all machines"),
    says("CUDA driver version is insufficient for CUDA runtime version", "an old driver", 15, "driver is too old", "update the driver"),
    says("no kernel image is available for execution on the device", "a GPU that PyTorch does not support", 15,
         "does not support this GPU", "built for the GPU's architecture"),
    says("Call to ibv_reg_mr failed with error Cannot allocate memory", "too little locked memory", 25, "lock too little", "ulimit -l"),
    says("uncorrectable ECC error encountered", "a defective GPU", 35, "GPU is defective", "take this machine out"),
)  # fmt: skip

HANGING = (
    Kind("gloo-timeout", "a rank is later than gloo's time-out", 33, "is one all_reduce behind", r"it is at faulty.py:\d+", CULPRIT),
    Kind("elsewhere", "a rank hangs outside of the collective", 30, "is one all_reduce behind", r"it is at faulty.py:\d+", CULPRIT),
    Kind("sigstop", "SIGSTOP to a worker", 30, "is stopped by a signal", r"kill -CONT \d+ on b", CULPRIT),
    Kind("other-collective", "different collectives", 30, "called broadcast", "same collectives in the same order", CULPRIT),
    Kind("uneven", "a batch less on a rank", 30, "called barrier", "uneven numbers of batches", CULPRIT),
    Kind("deadlocked-loader", "a deadlocked data loader", 30, "waits for its data loader", r"at faulty.py:\d+", CULPRIT),
)  # fmt: skip

HARMLESS = Path(__file__).parents[1] / "tests" / "diagnosis" / "harmless.txt"

END_S = 15.0
"""How much later than the first agent the other one may end."""

ON_B = """
mount -t tmpfs -o size=64k tmpfs $SCREEN_FOLDER/small
mount -t tmpfs -o ro tmpfs $SCREEN_FOLDER/read-only
mount -t tmpfs -o size=8m tmpfs /dev/shm"""


def rated_in_one_job(
    kinds: Sequence[Kind], folder: Path, patience_s: float, *, noisy: bool = False
) -> list[Rating]:
    """Run the job to its end, and rate the screen that each failure left on each terminal.

    Args:
        kinds: the failures, one for each generation.
        folder: is made.
        patience_s: how long the job may take.
        noisy: the worker that fails also writes harmless lines to its stderr, before its error and when it exits.
    """
    for name in ("small", "read-only", "only-on-a"):
        (folder / name).mkdir(parents=True)
    arguments = (*(one.kind for one in kinds), "none")
    options = "--max-restarts", "200", "--restart-backoff", "0", "--hang-timeout", "17"
    with Stage(folder, options=options) as stage:
        for node, setup in (("a", ""), ("b", ON_B)):
            noise = {"SCREEN_NOISE": str(HARMLESS)} if noisy else {}
            stage.start(node, slots=2, script=FAULTY, arguments=arguments, setup=setup, **noise)
        with suppress(AssertionError):  # what was not reached by then has no points
            stage.wait_first_end(patience_s)
            stage.cluster.wait_end(timeout_s=END_S)
        texts = {node: stage.cluster.agents[node].said() for node in stage.nodes}
    beside = ", beside harmless lines" if noisy else ""
    return [_rated(one, number, texts, beside) for number, one in enumerate(kinds, 1)]


def _rated(kind: Kind, generation: int, texts: dict[str, str], beside: str) -> Rating:
    words = Words(kind.cause, kind.machine, kind.remedy)
    terminals = []
    for node, text in texts.items():
        screen, explained, after_s = screen_of(generation, text)
        # The screen may also show what is said of the generation before.
        points = words.points(screen) if words.points(explained) >= 2 else min(1, words.points(screen))
        terminals.append(Terminal(node, points, after_s, screen, words.said(explained)))
    return Rating(f"{kind.name}{beside}", kind.source, tuple(terminals))


def screen_of(generation: int, text: str) -> tuple[str, str, float | None]:
    """The screen on which the explanation of a generation's failure ends, or the warning of a stall, and that itself.

    And how long that was after the generation's start, seconds.
    """
    head = r"(?m)^\S+ \w+ +\[job \w g"
    start = re.search(rf"{head}{generation}\] generation {generation}: \d", text)
    stall = re.search(rf"{head}{generation}\] no worker has made progress.*\n", text)
    cause = rf"{head}\d+\] generation {generation}: (?:probable )?root cause.*\n(?:  .*\n)*"
    found = stall or re.search(cause, text)
    if start is None or found is None:
        return "", "", None
    screen = last_lines(plain(text[: found.end()]))
    return screen, plain(found[0]), _time_s(found[0]) - _time_s(start[0])


def _time_s(line: str) -> float:
    hours, minutes, seconds = line.split()[0].split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
