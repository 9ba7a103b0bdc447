"""Checks whether processes forked from this one are as good as fresh ones, after all that was imported here."""

from __future__ import annotations

import os
import sys
import time

from elastic_agent.linux import DEVICE_FILES, open_files, thread_names

_THREADS_END_S = 0.5
_ACCELERATORS = ("cuda", "xpu", "mtia")
_HANDLE_FORKS = frozenset(("jemalloc_bg_thd",))
"""Threads that a forked process does without: jemalloc's, which pyarrow brings along, only returns unused memory to the
system earlier (`background_thread_postfork_child` in its src/background_thread.c switches it off)."""
_DEVICES = tuple(f"/dev/{name}" for name in DEVICE_FILES)


class UnsafeError(Exception):
    """Processes forked from this one would not be like fresh ones."""


def check_fork_safety() -> None:
    """Raise UnsafeError when something has been imported here that does not survive a fork. Forks once."""
    for name in _ACCELERATORS:
        if _torch_flag(name, "is_initialized"):
            raise UnsafeError(
                f"an imported module has initialised torch.{name}, which does not survive a fork"
            )
    for path in open_files():
        if path.startswith(_DEVICES):
            raise UnsafeError(f"an imported module has opened {path}, which does not survive a fork")
    _try_a_fork()
    lost = _threads()
    if len(lost) > 1:
        names = ", ".join(sorted(lost[1:])) or "?"
        raise UnsafeError(f"an imported module has started threads ({names}), which do not survive a fork")


def _torch_flag(accelerator: str, question: str) -> bool:
    query = getattr(getattr(sys.modules["torch"], accelerator, None), question, None)
    return bool(query()) if query is not None else False


def _try_a_fork() -> None:
    """Fork once: libraries with fork handlers (OpenBLAS) end their threads before a fork, and some devices
    forbid it."""
    pid = os.fork()
    if pid == 0:
        forbidden = any(_torch_flag(name, "_is_in_bad_fork") for name in _ACCELERATORS)
        os._exit(1 if forbidden else 0)
    if os.waitpid(pid, 0)[1] != 0:
        raise UnsafeError("an accelerator is already in use, and torch does not allow it in forked processes")


def _threads() -> list[str]:
    """Return the names of this process's threads that a fork would lose, the first one first; those that are ending get
    a moment."""
    ends = time.monotonic() + _THREADS_END_S
    while len(names := _lost_by_forks(thread_names())) > 1 and time.monotonic() < ends:
        time.sleep(0.002)
    return names


def _lost_by_forks(names: list[str]) -> list[str]:
    return [*names[:1], *(name for name in names[1:] if name not in _HANDLE_FORKS)]
