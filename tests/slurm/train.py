"""The script that ``deploy/slurm`` runs in the tests: handles notices (see ``tests/faults/handling_notices.py``).

It saves and notes what it does in the job's folder, or in the one that ``--checkpoints`` names, until the file
``finish`` is there.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

TRAINING = Path(__file__).resolve().parents[1] / "faults" / "handling_notices.py"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=Path, default=Path())
    options = parser.parse_args()
    options.checkpoints.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(TRAINING.parent))  # of the modules beside it
    sys.argv = [str(TRAINING), "--folder", str(options.checkpoints)]
    runpy.run_path(str(TRAINING), run_name="__main__")


if __name__ == "__main__":
    main()
