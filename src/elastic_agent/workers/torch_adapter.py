"""Every private name of torch that `workers` uses, with a check for names that a new version of torch removed."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic.multiprocessing import PContext
from torch.distributed.elastic.multiprocessing.tail_log import TailLog

from elastic_agent.workers.output.tee import Tee

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions


def start_context(context: PContext) -> None:
    """`PContext.start` without its signal handlers, and with a reader of ``--tee`` that shows whole lines.

    torch's installs handlers in the main thread that raise from wherever the program happens to be, and
    leaves them installed; the agent has its own. Putting the old ones back afterwards would leave a gap in
    which they raise.
    """
    context._start()
    readers: Any = [_tee(tail_log) for tail_log in context._tail_logs]
    context._tail_logs = readers
    for reader in readers:
        reader.start()


def _tee(tail_log: TailLog) -> Tee:
    """Return our reader for what one of torch's was to show."""
    headers = tail_log._log_line_prefixes or {}
    return Tee(
        tail_log._log_files,
        tail_log._dst,
        lambda local_rank: headers.get(local_rank, f"[{tail_log._name}{local_rank}]:"),
        tail_log._log_line_filter,
    )


def with_numa_binding(argv: Sequence[str], local_rank: int, options: NumaOptions | None) -> tuple[str, ...]:
    """The command line that starts `argv` on the processors near the worker's GPU (`--numa-binding`)."""
    if options is None:
        return tuple(argv)
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

    wrap: Any = _maybe_wrap_command_args_with_numa_binding
    index = _index_parameter(wrap)
    assert index is not None  # see missing
    return tuple(wrap(tuple(argv), **{index: local_rank}, numa_options=options))


def _index_parameter(wrap: Any) -> str | None:
    """torch 2.13 calls the device's index ``gpu_index``, later versions ``device_index``."""
    known = inspect.signature(wrap).parameters
    return next((name for name in ("device_index", "gpu_index") if name in known), None)


def missing() -> list[str]:
    """How this version of torch differs from what the functions above need; each entry is a sentence."""
    problems = []
    source = _source(PContext.start)
    for needed in ("self._start()", "self._tail_logs", "tail_log.start()"):
        if needed not in source:
            problems.append(f"PContext.start no longer contains {needed!r}: compare it with start_context")
    created = vars(TailLog("", {}, sys.stdout))
    needed_names = {"_name", "_log_files", "_dst", "_log_line_prefixes", "_log_line_filter"}
    problems += [
        f"TailLog.{name} no longer exists: _tee reads it" for name in sorted(needed_names - {*created})
    ]
    # What start does besides: a new step there must be thought about, not missed.
    if source.count("self.") != 2:
        problems.append("PContext.start uses its object in a new way: compare it with start_context")
    for name in ("_start", "_poll", "_close", "pids"):
        if name not in PContext.__abstractmethods__:
            problems.append(f"PContext.{name} is no longer an abstract method: WorkerContext overrides it")
    try:
        from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding as wrap
    except ImportError:
        problems.append("torch.numa.binding._maybe_wrap_command_args_with_numa_binding no longer exists")
    else:
        if _index_parameter(wrap) is None or "numa_options" not in inspect.signature(wrap).parameters:
            problems.append("_maybe_wrap_command_args_with_numa_binding has other parameters")
    return problems


def _source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except OSError:
        return ""
