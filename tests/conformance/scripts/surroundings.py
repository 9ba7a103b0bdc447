"""Changes what imports depend on, and then imports: each case in a child process, which prints what came of it.

The packages that are not well known are in folders that the test makes.
"""

import json
import os
import sys

HERE = os.environ["CONFORMANCE_FOLDER"]
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
PACKAGES = os.path.join(HERE, "site-packages")

if len(sys.argv) > 1:  # never; what a script imports is read from its source
    import hydra  # noqa: F401
    import numpy  # noqa: F401
    import omegaconf  # noqa: F401
    import torch  # noqa: F401


def a_vendored_copy():
    sys.path.insert(0, os.path.join(HERE, "third_party"))
    import omegaconf
    import plain

    return [omegaconf.WHO, plain.WHO, os.path.relpath(plain.__file__, HERE)]


def a_module_under_a_flag():
    import torch

    if ATTEMPT == 0:
        import doubles

        assert doubles
    return [str(torch.get_default_dtype()), sys.excepthook is sys.__excepthook__, "doubles" in sys.modules]


def modules_that_seed_and_draw():
    import random

    import seeds

    seeded = [random.random(), seeds.numpy.random.random(), seeds.torch.rand(1).item()]
    random.seed(7)
    seeds.torch.manual_seed(7)
    import draws

    return [seeded, random.random(), draws.torch.rand(1).item()]


def variables_set_by_a_helper():
    import plain

    plain.set_variables(HERE)
    import huggingface_hub.constants
    import reads

    return [reads.VALUE, os.path.relpath(huggingface_hub.constants.HF_HOME, HERE)]


def patched_classes():
    import torch

    class Patched(torch.nn.LayerNorm):
        pass

    torch.nn.LayerNorm = torch.nn.Linear = Patched
    import captures
    import transformers.pytorch_utils as utilities

    return [captures.CAPTURED.__name__, [layer.__name__ for layer in utilities.ALL_LAYERNORM_LAYERS]]


def functions_that_packages_replace():
    import typing

    def origins():
        return [typing._collect_parameters.__module__, typing._check_generic.__module__]

    before = origins()
    import torch

    return [before, origins(), torch.__name__]


def a_blocked_module():
    sys.modules["pandas"] = None
    try:
        import datasets
    except ImportError as error:
        return repr(error)
    return datasets.__name__


def arguments_and_main():
    sys.argv = ["other", "arguments"]
    os.environb[b"SET_AS_BYTES"] = b"yes"
    import tells

    return [tells.ARGV, os.path.basename(tells.FILE), tells.BYTES]


def a_logger_that_was_set_up():
    import logging.config

    logging.getLogger("lightning.pytorch").setLevel(logging.CRITICAL)
    logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})
    known = sorted(logging.Logger.manager.loggerDict)
    import lightning

    logger = logging.getLogger("lightning.pytorch")
    return [known, logger.level, logger.disabled, len(logger.handlers), lightning.__name__]


def another_finder():
    asked = []

    class Finder:
        @staticmethod
        def find_spec(name, path=None, target=None):
            asked.append(name)

    sys.meta_path.insert(0, Finder)
    import hydra  # not one with compiled code, which is handed out in spite of the finder

    return [hydra.RELEASE, asked]


def a_module_that_is_removed_and_imported_again():
    import omegaconf

    before, classes = omegaconf, omegaconf.DictConfig
    for name in [name for name in sys.modules if name.partition(".")[0] == "omegaconf"]:
        del sys.modules[name]
    import omegaconf

    return [omegaconf is before, omegaconf.DictConfig is classes, omegaconf.__file__]


def a_package_that_is_upgraded():
    import hydra

    return hydra.RELEASE


def names_by_lot():
    """Must differ each time."""
    import lots

    assert os.path.exists(lots.SCRATCH)
    assert str(os.getpid()) in lots.SCRATCH
    return [lots.ID, lots.TOKEN, lots.SCRATCH]


CASES = (
    a_vendored_copy,
    a_module_under_a_flag,
    modules_that_seed_and_draw,
    functions_that_packages_replace,
    arguments_and_main,
    another_finder,
    a_module_that_is_removed_and_imported_again,
    a_package_that_is_upgraded,
    names_by_lot,
)
WITH_FRAMEWORKS = (
    variables_set_by_a_helper,
    patched_classes,
    a_blocked_module,
    a_logger_that_was_set_up,
)

NOT_COMPARED = ("elastic_agent", "_cython_", "_cyutility", "cython_runtime")
"""Packages compiled by one version of Cython share modules, which are noted for the first of these packages only."""


def main(cases):
    for case in cases:
        pid = os.fork()
        if pid == 0:
            told = case()
            modules = sorted(name for name in sys.modules if not name.startswith(NOT_COMPARED))
            print(json.dumps([case.__name__, told, modules]), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0, case.__name__
    with open(os.path.join(PACKAGES, "hydra", "__init__.py"), "w") as file:
        file.write(f"RELEASE = {ATTEMPT + 2}  # {'newer' * ATTEMPT}\n")
    sys.exit(1 if ATTEMPT == 0 else 0)


if __name__ == "__main__":
    main(CASES)
