"""Errors that people meet are recognised, as they were reported in issue trackers."""

from __future__ import annotations

import re

import pytest

from elastic_agent.diagnosis.catalogue import CATALOGUE, known_error
from elastic_agent.diagnosis.symptoms import CAUSES, Nature

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"
WARNING = (
    "[W1123 06:22:33.86 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
)
NCCL = "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:317, "


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("The client socket has timed out after 60s while trying to connect to (10.0.0.1, 29500)", "store-timeout"),
        ("The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).", "port-in-use"),
        ("The IPv6 network addresses of (host, 1) cannot be retrieved (gai error: -2)", "name-unknown"),
        (
            "Gloo connectFullMesh failed with [/gloo/pair.cc:144] no error, remote=[127.0.1.1]:1234",
            "loopback-address",
        ),
        (
            f"Gloo connectFullMesh failed with {GLOO}pair.cc:144] connect: Connection refused, remote=[10.0.0.2]:1",
            "connect-refused",
        ),
        ("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: ^lo", "gloo-interface-list"),
        ("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: eth7", "gloo-interface"),
        ("NCCL WARN Bootstrap : no socket interface found", "nccl-interface"),
        ("connecting to address with family 59936 is neither AF_INET(2) nor AF_INET6(10)", "nccl-interface"),
        (f"{NCCL}invalid usage, NCCL version 2.21\nMismatched NCCL version detected", "nccl-version"),
        ("RuntimeError: CUDA driver version is insufficient for CUDA runtime version", "cuda-driver-too-old"),
        ("CUDA error: no kernel image is available for execution on the device", "cuda-no-kernel"),
        ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000", "cuda-duplicate-gpu"),
        ("RuntimeError: CUDA error: invalid device ordinal", "cuda-invalid-device"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "cuda-out-of-memory"),
        ("CUDA error: uncorrectable ECC error encountered", "cuda-ecc"),
        ("CUDA error: device-side assert triggered", "cuda-assert"),
        ("CUDA error: an illegal memory access was encountered", "cuda-illegal-access"),
        ("Failed to initialize NVML: Driver/library version mismatch", "cuda-driver-mismatch"),
        (
            "NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9637892 bytes, error: No space left on device (28)",
            "shm-full",
        ),
        ("Call to posix_fallocate failed : No space left on device", "shm-full"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error.", "shm-full"),
        ("RuntimeError: DataLoader worker (pid(s) 7, 8) exited unexpectedly", "loader-killed"),
        ("RuntimeError: unable to open shared memory object </torch_7> in read-write mode: (24)", "too-many-files"),
        ("OSError: [Errno 24] Too many open files", "too-many-files"),
        ("OSError: [Errno 122] Disk quota exceeded", "disk-full"),
        ("OSError: [Errno 30] Read-only file system: '/ckpt'", "read-only"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "memlock"),
        ("NCCL WARN Call to ibv_create_cq failed", "memlock"),
        ("RuntimeError: can't start new thread", "process-limit"),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)", "nccl-timeout"),
        (f"{GLOO}unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete", "gloo-timeout"),
        (f"{GLOO}pair.cc:525] Connection closed by peer [10.0.0.7]:4711", "gloo-peer"),
        (f"{GLOO}pair.cc:537] Read error [10.0.0.7]:4711: Connection reset by peer.", "gloo-peer"),
        (f"{NCCL}remote process exited or there was a network error", "nccl-peer"),
        (f"{NCCL}internal error\nLast error:\nNet : Connection closed by remote peer n2<4711>", "nccl-peer"),
        ("DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", "store-gone"),
        (f"{NCCL}unhandled system error, NCCL version 2.21", "nccl-system"),
        ("ModuleNotFoundError: No module named 'apex'", "missing-module"),
        ("train.py: error: unrecognized arguments: --nnodes 2", "misplaced-option"),
        ("Error: No such option: --max_restarts", "misplaced-option"),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", "connection"),
        ("KeyboardInterrupt", "stopped"),
    ],
)  # fmt: skip
def test_errors_are_recognised(text: str, name: str) -> None:
    known = known_error(text)
    assert known is not None
    assert known.symptom.name == name


@pytest.mark.parametrize(
    "text",
    [
        "RuntimeError: boom",
        "ValueError: peer review",
        "train.py: error: unrecognized arguments: --epoch 2",
        "exited",
        "",
        WARNING,
    ],
)
def test_other_errors_are_not(text: str) -> None:
    assert known_error(text) is None


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        (f"{GLOO}pair.cc:525] Connection closed by peer [10.0.0.7]:4711. This is", "10.0.0.7"),
        (f"{GLOO}pair.cc:525] Connection closed by peer [::ffff:10.0.0.7]:4711", "10.0.0.7"),
        (f"{GLOO}pair.cc:525] Connection closed by peer [fe80::1%eth0]:4711", "fe80::1%eth0"),
        (f"{NCCL}x\nncclRemoteError: y\nLast error:\nsocketProgress: Connection closed by remote peer n2<5>", "n2"),
        (f"{NCCL}x\nLast error:\nNet : Call to recv from 10.0.0.8<3> failed : Connection reset by peer", "10.0.0.8"),
        (f"{NCCL}remote process exited\nLast error:\nNET/IB : Got completion from peer 10.0.0.9<3> with", "10.0.0.9"),
    ],
)  # fmt: skip
def test_the_machine_at_the_other_end_is_read_from_the_error(text: str, peer: str) -> None:
    known = known_error(text)
    assert known is not None
    assert (known.symptom.nature, known.peer) == (Nature.PEER, peer)


def test_the_rank_that_missed_a_barrier_is_read_from_the_error() -> None:
    known = known_error("RuntimeError: Rank 3 successfully reached monitoredBarrier, but received errors "
                        "while waiting for send/recv from rank 5. Please check rank 5 logs")  # fmt: skip
    assert known is not None
    assert known.rank == 5


def test_a_warning_before_a_vague_error_tells_the_cause() -> None:
    error = f"{NCCL}unhandled system error, NCCL version 2.21"
    warning = (
        "NCCL WARN Error: failed to extend /dev/shm/nccl-x to 9 bytes, error: No space left on device (28)"
    )
    known = known_error(error, warning)
    assert known is not None
    assert known.symptom.name == "shm-full"


def test_a_warning_before_a_clear_error_does_not() -> None:
    known = known_error("ValueError: boom", "OSError: [Errno 28] No space left on device")
    assert known is None


def test_every_cause_has_a_remedy_and_every_name_is_used_once() -> None:
    assert [one.name for one in CATALOGUE if one.nature in CAUSES and not one.remedy] == []
    names = [one.name for one in CATALOGUE]
    assert len({*names}) == len(names)
    for one in CATALOGUE:
        assert re.fullmatch(r"[a-z0-9-]{1,64}", one.name)
        assert not one.meaning.endswith(".")
        assert "\n" not in one.meaning + one.remedy
        assert len(one.remedy) < 250
