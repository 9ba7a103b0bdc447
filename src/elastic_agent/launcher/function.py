"""A worker that calls a function: ``python -m elastic_agent.launcher.function NAME``, see `agent_process.write_call`.

The function is in a folder that the environment names. What it returns is in ``results/GENERATION/RANK``, pickled.
"""

from __future__ import annotations

import os
import pickle
import runpy
import sys
import types
from pathlib import Path

from elastic_agent.launcher.agent_process import pickler
from elastic_agent.worker_variables import GENERATION, LAUNCH_FOLDER


def main() -> None:
    """Call the function; its exception goes into torch's error file as well."""
    from torch.distributed.elastic.multiprocessing.errors import record

    folder = Path(os.environ[LAUNCH_FOLDER])
    errors = folder / "errors" / str(os.getpid())
    errors.write_bytes(os.environb.get(b"TORCHELASTIC_ERROR_FILE", b""))
    record(_call)(folder)


def _call(folder: Path) -> None:
    sys.path[:], main_file, call = pickle.loads((folder / "call").read_bytes())
    if main_file is not None:
        _import_main(main_file)
    function, args = pickle.loads(call)
    value = function(*args)
    results = folder / "results" / os.environ[GENERATION]
    results.mkdir(exist_ok=True)
    draft = results / f".{os.environ['RANK']}"
    draft.write_bytes(pickler()[0](value))
    draft.replace(results / os.environ["RANK"])


def _import_main(path: str) -> None:
    """Make the program's main module, as multiprocessing has it: without what stands under ``__name__ ==
    "__main__"``."""
    module = types.ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


if __name__ == "__main__":
    main()
