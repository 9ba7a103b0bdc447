"""``python -m elastic_agent``, and where the installed ``elastic-agent`` command begins."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_agent.workers.spawner.python_program import PythonProgram


def begin() -> None:
    """Run the command. Ctrl-C during its import gives no traceback either.

    The agent's workers may be forks of it, made before it became an agent. Such a worker returns here and runs its
    script, so that the interpreter ends with the script as it would have ended without the agent.
    """
    worker = _command()
    if worker is None:
        return
    # As in workers/spawner/__main__.py; a function for both would be one more frame below the script's.
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
        raise failure


def _command() -> PythonProgram | None:
    """Returns in a worker only, with what it is to run; otherwise the process ends in it."""
    try:
        from elastic_agent.cli.main import console_main
        from elastic_agent.exit_codes import ExitCode
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        console_main()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)
    except BaseException as error:
        program: PythonProgram | None = getattr(error, "program", None)  # WorkerBornError
        if program is None:
            raise
        return program
    return None


if __name__ == "__main__":
    begin()
