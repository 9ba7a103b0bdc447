"""Sets what `ps`, `pgrep -f` and /proc show of a process: its command line, its environment and its name.

A forked worker would show those of the process it was forked from. Overwriting them in place, as setproctitle
does, has no room for a longer command line and destroys /proc/PID/environ; instead, the kernel accepts a new
location for both (`prctl(PR_SET_MM_MAP)`, made for restoring checkpoints, available to every user).
"""

from __future__ import annotations

import ctypes
import os

from elastic_agent.linux import set_process_name, stat_fields

_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_KEEP_EXECUTABLE = 0xFFFFFFFF

# Positions in `stat_fields`.
_START_CODE, _END_CODE, _START_STACK = 23, 24, 25
_START_DATA, _END_DATA, _START_BRK, _ARG_START, _ENV_END = 42, 43, 44, 45, 48

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sbrk.restype = ctypes.c_void_p
_libc.sbrk.argtypes = (ctypes.c_ssize_t,)

_shown: list[ctypes.Array[ctypes.c_char]] = []
"""Memory that the kernel reads for others; kept as long as the process lives."""


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("start_code", "end_code", "start_data", "end_data")),
        *((name, ctypes.c_uint64) for name in ("start_brk", "brk", "start_stack")),
        *((name, ctypes.c_uint64) for name in ("arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    )


def show_as(argv: list[str], environment: dict[str, str]) -> None:
    """Show this process as if it had been started with `argv` and `environment`.

    Raises OSError where the kernel does not allow it (built without CONFIG_CHECKPOINT_RESTORE).
    """
    arguments = b"".join(os.fsencode(argument) + b"\0" for argument in argv)
    variables = b"".join(
        os.fsencode(name) + b"=" + os.fsencode(value) + b"\0" for name, value in environment.items()
    )
    shown = ctypes.create_string_buffer(arguments + variables)
    start = ctypes.addressof(shown)
    middle = start + len(arguments)
    _move_areas(start, middle, middle, middle + len(variables))
    _shown[:] = [shown]
    set_process_name(os.path.basename(argv[0]))


def _move_areas(arg_start: int, arg_end: int, env_start: int, env_end: int) -> None:
    fields = stat_fields(os.getpid())
    layout = _MemoryMap(
        start_code=int(fields[_START_CODE]),
        end_code=int(fields[_END_CODE]),
        start_data=int(fields[_START_DATA]),
        end_data=int(fields[_END_DATA]),
        start_brk=int(fields[_START_BRK]),
        brk=_libc.sbrk(0),
        start_stack=int(fields[_START_STACK]),
        arg_start=arg_start,
        arg_end=arg_end,
        env_start=env_start,
        env_end=env_end,
        auxv=None,
        auxv_size=0,
        exe_fd=_KEEP_EXECUTABLE,
    )
    size = ctypes.c_ulong(ctypes.sizeof(layout))
    if _libc.prctl(_PR_SET_MM, ctypes.c_ulong(_PR_SET_MM_MAP), ctypes.byref(layout), size, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_MM_MAP): {os.strerror(code)}")
