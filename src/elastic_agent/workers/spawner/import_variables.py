"""The environment variables that torch, and what it loads, read when they are imported: later changes do nothing.

A warm worker has imported torch before its script begins. Found by recording all reads of the environment, Python's and
C's, during `import torch` (2.13, CPU); the sources of what is there with CUDA only are named below. Not among them is
what is read later, when it is first used: CUDA_VISIBLE_DEVICES, NCCL_*, TORCH_NCCL_*, TORCHINDUCTOR_*, TORCH_HOME.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from types import FrameType

from elastic_agent.workers.spawner.installed import is_installed_file

_LIBRARIES = re.compile(
    "|".join(
        (
            r"(OMP|GOMP|KMP)_\w+",  # libgomp's initialize_env (libgomp/env.c); Intel's runtime, likewise
            r"(MKL|MKLDNN|ONEDNN|DNNL)_\w+",
            r"(OPENBLAS_\w+|GOTO_NUM_THREADS)",  # numpy's BLAS (driver/others/openblas_env.c)
            r"NPY_(DISABLE|ENABLE)_CPU_FEATURES",
        )
    )
)
_TORCH = frozenset(
    (
        # aten/src/ATen/Context.h: members that are initialised from the environment
        *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT"),
        *("TORCH_LINALG_PREFER_CUSOLVER", "TORCH_LINALG_PREFER_HIPSOLVER", "TORCH_ROCM_FA_PREFER_CK"),
        # c10/util/Logging.cpp, torch/csrc/Module.cpp, torch/csrc/distributed/c10d/debug.cpp
        *("TORCH_CPP_LOG_LEVEL", "TORCH_SHOW_CPP_STACKTRACES", "PYTORCH_API_USAGE_STDERR"),
        *("TORCH_CUSTOM_TERMINATE", "TORCH_DISTRIBUTED_DEBUG"),
        # torch/_logging
        *("TORCH_LOGS", "TORCH_LOGS_FORMAT", "TORCH_LOGS_OUT", "TORCH_LOGS_TRACE_ID_FILTER"),
        *("TORCH_TRACE", "TORCH_DTRACE", "TORCH_COMPILE_DEBUG"),
        # torch/jit/_state.py and _trace.py
        *("PYTORCH_JIT", "PYTORCH_JIT_DISABLE", "PYTORCH_JIT_STATS", "PYTORCH_JIT_TIME"),
        # torch/__init__.py, torch/_subclasses, torch/fx, torch/distributed
        *("TORCH_DEVICE_BACKEND_AUTOLOAD", "TORCH_USE_RTLD_GLOBAL", "TORCH_CUDA_SANITIZER"),
        *("TORCH_FAKE_TENSOR_DEBUG", "FX_PATCH_GETITEM", "PYTORCH_MATCHER_LOGLEVEL"),
        *("TORCH_DISTRIBUTED_USE_TORCHCOMMS", "TORCH_DISTRIBUTED_COMPILE_ON_ONE_RANK"),
        # torch/_functorch/config.py, torch/compiler/config.py, torch/fx/experimental/_config.py
        *("TORCH_COMPILE_JOB_ID", "TORCH_COMPILE_CACHE_KEY_TAG", "TORCH_COMPILE_FORCE_DISABLE_CACHES"),
        *("TORCH_COMPILE_DYNAMIC_SOURCES", "TORCH_COMPILE_UNBACKED_SOURCES", "TORCH_CUDAGRAPH_GC"),
        *("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCHDYNAMO_EXTENDED_DEBUG_CPP"),
        *("TORCHDYNAMO_EXTENDED_DEBUG_CREATE_SYMBOL", "TORCHDYNAMO_EXTENDED_DEBUG_GUARD_ADDED"),
        *("TORCHDYNAMO_TRANSLATION_VALIDATION", "TORCHDYNAMO_TRANSLATION_VALIDATION_TIMEOUT"),
    )
)
_ALLOCATORS = frozenset(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"))
"""Only which backend they name is read early: BackendStaticInitializer in c10/cuda/CUDACachingAllocator.cpp."""


def is_read_at_import(name: str, value: str | None = None) -> bool:
    """Whether it does nothing to give `name` this value after torch's import; None: a value that is not known."""
    if name in _ALLOCATORS:
        return value is None or "backend" in value
    return name in _TORCH or _LIBRARIES.fullmatch(name) is not None


def watch_changes(read_by: Mapping[str, str]) -> Mapping[str, int]:
    """Record which variables this process changes, and warn of changes that come too late.

    A warning is printed, once for each variable, when the user's code sets one although torch has read it, or a module
    that was preloaded; `read_by` has the variables and the modules of the latter. Not for what installed packages set
    for themselves, as scikit-learn does with KMP_INIT_AT_FORK: no user can change that, and most scripts import torch
    before such a package, with the same outcome under plain Python.

    `os.putenv` is replaced, which `os.environ` calls. An audit hook would see the same, but slows down each call of
    `id`, `open` and many others several times, and can never be taken out again.

    Returns:
        The variables changed so far, and how many modules had been imported by then. What a package changes while it is
        imported is left out: it does so in the spawner, too.
    """
    changed: dict[str, int] = {}
    os.putenv = _recording(os.putenv, os.getpid(), read_by, changed)
    return changed


def _recording(
    putenv: Callable[..., None], pid: int, read_by: Mapping[str, str], changed: dict[str, int]
) -> Callable[..., None]:
    reported: set[str] = set()
    # accelerate removes all variables for a moment, and sets them again.
    at_start = dict(os.environ)

    def recording_putenv(name: str | bytes, value: str | bytes, /) -> None:
        putenv(name, value)
        named, text = os.fsdecode(name), os.fsdecode(value)
        if os.getpid() != pid or text in (os.environ.get(named), at_start.get(named)):
            return
        if named not in changed and not _by_an_import():
            changed[named] = len(sys.modules)
        reader = "torch" if is_read_at_import(named, text) else read_by.get(named)
        if reader is not None and named not in reported and sys.stderr is not None and (where := _where()):
            reported.add(named)
            if reader != "torch":
                changed[named] = 0  # whether the script imports that module before cannot be seen here
            print(_late_change(named, where, reader), file=sys.stderr)

    recording_putenv.__name__ = recording_putenv.__qualname__ = "putenv"
    recording_putenv.__doc__ = putenv.__doc__
    return recording_putenv


def _late_change(variable: str, where: str, reader: str) -> str:
    if reader == "torch":
        return (
            f"elastic-agent: {variable} is set{where} after torch was imported, which has read it; "
            "expected it to be set in the agent's environment, or workers that start cold "
            "(--worker-start cold)"
        )
    return (
        f"elastic-agent: {variable} is set{where} after {reader} was preloaded, which has read it; the next "
        "workers start without this module preloaded. To avoid this, set the variable in the agent's "
        "environment, or use --no-learn-preload"
    )


def _by_an_import() -> bool:
    """Whether an installed module that is being imported makes the change."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "<module>" and is_installed_file(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _where() -> str:
    """The line in the user's code; empty if it is in an installed package."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (__file__, os.__file__, "<frozen ")
    ):
        frame = frame.f_back
    file = frame.f_code.co_filename
    return "" if is_installed_file(file) else f" in {os.path.basename(file)}, line {frame.f_lineno},"
