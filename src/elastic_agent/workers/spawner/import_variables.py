"""The environment variables that torch, and what it loads, read when they are imported: later changes do nothing.

A warm worker has imported torch before its script begins. Found by recording all reads of the environment, Python's and
C's, during `import torch` (2.13, CPU); the sources of what is there with CUDA only are named below. Not among them is
what is read later, when it is first used: CUDA_VISIBLE_DEVICES, NCCL_*, TORCH_NCCL_*, TORCHINDUCTOR_*, TORCH_HOME.
"""

from __future__ import annotations

import re

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
"""Of these, the backend alone is read early: BackendStaticInitializer in c10/cuda/CUDACachingAllocator.cpp."""


def is_read_at_import(name: str, value: str | None = None) -> bool:
    """Return whether it does nothing to give `name` this value after torch's import; None: a value that is not
    known."""
    if name in _ALLOCATORS:
        return value is None or "backend" in value
    return name in _TORCH or _LIBRARIES.fullmatch(name) is not None
