"""What it means that a signal killed a worker. Pure."""

from __future__ import annotations

import signal

_SHELL_BASE = 128
"""Shells exit with this plus the number of the signal that killed their child."""

MEANINGS = {
    "SIGKILL": "",
    "SIGSEGV": "crash in native code",
    "SIGBUS": "shared memory full? see df /dev/shm",
    "SIGABRT": "aborted by native code",
    "SIGILL": "built for a different processor?",
    "SIGFPE": "crash in native code",
}
"""By name; empty: anything may have sent it."""

REMEDIES = {
    "SIGKILL": "find out what killed it: the kernel log (dmesg), the job manager, or a user of this machine",
    "SIGSEGV": "see the stack on its stderr; often libraries of different CUDA or NCCL versions are mixed",
    "SIGBUS": "enlarge /dev/shm (docker --shm-size=8g), or use fewer DataLoader workers",
    "SIGABRT": "the last lines on its stderr say why",
    "SIGILL": "install packages that are built for the processor of this machine",
    "SIGFPE": "see the stack on its stderr",
    "SIGTERM": "find out what sends SIGTERM; to stop a node or the run, send it to the agent instead of to a worker",
    "SIGHUP": "start the agent in a session of its own (setsid, nohup or systemd)",
}
"""By name."""


def signal_name(returncode: int | None) -> str:
    """Return the name of the signal that ended a process with this code; empty if none did.

    Or that ended the child of a shell, which reports it by a code of its own.
    """
    if returncode is None or 0 <= returncode <= _SHELL_BASE:
        return ""
    number = -returncode if returncode < 0 else returncode - _SHELL_BASE
    try:
        return signal.Signals(number).name
    except ValueError:
        if returncode > 0:
            return ""
        is_real_time = signal.SIGRTMIN < number < signal.SIGRTMAX
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if is_real_time else f"signal {number}"


def ending(returncode: int | None) -> str:
    """Return how a process ended, such as "exited with code 3"."""
    if returncode is None:
        return "ended"
    name = signal_name(returncode)
    if returncode >= 0:
        return f"exited with code {returncode}{f' (128 + {name})' if name else ''}"
    return "was terminated by SIGTERM" if name == "SIGTERM" else f"was killed by {name}"
