"""Runs integrations of frameworks that have no entry points, when a worker imports the framework.

Workers call :func:`watch` before the script starts: warm ones as forked, cold ones through their ``sitecustomize``
(`workers/startup_hook`). It imports nothing that Python has not imported when it starts, so that a
script finds as few modules as without it.
"""

import os
import sys

from elastic_agent.worker_variables import GENERATION

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable, Collection, Sequence
    from importlib.machinery import ModuleSpec
    from typing import Any

INTEGRATIONS = {
    "multiprocessing.spawn": "elastic_agent.integrations.spawned_children",
    "torch.distributed.distributed_c10d": "elastic_agent.integrations.collectives",
    "torch.distributed.rendezvous": "elastic_agent.integrations.agent_store",
    "torch.optim.optimizer": "elastic_agent.integrations.optimizer_steps",
    "lightly_train": "elastic_agent.integrations.lightly_train",
    "transformers.trainer": "elastic_agent.integrations.transformers",
}
"""Modules of frameworks, and the package whose ``install()`` is called once the module is imported."""

IN_CHILDREN = ("multiprocessing.spawn", "torch.distributed.rendezvous")
"""Those that also the processes need which a worker starts. The others are for the worker itself."""

_preloaded: "dict[str, Callable[[], None]]" = {}
"""The ``install`` of packages that have been imported in advance."""


def preload() -> None:
    """Import the integrations of frameworks that are loaded, so that no worker forked from this process has to."""
    from importlib import import_module

    for name, package in INTEGRATIONS.items():
        if name in sys.modules:
            _preloaded[name] = import_module(package).install


def watch(names: "Collection[str]" = tuple(INTEGRATIONS)) -> None:
    """From now on, install each integration when its framework has been imported; nothing outside of elastic-agent."""
    if GENERATION not in os.environ or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in names:
        if name in sys.modules:
            install(name)
    sys.meta_path.insert(0, _Finder(names))


class _Finder:
    """Finds nothing itself: it has the other finders find the module, and adds a step after the import."""

    def __init__(self, names: "Collection[str]") -> None:
        self._names = names

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "types.ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name not in self._names:
            return None
        # Not importlib.util.find_spec, which imports the package around the module: Python holds the module's lock now,
        # and another thread, which imports the package, may hold the package's and wait for this one.
        others = (finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec"))
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment] # duck-typed, likewise
        return spec


class _Loader:
    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def create_module(self, spec: "ModuleSpec") -> "types.ModuleType | None":
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: "types.ModuleType") -> None:
        # The module is as without us, for those who look at its loader (inspect, pickle, reload).
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        install(module.__name__)


def install(name: str) -> None:
    """Install the integration of a module that has just been imported."""
    from importlib import import_module

    try:
        install = _preloaded.get(name) or import_module(INTEGRATIONS[name]).install
        install()
    except Exception as error:  # training works without it
        print(
            f"elastic_agent: {name} is used without its integration, because it failed: {error!r}",
            file=sys.stderr,
        )
        import traceback

        traceback.print_exc()
