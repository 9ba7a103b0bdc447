"""Python imports this before the script of a cold worker, see :mod:`elastic_agent.workers.cold_start`.

It starts the integrations of frameworks, leaves no trace in the environment, and then imports the `sitecustomize` that
Python would have imported. The worker may be a wrapper that starts another version of Python, one without this package.
"""

import importlib
import os
import sys


def _leave() -> None:
    """Take this folder out of the search path, of this process and of those that it starts."""
    folder = os.path.dirname(os.path.abspath(__file__))
    before, _, rest = os.environ.get("PYTHONPATH", "").partition(os.pathsep)
    if before == folder:
        if rest:
            os.environ["PYTHONPATH"] = rest
        else:
            del os.environ["PYTHONPATH"]
    sys.path[:] = [entry for entry in sys.path if entry != folder]
    sys.path_importer_cache.pop(folder, None)


def _import_the_usual_one() -> None:
    ours = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)


_leave()
try:
    from elastic_agent.integrations.post_import import watch
except ImportError:  # another interpreter
    pass
else:
    watch()
_import_the_usual_one()
