"""The packages that are preloaded when a script imports them.

Each was shown, by `tests/conformance`, to leave a worker that is handed it as an import in the worker would: with the
same modules, random numbers, hooks, loggers, warnings and environment. Others can be preloaded with `--preload`.
"""

from __future__ import annotations

import os
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


ONLY_PREFIX: Mapping[str, str] = {"fsspec.config": "FSSPEC_", "tqdm.std": "TQDM_"}
"""Modules that go through all variables of the environment, and use those with this prefix."""


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


def _multiprocessing(module: Any) -> None:
    module.ORIGINAL_DIR = current_folder()


def _tempfile(module: Any) -> None:
    module.tempdir = None  # dill has it look for its folder


def _rich_style(module: Any) -> None:
    module._id_generator = module.count(module.getrandbits(24))


def _dynamo_config(module: Any) -> None:
    module._config["debug_dir_root"].default = module.default_debug_dir_root()


RENEWED: Mapping[str, Callable[[Any], None]] = {
    "lightning.fabric.utilities.rank_zero": _lightning,
    "lightning_fabric.utilities.rank_zero": _lightning,
    "linecache": lambda module: module.clearcache(),
    "multiprocessing.process": _multiprocessing,
    "rich.style": _rich_style,
    "tempfile": _tempfile,
    "torch._dynamo.config": _dynamo_config,
    "torchmetrics.utilities.prints": _torchmetrics,
}
"""Modules that keep what differs between workers, and how they get it as in an import of their own."""


READ_AGAIN = RENEWED.keys() - {"torch._dynamo.config"}
"""The modules among them that read all variables again that they had read."""


def _authkey(module: Any) -> None:
    module.current_process().authkey = os.urandom(32)


def _sympy(module: Any) -> None:
    for name in ("rng", "_assumptions_rng"):  # not every release has both
        if hasattr(module, name):
            getattr(module, name).seed()


RESEEDED: Mapping[str, Callable[[Any], None]] = {
    "datasets.fingerprint": lambda module: module.fingerprint_rng.seed(),
    "multiprocessing.process": _authkey,
    "numpy.random": lambda module: module.seed(),
    "sympy.core.random": _sympy,
    "torch": lambda module: module.default_generator.seed(),
}
"""Modules that draw from the system when they are imported. `random` does so again in forked processes itself."""


_LIGHTNING_UTILITIES = "lightning_utilities.core.rank_zero"

REPLACES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "lightning.fabric.utilities.rank_zero": ((_LIGHTNING_UTILITIES, "rank_zero_deprecation_category"),),
    "lightning.fabric.utilities.warnings": (("warnings", "formatwarning"),),
    "lightning.fabric.wrappers": (("torch", "compile"),),
    "lightning_fabric.utilities.rank_zero": ((_LIGHTNING_UTILITIES, "rank_zero_deprecation_category"),),
    "lightning_fabric.utilities.warnings": (("warnings", "formatwarning"),),
    "lightning_fabric.wrappers": (("torch", "compile"),),
    "torch._dynamo": (("torch", "manual_seed"),),
    "torch.package.package_importer": (("inspect", "getfile"),),
    "typing_extensions": (("typing", "_collect_parameters"), ("typing", "_check_generic")),
}
"""Modules that replace attributes of other ones when they are imported: of which modules, and which."""


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
