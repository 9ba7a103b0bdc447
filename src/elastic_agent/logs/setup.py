"""Sets the process's log up: structlog for the agent, the same form for what libraries log or warn about.

A process has one log, so what is kept here is kept once for the process, in ``_log``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TextIO

import structlog
from structlog.processors import TimeStamper, format_exc_info
from structlog.stdlib import BoundLogger, ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict, Processor

from elastic_agent.logs.render import console_line, journal_lines, json_line

_OWN = "elastic_agent"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_LIBRARY_LEVEL = logging.WARNING


class _Log:
    """The state of the process's log besides its configuration in ``logging`` and structlog."""

    def __init__(self) -> None:
        self.context: dict[str, Any] = {}  # replaced as a whole, so that other threads see a consistent one
        self.is_console = False
        self.is_beside = False
        """This process is a program with a log of its own, beside which the agent's log is written."""


_log = _Log()


def configure_logging(log_format: str, level: str, stream: TextIO) -> None:
    """Send the agent's log, library loggers and Python's warnings to ``stream``, all in one form.

    Calling it again replaces what the call before had set.

    Args:
        log_format: ``console``, ``json``, or ``auto`` for console with priorities where ``stream`` goes to systemd's
            journal, and without elsewhere.
        level: ``debug``, ``info``, ``warning`` or ``error``. Messages of libraries are logged from ``warning`` on,
            with ``debug`` from ``info`` on.
        stream: where the lines go, usually standard error.
    """
    _log.is_console = log_format != "json"
    handler = _LineHandler(stream)
    write: Callable[[Mapping[str, Any]], str] = json_line
    if log_format == "auto" and is_journal(stream, os.environ):
        write = journal_lines
    elif _log.is_console:
        write = partial(console_line, colours=stream.isatty())
    handler.setFormatter(_formatter(lambda _logger, _method, fields: write(fields)))
    wanted = _LEVELS[level]
    handler.setLevel(wanted)  # torch gives some of its loggers a level of their own
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO if wanted == logging.DEBUG else max(wanted, _LIBRARY_LEVEL))
    logging.getLogger(_OWN).setLevel(wanted)
    logging.captureWarnings(True)
    structlog.configure(
        processors=_processors(),
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=BoundLogger,
        cache_logger_on_first_use=False,
    )
    adopt_library_loggers()


def log_beside_program(level: str, stream: TextIO) -> None:
    """Send only the agent's log to ``stream``, for people, from a program that has a log of its own."""
    handler = _LineHandler(stream)
    handler.setFormatter(_formatter(lambda _logger, _method, fields: console_line(fields, colours=False)))
    own = logging.getLogger(_OWN)
    own.handlers, own.propagate = [handler], False
    own.setLevel(_LEVELS[level])
    _log.is_beside = True


def _processors() -> list[Processor]:
    return [
        structlog.stdlib.filter_by_level,
        *_BASICS,
        structlog.stdlib.PositionalArgumentsFormatter(),
        ProcessorFormatter.wrap_for_formatter,
    ]


def is_console() -> bool:
    """Return whether the log is for people to read, together with the output of workers; not JSON."""
    return _log.is_console


def get_logger(**fields: object) -> BoundLogger:
    """Return the agent's logger; ``fields`` go with each of its lines."""
    logger: BoundLogger
    if _log.is_beside:  # structlog's configuration is the program's
        own = logging.getLogger(_OWN)
        logger = structlog.wrap_logger(own, _processors(), wrapper_class=BoundLogger).bind(**fields)
    else:
        logger = structlog.stdlib.get_logger(_OWN, **fields)
    return logger


def bind_context(*, run: str | None = None, node: str | None = None, generation: int | None = None) -> None:
    """Set fields of every later line, in every thread. None leaves a field as it is."""
    given = {"run": run, "node": node, "generation": generation}
    _log.context = {**_log.context, **{name: value for name, value in given.items() if value is not None}}


def adopt_library_loggers() -> None:
    """Remove the handlers that torch gives its loggers when it is imported.

    Their lines then come out once and in our form. To be called after importing torch; handlers that write to
    files stay.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if not (name == "torch" or name.startswith("torch.")) or not isinstance(logger, logging.Logger):
            continue
        own = [handler for handler in logger.handlers if _writes_to_console(handler)]
        for handler in own:
            logger.removeHandler(handler)
        if own:
            logger.propagate = True


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Return whether ``stream`` goes to systemd's journal: ``JOURNAL_STREAM`` names its device and inode."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class _LineHandler(logging.Handler):
    """Writes each record at once, so that it does not mix with what others write."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with contextlib.suppress(OSError):  # the terminal is gone: not an error
                self._write(f"{self.format(record)}\n")
        except Exception:  # as logging's own handlers do: a log line may not end the program
            self.handleError(record)

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        self._stream.flush()


def _formatter(render: Processor) -> ProcessorFormatter:
    return ProcessorFormatter(
        foreign_pre_chain=[*_BASICS, add_logger_name, _without_last_newline],
        processors=[ProcessorFormatter.remove_processors_meta, format_exc_info, render],
    )


def _add_context(_logger: Any, _method: str, fields: EventDict) -> EventDict:
    """Add the context, over which fields of the call take precedence. structlog's own context is per thread."""
    for name, value in _log.context.items():
        fields.setdefault(name, value)
    return fields


def _without_last_newline(_logger: Any, _method: str, fields: EventDict) -> EventDict:
    """Remove the newline at the end, which Python's warnings have."""
    fields["event"] = fields["event"].rstrip("\n")
    return fields


_BASICS: tuple[Processor, ...] = (TimeStamper(key="time"), add_log_level, _add_context)
"""For every line, of our own and of libraries."""


def _writes_to_console(handler: logging.Handler) -> bool:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams
