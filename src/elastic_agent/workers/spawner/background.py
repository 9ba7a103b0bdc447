"""Doing work while the workers train, without taking the processors from them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from typing import Any

_NICE = 5
_AUTOGROUP = "/proc/self/autogroup"
_SHORTEST_PAUSE_S = 0.005


@contextlib.contextmanager
def in_background() -> Iterator[None]:
    """Give way to other processes inside, and have the usual priority again afterwards, as workers inherit it.

    A process that may not raise its priority again pauses between imports instead: half of the time.
    """
    _set_autogroup(_NICE)
    try:
        with _niced() if _may_return() else _paused():
            yield
    finally:
        _set_autogroup(0)


def _set_autogroup(nice: int) -> None:
    """The priority of the session, where the kernel groups processes by session; this process has its own."""
    with contextlib.suppress(OSError), open(_AUTOGROUP, "w") as file:
        file.write(str(nice))


def _may_return() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            with _niced():
                pass
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


@contextlib.contextmanager
def _niced() -> Iterator[None]:
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, min(19, usual + _NICE))
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, usual)


@contextlib.contextmanager
def _paused() -> Iterator[None]:
    original = SourceFileLoader.exec_module
    ran_since = time.monotonic()

    def exec_module(loader: Any, module: Any) -> None:
        nonlocal ran_since
        original(loader, module)
        ran_s = time.monotonic() - ran_since
        if ran_s > _SHORTEST_PAUSE_S:
            time.sleep(ran_s)
            ran_since = time.monotonic()

    SourceFileLoader.exec_module = exec_module  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del SourceFileLoader.exec_module  # inherited, as before
