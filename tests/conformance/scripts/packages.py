"""Imports each package of a table in a child process of its own, and writes down what it finds there then.

One JSON file for each worker and package, in the folder that CONFORMANCE_FOLDER names.
"""

import json
import os
import sys
import types

if len(sys.argv) == 1:  # never; what a script imports is read from its source
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import hydra  # noqa: F401
    import lightning  # noqa: F401
    import numpy  # noqa: F401
    import omegaconf  # noqa: F401
    import pandas  # noqa: F401
    import pytorch_lightning  # noqa: F401
    import safetensors  # noqa: F401
    import scipy  # noqa: F401
    import sklearn  # noqa: F401
    import tokenizers  # noqa: F401
    import torch  # noqa: F401
    import torchmetrics  # noqa: F401
    import transformers  # noqa: F401


def modules():
    """Return where each module comes from, the names in it, and whether it computes names when they are first used.

    And the functions and classes in it, with the places where they are defined: other modules may replace them.
    """
    found = {}
    for name, module in list(sys.modules.items()):
        space = getattr(module, "__dict__", {})
        if name.partition(".")[0] in ("elastic_agent", "__main__", "__mp_main__"):
            continue
        loader = type(space.get("__loader__")).__name__
        is_lazy = type(module) is not type(sys) or "__getattr__" in space
        names = sorted(key for key in space if isinstance(key, str))
        found[name] = [space.get("__file__"), loader, defined(space), names, is_lazy]
    return found


def defined(space):
    found = {}
    for key, value in list(space.items()):
        if isinstance(value, types.FunctionType):
            found[key] = f"{value.__code__.co_filename}:{value.__code__.co_name}"
        elif isinstance(value, type):
            found[key] = value.__qualname__  # packages set the module of classes that are not theirs
    return found


def random_numbers():
    """Return what the generators draw next; they were seeded before the import."""
    drawn = {"random": sys.modules["random"].random()}
    if "numpy.random" in sys.modules:
        drawn["numpy"] = sys.modules["numpy.random"].random()
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        drawn["torch"] = torch.rand(1, dtype=torch.float64).item()
        drawn["default type"] = str(torch.get_default_dtype())
        drawn["threads"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
    return drawn


def loggers():
    import logging

    found = {"": logging.getLogger(), **logging.Logger.manager.loggerDict}
    return {
        name: [
            logger.level,
            logger.disabled,
            logger.propagate,
            logger.parent and logger.parent.name,
            [
                [type(handler).__name__, getattr(handler, "stream", None) is sys.stderr]
                for handler in logger.handlers
            ],
        ]
        if isinstance(logger, logging.Logger)
        else type(logger).__name__
        for name, logger in found.items()
    }


def state():
    import atexit
    import signal
    import warnings

    files = {
        os.readlink(f"/proc/self/fd/{number}")
        for number in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{number}")
    }
    return {
        "environment": {
            name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)
        },
        "warning filters": [str(entry) for entry in warnings.filters],
        "loggers": loggers(),
        "exit functions": atexit._ncallbacks() - agents_functions(),
        "signals": {signum.name: str(signal.getsignal(signum)) for signum in signal.Signals},
        "finders": [type(finder).__name__ for finder in sys.meta_path],
        "path hooks": len(sys.path_hooks),
        "sys.path": sys.path,
        "kinds of files": sorted(
            os.path.basename(file) for file in files if not file.startswith(("pipe:", "socket:", "/proc/"))
        ),
        "start method": __import__("multiprocessing").get_start_method(allow_none=True),
    }


def agents_functions():
    """The number of functions at exit that a warm worker has beside the script's (documented)."""
    is_warm = any(type(finder).__name__ == "Preloaded" for finder in sys.meta_path)
    return AT_THE_END * is_warm


AT_THE_END = 6
"""One has the interpreter destroy all modules; those before it have SIGINT do nothing from then on."""

OF_LAUNCHERS = ("ELASTIC_AGENT_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "CONFORMANCE_")


def seed():
    import random

    random.seed(5)
    for name in ("numpy", "torch"):
        if name in sys.modules:
            module = sys.modules[name]
            module.manual_seed(5) if name == "torch" else module.random.seed(5)


def import_and_tell(package):
    seed()
    __import__(package)
    if package in ("numpy", "torch"):
        seed()
    found = {"modules": modules()}
    return {**found, "random numbers": random_numbers(), **state()}


def main():
    for package in sys.argv[1:]:
        if package not in ("numpy", "torch"):
            import torch  # once for all of them

            assert torch
        pid = os.fork()
        if pid == 0:
            told = import_and_tell(package)
            path = os.path.join(os.environ["CONFORMANCE_FOLDER"], f"{os.environ['RANK']}-{package}.json")
            with open(path, "w") as file:
                json.dump(told, file)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, package


main()
