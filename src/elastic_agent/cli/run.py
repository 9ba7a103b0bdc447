"""``elastic-agent [run] [options] SCRIPT [arguments]``: start this node's agent."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator, Sequence

from elastic_agent.config.directories import make_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved, load_settings
from elastic_agent.config.script import check_module, check_source
from elastic_agent.config.value_types import NO_SIGNAL
from elastic_agent.exit_codes import ExitCode


def run(argv: Sequence[str]) -> int:
    """Read the settings, set up the log, and hand over to the agent. Returns its exit code.

    Raises:
        UsageError: the settings are wrong; nothing was started.
    """
    resolved = load_settings(argv, os.environ)
    settings = resolved.settings
    if settings.runs_module and not settings.python_exec:
        check_module(settings.script)
    elif not (settings.run_path or settings.runs_program or settings.python_exec):
        check_source(settings.script)
    if settings.hosts:
        from elastic_agent.launcher.hosts import Terminal

        return Terminal(argv, resolved).run()
    return start_agent(resolved)


def start_agent(resolved: Resolved) -> int:
    """Start this node's agent, and return its exit code when its part is over.

    Raises:
        UsageError: the settings are wrong for this machine.
    """
    # Imported late: a mistake must be answered before that.
    from elastic_agent.agent.devices import check_open_files, likely_slots
    from elastic_agent.agent.worker_group.interruptions import StopSignals
    from elastic_agent.agent.worker_group.warm_start import start_guard
    from elastic_agent.config.secrets import take_secret_variables
    from elastic_agent.linux import become_subreaper
    from elastic_agent.sd_notify import SystemdNotifier

    stop_signals = StopSignals()
    if resolved.settings.notice_signal != NO_SIGNAL:
        stop_signals.catch_early(resolved.settings.notice_signal)
    check_open_files(likely_slots(resolved.settings.nproc_per_node) or 1)
    make_state_dir(resolved.settings.state_dir, os.environ)
    # Before anything is started that would inherit them:
    manager = SystemdNotifier.taken_from(os.environ)
    variables = take_secret_variables()
    become_subreaper()
    try:
        # First: workers inherit nothing of the rest.
        guard, stores = start_guard(resolved.settings)
    except OSError as error:
        raise UsageError(f"cannot start the guard process: {error}") from None
    with _without_rich():
        from elastic_agent.logs import configure_logging, get_logger

    settings = resolved.settings
    configure_logging(settings.log_format, settings.log_level, sys.stderr)
    log = get_logger()
    for note in resolved.notes:
        (log.warning if note.level == "warning" else log.info)(note.text)
    try:
        gc.disable()  # what is imported stays, and looking through it takes an eighth of the time
        try:
            from elastic_agent.agent.run_node import launch
        finally:
            gc.enable()
        return launch(settings, guard, stores, manager, stop_signals, variables)
    except UsageError:  # takes time to detect, such as --nproc-per-node gpu without a GPU
        raise
    except Exception:
        log.exception("internal error of elastic-agent")
        return ExitCode.INTERNAL


@contextlib.contextmanager
def _without_rich() -> Iterator[None]:
    """Hide the package rich, which structlog would import for a renderer that the agent does not use.

    Importing it takes a quarter of the time of all imports of the agent.
    """
    hidden = {name: None for name in ("rich",) if name not in sys.modules}
    sys.modules.update(hidden)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]
