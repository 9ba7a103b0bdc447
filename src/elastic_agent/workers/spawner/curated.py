"""The packages that are preloaded when a script imports them, and the variables that torch reads then.

Each was shown, by `tests/conformance`, to leave a worker that is handed it as an import in the worker would: with the
same modules, random numbers, environment and search path. Others can be preloaded with `--preload`.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

SHOWN_FOR: Mapping[str, tuple[str, str]] = {
    "accelerate": ("accelerate", "1.15"),
    "datasets": ("datasets", "5.2"),
    "hydra": ("hydra-core", "1.3"),
    "lightning": ("lightning", "2.6"),
    "numpy": ("numpy", "2.4"),
    "omegaconf": ("omegaconf", "2.3"),
    "pandas": ("pandas", "3.1"),
    "pytorch_lightning": ("pytorch-lightning", "2.6"),
    "safetensors": ("safetensors", "0.8"),
    "scipy": ("scipy", "1.17"),
    "sklearn": ("scikit-learn", "1.9"),
    "tokenizers": ("tokenizers", "0.23"),
    "torch": ("torch", "2.13"),
    "torchmetrics": ("torchmetrics", "1.9"),
    "transformers": ("transformers", "5.23"),
}
"""By the package's name: its distribution, and the version for which that was shown. Other versions with the same first
number are preloaded too."""

LOADED_LATER: Mapping[str, tuple[str, ...]] = {
    "torch": (
        "torch.distributed.algorithms.ddp_comm_hooks",
        "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook",
        "torch.profiler._cupti_monitor",
        "torch.utils.serialization.config",
    ),
    "torch.optim": ("torch._dynamo",),  # half of what torch's import costs, for the first optimizer or DDP
    "lightning": ("omegaconf",),
    "pytorch_lightning": ("omegaconf",),
}
"""The modules that they import when they are used; with others of the script's imports."""

TRAIN_NOTHING = sys.stdlib_module_names | {"elastic_agent", "numpy", "pandas", "scipy", "torch"}
"""Packages that make no optimizer unless the script mentions one."""


def current_folder() -> str | None:
    """Return the working directory; None if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def _lightning(module: Any) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _torchmetrics(module: Any) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


def _tempfile(module: Any) -> None:
    module.tempdir = None  # TORCHINDUCTOR_CACHE_DIR is derived from it, when torch._dynamo is imported


def _rich_style(module: Any) -> None:
    module._id_generator = module.count(module.getrandbits(24))  # a draw that a seeded script counts on


def _torch(module: Any) -> None:
    module.manual_seed = module.random.manual_seed  # torch._dynamo has replaced it


def _dynamo(module: Any) -> None:
    torch: Any = sys.modules["torch"]
    if torch.manual_seed is torch.random.manual_seed:  # the script has not replaced it
        torch.manual_seed = torch._disable_dynamo(torch.manual_seed)
        torch.jit._builtins._register_builtin(torch.manual_seed, "aten::manual_seed")


RENEWED: Mapping[str, Callable[[Any], None]] = {
    "lightning.fabric.utilities.rank_zero": _lightning,
    "lightning_fabric.utilities.rank_zero": _lightning,
    "rich.style": _rich_style,
    "tempfile": _tempfile,
    "torch": _torch,
    "torch._dynamo": _dynamo,
    "torchmetrics.utilities.prints": _torchmetrics,
}
"""Modules that keep the worker's rank or a folder, or that replace functions of others, and how they become as in an
import of their own."""


READ_AGAIN = RENEWED.keys() - {"torch", "torch._dynamo"}
"""The modules among them that read all variables again that they had read."""

ONLY_PREFIX: Mapping[str, str] = {"fsspec.config": "FSSPEC_", "tqdm.std": "TQDM_"}
"""Modules that go through all variables of the environment, and use those with this prefix."""


def _authkey(module: Any) -> None:
    module.current_process().authkey = os.urandom(32)


RESEEDED: Mapping[str, Callable[[Any], None]] = {
    "datasets.fingerprint": lambda module: module.fingerprint_rng.seed(),
    "multiprocessing.process": _authkey,
    "numpy.random": lambda module: module.seed(),
    "torch": lambda module: module.default_generator.seed(),
}
"""Modules that draw from the system when they are imported. `random` does so again in forked processes itself."""


def is_curated(name: str) -> bool:
    """Return whether the module belongs to one of these packages."""
    return name.partition(".")[0] in SHOWN_FOR


def in_full(imports: Iterable[tuple[str, Sequence[str]]]) -> Iterator[tuple[str, Sequence[str]]]:
    """Yield these imports, as far as the packages are installed in such versions, and what these import later."""
    roots = dict.fromkeys(("torch", *(name.partition(".")[0] for name, _ in imports)))
    installed = [root for root in roots if root == "torch" or _is_installed(root)]
    optimizers = [name for name, _ in imports if name == "torch.optim"]
    yield from ((name, ()) for root in ("torch", *optimizers) for name in LOADED_LATER[root])
    yield from ((name, names) for name, names in imports if name.partition(".")[0] in installed)
    yield from ((name, ()) for root in installed for name in LOADED_LATER.get(root, ()))


def _is_installed(package: str) -> bool:
    from importlib.metadata import PackageNotFoundError, version  # not needed in the agent
    from importlib.util import find_spec

    distribution, shown_for = SHOWN_FOR[package]
    spec = find_spec(package)
    if spec is None or spec.origin is None or "-packages" not in spec.origin:
        return False
    try:
        return version(distribution).partition(".")[0] == shown_for.partition(".")[0]
    except PackageNotFoundError:
        return False


# --- variables ------------------------------------------------------------------------------------

# The environment variables that torch, and what it loads, read when they are imported: later changes do nothing.
# Found by recording all reads of the environment, Python's and C's, during `import torch` (2.13, CPU); the sources of
# what is there with CUDA only are named below. Not among them is what is read later, when it is first used:
# CUDA_VISIBLE_DEVICES, NCCL_*, TORCH_NCCL_*, TORCHINDUCTOR_*, TORCH_HOME.

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
    """Return whether it does nothing to give `name` this value after torch's import; None: a value that is not
    known."""
    if name in _ALLOCATORS:
        return value is None or "backend" in value
    return name in _TORCH or _LIBRARIES.fullmatch(name) is not None
