"""``elastic-agent chaos [OPTIONS] -- SCRIPT [ARGUMENTS]``: train with faults on a simulated cluster."""

from __future__ import annotations

import os
import signal
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_agent.cli.arguments import CommandParser
from elastic_agent.config.errors import BadValueError, UsageError, did_you_mean, quoted
from elastic_agent.config.value_types import Kind, seconds, whole_number
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import escaped

if TYPE_CHECKING:
    from elastic_agent.testing.chaos import Options

PAGE = """\
Usage: elastic-agent chaos [OPTIONS] -- SCRIPT [ARGUMENTS OF THE SCRIPT]
       elastic-agent chaos [OPTIONS] -- -m MODULE [ARGUMENTS]

Tests whether a training script survives faults, on this machine: runs it in a cluster of several agents with real
workers, and injects faults. Prints a line for each fault, with the time until the next training step, and names classic
mistakes in the script with their remedies. The script needs no change.

    elastic-agent chaos --nodes 3 --faults worker-killed,node-killed,drain -- train.py --save-to {checkpoints}

The script runs in a copy of the current folder. {checkpoints} in its arguments is replaced by an empty folder that all
nodes share.

  --nodes N              nodes [default: 3]
  --min-nodes N          nodes with which training continues while others are missing [default: 1]
  --nproc-per-node N     workers of each node [default: 1]
  --faults NAME,NAME     faults to inject, in this order [default: worker-killed,worker-killed-saving,node-killed,drain]
  --seed S               decides which worker or node each fault hits [default: 0]
  --every SECONDS        time for which all nodes train before each fault [default: 5]
  --checkpoints DIR      folder that the script saves to, if it is not given by {checkpoints}; must be empty if absolute
  --shared DIR,DIR       folders outside the current one that all machines of the real cluster share
  --separate-folders     give each node its own working folder, like machines that share only --checkpoints
  --hang-timeout SECONDS time without progress after which workers count as hung [default: 10]
  --timeout SECONDS      time in which the script must make its next step [default: 120]
  --preload MODULES      as in the command of the real run: workers are forked with these modules already imported
  --folder DIR           keep everything that is written in this new folder [default: temporary; kept after failures]

Faults
"""

_END = """
Exit codes
  0      the script passed
  1      the script failed a check, contains a mistake, or ended before all faults were injected
  2      usage error: nothing was started
  70     internal error of elastic-agent: please report it"""


def chaos(argv: Sequence[str]) -> int:
    """Run the script with faults, print what happened, and return the exit code.

    Raises:
        UsageError: nothing was started.
    """
    from elastic_agent.testing.faults import DEFAULT, FAULTS

    faults = "\n".join(f"  {name:<22} {fault.help}" for name, fault in FAULTS.items())
    parser = CommandParser("chaos", f"{PAGE}{faults}\n{_END}")
    positive = seconds(0, above=True)
    switches = ("--separate-folders",)
    for option, default in (("--nodes", 3), ("--min-nodes", 1), ("--nproc-per-node", 1)):
        parser.add(option, whole_number(1), default=default)
    parser.add("--seed", whole_number(0), default=0)
    for option, duration_s in (("--every", 5.0), ("--hang-timeout", 10.0), ("--timeout", 120.0)):
        parser.add(option, positive, default=duration_s)
    parser.add("--faults", Kind("NAMES", ", ".join(FAULTS), _read_faults), default=DEFAULT)
    for option in ("--checkpoints", "--shared", "--preload", "--folder"):
        parser.add(option)
    for switch in switches:
        parser.add(switch, action="store_true")
    ours, script = _split(argv, switches)
    options = _options(parser.read(ours), script)
    from elastic_agent.testing.chaos import run_chaos

    signal.signal(signal.SIGTERM, _interrupt)  # its agents are to end with it
    try:
        report = run_chaos(script, options, lambda line: print(f"chaos: {escaped(line)}", flush=True))
    except OSError as error:
        raise UsageError(f"chaos: cannot make the folders of the run: {error}") from None
    print(report.verdict(), flush=True)
    return ExitCode.FINISHED if report.passed else ExitCode.FAILED


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _split(argv: Sequence[str], switches: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our options, and the script with its arguments: from the first word that is no option, or after ``--``."""
    arguments = list(argv)
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-m", "--"):
        takes_value = "=" not in arguments[at] and arguments[at] not in (*switches, "-h", "--help")
        at += 2 if takes_value else 1
    return arguments[:at], arguments[at + 1 :] if arguments[at : at + 1] == ["--"] else arguments[at:]


def _read_faults(text: str) -> tuple[str, ...]:
    from elastic_agent.testing.faults import FAULTS

    plan = tuple(name for name in text.split(",") if name)
    for name in plan:
        if name not in FAULTS:
            raise BadValueError(f"where {quoted(name)} is no fault", did_you_mean(name, FAULTS))
    return plan


def _options(given: Namespace, script: list[str]) -> Options:
    from elastic_agent.testing.chaos import Options

    if given.min_nodes > given.nodes:
        raise UsageError(
            f"chaos: --min-nodes: got {given.min_nodes}; expected at most the number of --nodes ({given.nodes})"
        )
    if given.nodes > 26:
        raise UsageError(f"chaos: --nodes: got {given.nodes}; expected at most 26")
    _check_nodes(given.faults, given.nodes)
    _check_script(script)
    return Options(
        nodes=given.nodes,
        min_nodes=given.min_nodes,
        nproc_per_node=given.nproc_per_node,
        faults=given.faults,
        seed=given.seed,
        every_s=given.every,
        checkpoints=_checkpoints(given.checkpoints),
        shared=[Path(os.path.abspath(folder)) for folder in (given.shared or "").split(",") if folder],
        separate_folders=given.separate_folders,
        hang_timeout_s=given.hang_timeout,
        timeout_s=given.timeout,
        folder=_new_folder(given.folder),
        agent_options=("--preload", given.preload) if given.preload else (),
    )


def _check_nodes(plan: Sequence[str], nodes: int) -> None:
    from elastic_agent.testing.faults import FAULTS

    names = [name for name in plan if FAULTS[name].least_nodes > nodes]
    if names:
        least = max(FAULTS[name].least_nodes for name in names)
        raise UsageError(f"chaos: --nodes: got {nodes}; {', '.join(names)} require at least {least}")


def _check_script(script: list[str]) -> None:
    if not script or script == ["-m"]:
        raise UsageError(
            "chaos: no script given; expected elastic-agent chaos [OPTIONS] -- train.py [ARGUMENTS]"
        )
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise UsageError(
            f"chaos: the script {quoted(script[0])} does not exist; expected a Python script, or -m MODULE"
        )


def _checkpoints(text: str | None) -> Path | None:
    if text is None:
        return None
    path = Path(text)
    if path.is_absolute() and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"chaos: --checkpoints: {quoted(text)} contains files; expected an empty folder")
    if ".." in path.parts or path == Path("."):
        raise UsageError(
            f"chaos: --checkpoints: got {quoted(text)}; expected a folder below the current one, or a full path"
        )
    return path


def _new_folder(text: str | None) -> Path | None:
    if text is not None and os.path.exists(text):
        raise UsageError(f"chaos: --folder: {quoted(text)} exists already; expected a name for a new folder")
    return None if text is None else Path(os.path.abspath(text))
