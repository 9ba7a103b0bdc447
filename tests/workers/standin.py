"""A small agent: does with its guard what JSON says, a line each, and writes the events; both by descriptors."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import sys
from typing import Any

from elastic_agent.linux import become_subreaper, boottime_s
from elastic_agent.workers.guard.client import Guard, GuardLost, Launch, SpawnerConfig, kill_orphans

PATIENCE_S = 300.0
COMMANDS, TOLD = int(sys.argv[1]), int(sys.argv[2])


def say(name: str, **fields: Any) -> None:
    os.write(TOLD, json.dumps({"name": name, **fields}).encode() + b"\n")


def obey(guard: Guard, message: dict[str, Any]) -> None:
    command = message["do"]
    if command == "deadline":
        guard.set_deadline(boottime_s() + message["in_s"])
        say("DeadlineSet")
    elif command == "spawn":
        launches = [Launch(**{**fields, "argv": tuple(fields["argv"])}) for fields in message["launches"]]
        guard.spawn(message["generation"], launches, warm_patience_s=PATIENCE_S)
    elif command == "stop":
        guard.stop(message["grace_s"])
    elif command == "keep_warm":
        keep_warm(guard, message["script"], message["module"], message["slots"])
    elif command == "fork":
        if (pid := os.fork()) == 0:
            select.select((), (), (), 1000)
            os._exit(0)
        say("Forked", pid=pid)


def keep_warm(guard: Guard, script: str, module: bool, slots: int) -> None:
    """Keep a spawner as for an agent that runs this script."""
    from elastic_agent.agent.worker_group.script_scan import curated_imports
    from elastic_agent.agent.worker_group.warm_start import libraries_environment

    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    environment = libraries_environment(os.environ, slots)
    imports = curated_imports(script, module, folder)
    guard.keep_warm(SpawnerConfig(sys.executable, folder, (), environment, 2, imports))


def main() -> None:
    become_subreaper()
    guard = Guard.start(PATIENCE_S)
    guard.set_deadline(boottime_s() + 1000)
    say("standin", guard=guard.pid)
    rest = b""
    while True:
        ready = select.select((COMMANDS, guard), (), ())[0]
        if guard in ready:
            for event in guard.read_events():
                say(type(event).__name__, **dataclasses.asdict(event))
                if isinstance(event, GuardLost):
                    say("Orphans", left=kill_orphans(PATIENCE_S))
                    return
        if COMMANDS in ready:
            data = os.read(COMMANDS, 1 << 20)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                obey(guard, json.loads(line))


if __name__ == "__main__":
    main()
