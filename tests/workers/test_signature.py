"""Signatures: the same for the same failure, none for failures that another attempt may cure."""

from __future__ import annotations

import json
import re

import pytest

from elastic_agent.diagnosis.known_errors import KnownError, known_errors
from elastic_agent.workers.failure import describe
from tests.diagnosis.scenes import EXAMPLES, scene

TRACE = """\
{rank}Traceback (most recent call last):
{rank}  File "{folder}/train.py", line {line}, in <module>
{rank}    main(backend="nccl")
{rank}  File "{folder}/model.py", line {line}, in build
{rank}    raise kind(words)
{rank}{error}
"""


def traced(error: str, *, rank: str = "", folder: str = "/job", line: int = 7) -> str:
    return TRACE.format(error=error, rank=rank, folder=folder, line=line)


def signed(stderr: str, returncode: int = 1, error_file: str = "", slot: int = 0) -> str:
    return describe(slot, returncode, error_file, stderr).signature


DEVICES = (
    "ValueError: You set `devices=2` and `num_nodes=2`, but the product does not match the world size (3)."
)


@pytest.mark.parametrize(
    ("stderr", "returncode"),
    [
        (traced(DEVICES), 1),
        (traced("NameError: name 'optimiser' is not defined"), 1),
        (traced("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.bin'"), 1),
        (traced("TypeError: build() got an unexpected keyword argument 'timeout'"), 1),
        (traced("lightning.fabric.utilities.exceptions.MisconfigurationException: no such strategy"), 1),
        (traced("RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"), 1),
        ("  File \"train.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n", 1),
        ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --epochz 3\n", 2),
        ("no configuration given\n", 3),
    ],
)
def test_an_error_of_the_script_is_the_same_each_time(stderr: str, returncode: int) -> None:
    first = signed(stderr, returncode)
    assert first
    assert signed("step 3\nsome more output\n" + stderr, returncode, slot=5) == first


def test_ranks_pids_addresses_and_folders_make_no_difference() -> None:
    first = signed(
        traced("ValueError: rank 3 of <Net at 0x7fa1b2c3> (pid 4711)", rank="[rank3]: ", folder="/a")
    )
    again = signed(
        traced("ValueError: rank 12 of <Net at 0x5500aa> (pid 99)", rank="[rank12]: ", folder="/b")
    )
    assert first == again != ""


def test_the_error_of_record_counts_as_well() -> None:
    trace = traced(DEVICES)
    written = {"message": {"message": DEVICES, "extraInfo": {"py_callstack": trace, "timestamp": "1"}}}
    assert signed("", error_file=json.dumps(written)) == signed(trace) != ""


@pytest.mark.parametrize(
    ("stderr", "returncode"),
    [
        (traced(DEVICES, line=8), 1),
        (traced("TypeError: You set `devices=2` and `num_nodes=2`"), 1),
        (traced("ValueError: no such optimiser"), 1),
        (traced(DEVICES), 2),
    ],
)
def test_another_line_type_message_or_exit_code_is_another_failure(stderr: str, returncode: int) -> None:
    assert signed(stderr, returncode) not in ("", signed(traced(DEVICES)))


@pytest.mark.parametrize(
    "error",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:268, unhandled system error",
        "torch.distributed.DistStoreError: wait timeout after 300000ms",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [::1]:9",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory",
        "MemoryError",
        "OSError: [Errno 98] Address already in use",
        "OSError: [Errno 116] Stale file handle",
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='hub', port=443): Read timed out.",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "RuntimeError: DataLoader worker (pid(s) 4711) exited unexpectedly",
        "EOFError",
        "BrokenPipeError: [Errno 32] Broken pipe",
    ],
)
def test_transient_failures_and_those_caused_by_other_workers_have_no_signature(error: str) -> None:
    assert signed(traced(error)) == ""


def test_an_error_caused_by_a_transient_one_has_no_signature() -> None:
    both = (
        traced("ConnectionResetError: [Errno 104] reset") + "\nThe above exception was the direct cause …\n\n"
    )
    assert signed(both + traced("KeyError: 'weights'")) == ""
    assert signed(traced("StopIteration") + "\nDuring handling of …\n\n" + traced("KeyError: 'weights'"))


GLOO_ABORT = """\
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. {size} vs 336. Received data size
Fatal Python error: Aborted

Current thread 0x00007fa01f441b80 (most recent call first):
  File "/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "{folder}/train.py", line {line} in step
"""


def aborted(size: int = 668, folder: str = "/job", line: int = 7) -> str:
    return signed(GLOO_ABORT.format(size=size, folder=folder, line=line), -6)


def test_tensors_of_different_sizes_at_the_same_line_are_the_same_error() -> None:
    assert aborted() == aborted(size=1336, folder="/elsewhere") != ""
    assert aborted() != aborted(line=8)


@pytest.mark.parametrize(
    ("stderr", "returncode"),
    [
        *((traced(DEVICES), returncode) for returncode in (-9, -15, -11, -6, 137, 143)),
        ("", 3),
        (GLOO_ABORT.partition("Fatal Python error")[0], -6),
    ],
)
def test_an_end_by_a_signal_without_a_message_or_without_a_line_has_no_signature(
    stderr: str, returncode: int
) -> None:
    assert signed(stderr, returncode) == ""


def test_a_worker_on_a_full_disk_has_no_signature() -> None:
    assert describe(0, 1, "", traced(DEVICES), "no space left").signature == ""


@pytest.mark.parametrize(
    "known", [row for row in known_errors().values() if row.is_lasting], ids=lambda row: row.name
)
def test_an_error_that_is_known_to_last_is_the_same_each_time(known: KnownError) -> None:
    for error in EXAMPLES[known.name]["example"]:
        assert signed(traced(error if re.match(r"[\w.]+Error: ", error) else f"RuntimeError: {error}")) != ""


def test_an_error_that_follows_from_one_that_lasts_is_the_same_each_time() -> None:
    stderr = scene("loader_unguarded")[0].stderr
    later = stderr.replace("(pid(s) 20776)", "(pid(s) 481, 482)").replace("Traceback", "[rank1]: Traceback")
    assert signed(stderr) == signed(later) != ""
    assert signed(scene("loader_sigkill")[0].stderr) == ""
