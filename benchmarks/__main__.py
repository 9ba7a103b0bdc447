"""``python -m benchmarks [NAME…] [--quick] [--runs N] [--json FILE]``: measure, print tables, write JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .figures import Options, Result, circumstances, print_figures
from .stages import RECOVERY_STAGES, START_STAGES, print_stages

RESULTS = Path(__file__).with_name("results")
BENCHMARKS = {
    "start": "launch to every rank's first collective, beside torchrun",
    "recovery": "fault to the new world's first collective, by kind of fault, beside torchrun",
    "frameworks": "worker SIGKILL to the next training step: plain DDP, transformers, Lightning, beside torchrun",
    "survive": "state from memory, beside torch.save, torch.load and a checkpoint; workers that are kept",
    "rendezvous": "many nodes meet at one store, beside torch's own rendezvous",
}
STAGE_TABLES = {"start_stages": START_STAGES, "recovery_stages": RECOVERY_STAGES}
ISOLATED = "BENCH_ISOLATED"
UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child=TERM", "--mount-proc")


def main() -> int:
    options, names, json_file = parse()
    if not options.isolated and can_isolate():
        return isolate()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what runs is ended first
    facts = circumstances(options.isolated)
    print_circumstances(facts)
    results = []
    for name in names:
        print(f"\n{name}: {BENCHMARKS[name]}", flush=True)
        result: Result = importlib.import_module(f"benchmarks.{name}").run(options)
        print_result(result)
        results.append(result)
        write_json(json_file, as_json(facts, results))  # after each, so that an interruption loses little
    print(f"\nEvery sample: {json_file}")
    return 0


def parse() -> tuple[Options, list[str], Path]:
    width = 1 + max(map(len, BENCHMARKS))
    listed = "\n".join(f"  {name:{width}}{what}" for name, what in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"All of these, if none is named:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="which to run")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="most things once, leaving out what takes minutes",
    )
    parser.add_argument("--runs", type=int, default=5, help="how often each thing is measured (default: 5)")
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="where everything is written (default: a file named after the time in benchmarks/results)",
    )
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"{unknown[0]}: not known; there are {', '.join(BENCHMARKS)}")
    if given.runs < 1:
        parser.error(f"--runs {given.runs}: expected at least 1")
    options = Options(given.runs, given.quick, os.environ.get(ISOLATED) == "1")
    return options, given.names or list(BENCHMARKS), given.json or _usual_json_file()


def _usual_json_file() -> Path:
    return RESULTS / f"{time.strftime('%Y-%m-%d-%H%M%S')}.json"


def can_isolate() -> bool:
    """Root, with the tools for it: TCPStore looks up names at every connect, and a slow resolver is noise."""
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0


def isolate() -> int:
    """The same again, in a network namespace that has nothing but a loopback, and with which all processes end."""
    again = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
    up = 'ip link set lo up && exec "$@"'
    os.execvpe(UNSHARE[0], [*UNSHARE, "sh", "-c", up, "sh", *again], {**os.environ, ISOLATED: "1"})


def print_circumstances(facts: dict[str, Any]) -> None:
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    changed = " with uncommitted changes" if facts["uncommitted_changes"] else ""
    print(f"{facts['date']}, commit {facts['commit'][:10]}{changed}")
    print(f"{facts['cores']} cores ({facts['processor']}), {facts['memory_gb']} GB, {facts['system']}")
    print(f"Python {facts['python']}, {packages}")
    print(
        f"load average before: {facts['load_average_before']:.1f}; import torch: {facts['import_torch_s']:.2f} s"
    )
    print(f"network: {facts['network']}")


def print_result(result: Result) -> None:
    print()
    print_figures(result.figures)
    for table, names in STAGE_TABLES.items():
        if result.tables.get(table):
            print_stages(names, result.tables[table])
    for ratio in result.ratios:
        print(ratio)
    for note in result.notes:
        print(note)


def write_json(file: Path, content: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def as_json(facts: dict[str, Any], results: list[Result]) -> dict[str, Any]:
    return {
        **facts,
        "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
        "benchmarks": {
            result.benchmark: {
                "figures": [each.as_json() for each in result.figures],
                "ratios": [asdict(ratio) for ratio in result.ratios],
                "notes": result.notes,
                **result.tables,
            }
            for result in results
        },
    }


if __name__ == "__main__":
    sys.exit(main())
