"""``python -m tests.soak --backend c10d --hours 1 --seed 1``: see docs/chaos.md."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from elastic_agent.testing import ClusterError

from .report import memory_problem, table
from .same import differences, differing_tensors, undisturbed
from .soak import BACKENDS, SoakTest


def main() -> int:
    """Exit code 0 if everything is as it would be without faults, 1 if not."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _interrupt)
    passed = True
    for backend in arguments.backend or BACKENDS:
        folder = Path(tempfile.mkdtemp(prefix=f"elastic-agent-soak-{backend}-"))
        problems = soak(backend, folder, arguments.seed, arguments.hours * 3600)
        passed = passed and not problems
        if problems:
            print(f"soak: FAILED; everything that was written is in {folder}", flush=True)
        else:
            shutil.rmtree(folder)
    return 0 if passed else 1


def soak(backend: str, folder: Path, seed: int, duration_s: float) -> list[str]:
    """Run it on one backend, print the table, and return what is wrong."""
    test = SoakTest(
        backend, folder / "disturbed", seed, duration_s, lambda line: print(f"{backend}: {line}", flush=True)
    )
    result = test.result
    try:
        test.run()
    except ClusterError as error:
        (folder / "story.txt").write_text(str(error))
        result.problems.append(str(error).splitlines()[0])
    else:
        if (grown := memory_problem(result.witness)) is not None:
            result.problems.append(grown)
        wanted, checkpoint = undisturbed(folder / "undisturbed", result.steps, 600 + duration_s)
        result.problems += differences(test.cluster.records("step"), test.cluster.course, wanted)
        if differing := differing_tensors(folder / "disturbed/checkpoints/model.pt", checkpoint):
            result.problems.append(
                f"the last checkpoint differs from the undisturbed run's: {', '.join(differing)}"
            )
    print(table(result), flush=True)
    return result.problems


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument(
        "--backend", action="append", choices=[*BACKENDS], help="both by default, one after the other"
    )
    parser.add_argument("--hours", type=float, default=1.0, help="for each backend")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
