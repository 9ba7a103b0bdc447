"""Python imports this before the script of a cold worker (`with_startup_hook` in `workers/guard/cold.py`).

It starts the integrations of frameworks and `faulthandler`, leaves as little else as possible, and then imports the
`sitecustomize` that Python would have imported. The worker may be a wrapper that starts another version of Python, one
without this package.
"""

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


def _watch() -> None:
    """Have the frameworks adapted that the script imports; that takes no module of this package before."""
    before = set(sys.modules)
    try:
        from elastic_agent.integrations.post_import import watch
    except ImportError:  # another interpreter
        return
    watch()
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "elastic_agent":
            del sys.modules[name]


def _write_stacks_of_crashes() -> None:
    """Have Python say in which line of the script native code crashed."""
    is_known = "faulthandler" in sys.modules
    import faulthandler

    faulthandler.enable(file=2)
    if not is_known:
        del sys.modules["faulthandler"]


_leave()
_watch()
_write_stacks_of_crashes()
del sys.modules[__name__]
__import__(__name__)  # if there is none, the module `site` ignores that error of this name
