"""Log lines for events whose message does not depend on earlier events; the console reporter logs the others."""

from __future__ import annotations

import pwd
import signal
from collections.abc import Sequence

from elastic_agent.agent import events
from elastic_agent.logs import get_logger
from elastic_agent.protocol import PROMPT, count
from elastic_agent.rendezvous.events import PrepareFailed
from elastic_agent.workers.guard.client import (
    Cold,
    GuardLost,
    NotPreloaded,
    SpawnerDied,
    StopDelayed,
    Survivor,
    WarmLate,
)

SHOWN_SURVIVORS = 8


def log_event(event: events.Event) -> None:
    """Log it, if it is of interest to a user."""
    _log_workers(event)
    log = get_logger()
    match event:
        case PrepareFailed(failure=failure):
            log.warning("the generation cannot start on this node", reason=failure.summary)
        case GuardLost(returncode=returncode):
            log.error("the guard process died; starting a new one", returncode=returncode)
        case events.GenerationEnded(facts={"working_folder": observed}):
            log.warning(f"{observed}; start the run again from a folder that stays")
        case events.Requeued(failed=failed, words=words):
            (log.error if failed else log.info)(words)
        case Cold(reason=reason, detail=detail):
            output = f"; output of the spawner:\n{detail.rstrip()}" if detail else ""
            log.warning(f"workers start cold, which takes longer: {reason}{output}")
        case NotPreloaded(reason=reason):
            log.warning(f"the packages that the script imports are not preloaded, only torch is: {reason}")
        case SpawnerDied(how=how):
            log.warning(f"the spawner died ({how}); starting a new one, running workers are not affected")
        case WarmLate(generation=generation, importing=importing):
            late = "has not forked all workers in time and is being replaced"
            why = "is still importing" if importing else late
            log.warning(f"the spawner {why}: starting the workers of generation {generation} cold")


def _log_workers(event: events.Event) -> None:
    log = get_logger()
    match event:
        case events.NoticeGiven():
            _log_notice(event)
        case events.WorkersInterrupted(failure=failure):
            log.info(failure.summary)
        case StopDelayed(alive=alive, waited_s=waited_s):
            log.warning(_not_ended(alive, waited_s))
        case events.WorkersSucceeded() | events.WorkersSaved():
            if event.unkillable:  # they outlived workers that are done: no reason to take the success back
                log.warning(
                    "processes left behind by the workers are stuck in the kernel", pids=event.unkillable
                )
            if isinstance(event, events.WorkersSucceeded):
                log.info(f"all workers of this node succeeded in generation {event.generation}")


def _log_notice(event: events.NoticeGiven) -> None:
    log, notice, workers = get_logger(), event.notice, event.workers
    remaining = f"{round(notice.left_s, 1):g} s"
    after = "then the run ends" if notice.ends else "then a new generation starts"
    if notice.cause not in PROMPT and workers.told == 0:
        log.warning(
            f"{notice.words}: no worker here has asked for notices so far, or handles the notice signal; those that do "
            f"not get SIGTERM in {remaining}, then the run ends",
            cause=notice.cause.value,
        )
        return
    if workers.told:
        advice = f"all workers have {remaining} to save and exit, {after}"
    elif workers.told is None:
        advice = f"workers that handle notices have {remaining} to save and exit, {after}"
    elif workers.catching:
        handlers = f"{count(workers.catching, 'worker')} handle{'s' * (workers.catching == 1)}"
        handled = "" if workers.stop is signal.SIGINT else f", which {handlers}"
        advice = (
            f"no worker here handles notices: they get {workers.stop.name}{handled}, {after}; to have all of them "
            "save first, see docs/script.md, Notices"
        )
    else:
        advice = (
            f"no worker here handles notices or {workers.stop.name}: they end without saving, {after}; to have all of "
            "them save first, see docs/script.md, Notices"
        )
    log.info(f"{notice.words}: {advice}", cause=notice.cause.value)


def _not_ended(alive: Sequence[Survivor], waited_s: float) -> str:
    """Name the processes of the workers that SIGKILL does not end, and say what can be done."""
    shown = [_survivor(process) for process in alive[:SHOWN_SURVIVORS]]
    if len(alive) > SHOWN_SURVIVORS:
        shown.append(f"{len(alive) - SHOWN_SURVIVORS} more")
    foreign = [str(process.pid) for process in alive if process.foreign_user is not None]
    remedy = (
        f"to end what this agent may not end: sudo kill -9 {' '.join(foreign)}"
        if foreign
        else "usually a device driver or a file system holds them: see dmesg; often only a reboot helps"
    )
    processes = ", ".join(shown)
    return f"waiting for processes of the workers that SIGKILL has not ended in {waited_s:g} s: {processes}; {remedy}"


def _survivor(process: Survivor) -> str:
    if process.foreign_user is None:
        return f"{process.pid} ({process.name}, state {process.state})"
    try:
        user = pwd.getpwuid(process.foreign_user).pw_name
    except KeyError:
        user = str(process.foreign_user)
    return f"{process.pid} ({process.name}, state {process.state}, user {user})"
