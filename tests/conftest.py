"""What holds for all tests."""

from __future__ import annotations

import compileall
import ctypes
import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import elastic_agent
from tests.processes import ended_with_this_process
from tests.stalled_machine import pytest_runtest_protocol, pytest_terminal_summary

__all__ = ["pytest_runtest_protocol", "pytest_terminal_summary"]

# The same examples in each run of `make test`; `make prove` has other ones each time (--hypothesis-profile=random), and
# `make fuzz` has INPUTS in each test (--hypothesis-profile=fuzz).
# How long it takes to make them depends on the machine.
_FREE_OF_TIME = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, database=None, **_FREE_OF_TIME)
settings.register_profile("random", **_FREE_OF_TIME)
settings.register_profile("fuzz", max_examples=int(os.environ.get("INPUTS", "2000")), **_FREE_OF_TIME)
settings.load_profile("fixed")

os.environ.pop("PYTHONUNBUFFERED", None)  # set in many containers, and it hides what is never flushed


def pytest_configure(config: pytest.Config) -> None:
    """Compile the package: with PYTHONDONTWRITEBYTECODE, set in many containers, every agent would do it anew."""
    if not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(elastic_agent.__file__).parent, quiet=2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module without tests of agents in the pass that runs these: all take a quarter of a minute."""
    is_module = collection_path.match("test_*.py") and config.option.markexpr.startswith("system")
    return (is_module and "mark.system" not in collection_path.read_text()) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Look for no garbage while modules are imported: this took a third of the time of their imports."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Prepare this process for the tests.

    All that is imported by now stays to the end: the garbage collector need not look through it again and again, which
    took more than a quarter of the time of simulations. And tests cut stores off from their clients as they like: torch
    in this process need not print C++ frames then.
    """
    gc.freeze()
    if "torch" in sys.modules:
        import torch

        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        ctypes.c_int.in_dll(library, "FLAGS_caffe2_log_level").value = 2  # errors only


@pytest.fixture(scope="session", autouse=True)
def _nothing_outlives_a_killed_run() -> Iterator[None]:
    """Fixtures end what tests start; if this process is killed, another one does."""
    with ended_with_this_process():
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_server_stays_behind() -> Iterator[None]:
    """The standard library leaves the server it forks processes from to end by itself, after us."""
    yield
    server: Any = forkserver
    tracker: Any = resource_tracker
    server._forkserver._stop()
    tracker._resource_tracker._stop()


@pytest.fixture(scope="session", autouse=True)
def _signals_reach_what_tests_start() -> None:
    """Under nohup, or in the background of a script, what is started here would ignore these signals, too."""
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, lambda *_: None)  # a process that is started by exec has the default again
