"""The spawner: a process that has imported torch, from which workers are forked in milliseconds.

It forks *standbys*: processes that have everything imported and wait for the launch of the worker that they become.
Each is forked twice, so that the guard, which is a subreaper, becomes its parent: the guard signals, fences and
reaps a warm worker exactly as a cold one, and no worker dies with the spawner.

Run as `python -u workers/spawner/__main__.py ARGUMENTS`: those of `server.serve`, as a JSON array.

What is imported before the recorder begins is not recorded, so this imports nothing of its own before.
"""

import sys

_MODULES = frozenset(sys.modules)

import os  # noqa: E402 - every Python has imported it

_FOLDER = os.path.dirname(os.path.abspath(__file__))
if sys.path and sys.path[0] == _FOLDER:  # run by path: files next to this one are not modules to import
    del sys.path[0]
_PACKAGES = _FOLDER.rsplit(os.sep, 3)[0]
_ADDED = _PACKAGES not in sys.path
if _ADDED:
    sys.path.append(_PACKAGES)

from elastic_agent.workers.spawner.recording import Recorder  # noqa: E402 - needs the lines above

if __name__ == "__main__":
    recorder = Recorder(_MODULES)
    recorder.begin()
    import json

    from elastic_agent.workers.spawner import server

    if _ADDED:
        sys.path.remove(_PACKAGES)
    worker = server.serve(recorder, *json.loads(sys.argv[1]))
    # A worker from here on, with this frame alone between the interpreter and the script.
    failure = None
    try:
        exec(worker.code, worker.namespace) if worker.code else worker.run(*worker.arguments)
    except SystemExit:
        raise
    except BaseException as error:
        failure = error
    finally:
        worker.finish(failure)
    if failure is not None:  # not in the handler above, whose exception would become the context of others
        worker.report(failure)
        raise globals().pop("failure")  # it refers to the script's namespace, see PythonProgram.finish
