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
    "multiprocessing.spawn": "post_import:install_in_children",
    "torch.distributed.distributed_c10d": "collectives:install",
    "torch.distributed.rendezvous": "collectives.private_names:limit_agent_store",
    "torch.optim.optimizer": "optimizer_steps:install",
    "lightly_train": "lightly_train:install",
    "transformers.trainer": "transformers:install",
}
"""Modules of frameworks, and the function that is called once the module is imported, below this package."""

IN_CHILDREN = ("multiprocessing.spawn", "torch.distributed.rendezvous")
"""Those that the processes need, too, which a worker starts as new interpreters; forked ones have inherited them."""

_preloaded: "dict[str, Callable[[], None]]" = {}
"""The functions of integrations that have been imported in advance."""


def preload() -> None:
    """Import the integrations of frameworks that are loaded, so that no worker forked from this process has to."""
    for name in INTEGRATIONS:
        if name in sys.modules:
            _preloaded[name] = _function_of(name)


def _function_of(name: str) -> "Callable[[], None]":
    from importlib import import_module

    module, _, function = INTEGRATIONS[name].partition(":")
    found: Callable[[], None] = getattr(import_module(f"elastic_agent.integrations.{module}"), function)
    return found


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
    try:
        begin = _preloaded.get(name) or _function_of(name)
        begin()
    except Exception as error:  # training works without it
        print(
            f"elastic_agent: {name} is used without its integration, because it failed: {error!r}\n",
            end="",
            file=sys.stderr,
        )
        import traceback

        traceback.print_exc()


# -- processes that a worker starts -----------------------------------------------------------------

_BEGIN = """
try:
    from elastic_agent.integrations import post_import
except ImportError:  # another interpreter, see multiprocessing.set_executable
    pass
else:
    post_import.watch(post_import.IN_CHILDREN)
"""


class _Begin:
    """Runs when a child unpickles what its parent tells it first."""

    def __reduce__(self) -> "tuple[Any, tuple[str, dict[str, Any]]]":
        return exec, (_BEGIN, {})


def install_in_children() -> None:
    """Install integrations in the processes that ``multiprocessing`` starts as new interpreters."""
    from multiprocessing import spawn

    original = spawn.get_preparation_data

    def with_integrations(name: str) -> "dict[str, Any]":
        return {**original(name), "elastic_agent": _Begin()}

    spawn.get_preparation_data = with_integrations
