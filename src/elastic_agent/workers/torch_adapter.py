"""Every private name of torch that `workers` uses; a test says when a new version of torch lacks one."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions


def with_numa_binding(argv: Sequence[str], local_rank: int, options: NumaOptions | None) -> tuple[str, ...]:
    """The command line that starts `argv` on the processors near the worker's GPU (`--numa-binding`)."""
    if options is None:
        return tuple(argv)
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

    wrap: Any = _maybe_wrap_command_args_with_numa_binding
    index = _index_parameter(wrap)
    assert index is not None
    return tuple(wrap(tuple(argv), **{index: local_rank}, numa_options=options))


def _index_parameter(wrap: Any) -> str | None:
    """torch 2.13 calls the device's index ``gpu_index``, later versions ``device_index``."""
    known = inspect.signature(wrap).parameters
    return next((name for name in ("device_index", "gpu_index") if name in known), None)
