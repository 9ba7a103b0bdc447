"""``python guarded.py PLAN RESULT``: runs warm workers with a guard and its spawner, but without an agent.

The plan is that of ``launchers.GuardedWarm``; the result is the exit code of each worker, by attempt and slot.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from elastic_agent.agent.worker_group.script_scan import curated_imports
from elastic_agent.agent.worker_group.warm_start import libraries_environment
from elastic_agent.linux import become_subreaper, boottime_s
from elastic_agent.workers.guard.client import (
    Exited,
    Guard,
    Launch,
    Ready,
    Spawned,
    SpawnerConfig,
    Stopped,
    Warm,
)

GUARD_S = 3600.0
"""Against hangs."""


def keep_warm(guard: Guard, script: str, module: bool, slots: int) -> None:
    folder = os.getcwd() if module else os.path.dirname(os.path.realpath(script))
    environment = libraries_environment(os.environ, slots)
    imports = curated_imports(script, module, folder)
    guard.keep_warm(SpawnerConfig(sys.executable, folder, (), environment, 2, imports))


def codes_of(guard: Guard, generation: int, launches: list[Launch]) -> dict[int, int]:
    """Run a generation to its end. Ends this process if a worker starts in another way than was asked for."""
    guard.spawn(generation, launches, warm_patience_s=GUARD_S)
    codes: dict[int, int] = {}
    stopped = False
    while not stopped:
        select.select([guard], [], [])
        for event in guard.read_events():
            if isinstance(event, Exited):
                codes[event.slot] = event.returncode
                if len(codes) == len(launches):
                    guard.stop(GUARD_S)
            elif isinstance(event, Stopped):
                stopped = True
            elif not isinstance(event, Ready | Warm | Spawned):
                sys.exit(f"not expected: {event}")
    return codes


def main() -> None:
    plan: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    become_subreaper()
    guard = Guard.start()
    guard.set_deadline(boottime_s() + GUARD_S)
    keep_warm(guard, plan["script"], plan["module"], len(plan["attempts"][0]))
    codes: list[dict[int, int]] = []
    for number, launches in enumerate(plan["attempts"], 1):
        codes.append(
            codes_of(
                guard, number, [Launch(**{**launch, "argv": tuple(launch["argv"])}) for launch in launches]
            )
        )
        if not any(codes[-1].values()):
            break
    Path(sys.argv[2]).write_text(json.dumps(codes))
    guard.close()


if __name__ == "__main__":
    main()
