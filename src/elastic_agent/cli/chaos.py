"""``elastic-agent chaos [OPTIONS] -- SCRIPT [ARGUMENTS]``: train with faults on a simulated cluster."""

from __future__ import annotations

import os
import signal
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
  --checkpoints DIR      folder below the current one that the script saves to, if it is not given by {checkpoints}
  --separate-folders     give each node its own working folder, like machines that share only the one for checkpoints
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

_SWITCH = "--separate-folders"


def chaos(argv: Sequence[str]) -> int:
    """Run the script with faults, print what happened, and return the exit code.

    Raises:
        UsageError: nothing was started.
    """
    from elastic_agent.testing.chaos import Options, run_chaos
    from elastic_agent.testing.faults import FAULTS

    faults = "\n".join(f"  {name:<22} {fault.help}" for name, fault in FAULTS.items())
    parser = CommandParser("chaos", f"{PAGE}{faults}\n{_END}")
    for option in ("--nodes", "--min-nodes", "--nproc-per-node"):
        parser.add(option, whole_number(1))
    parser.add("--seed", whole_number(0))
    for option in ("--every", "--hang-timeout", "--timeout"):
        parser.add(option, seconds(0, above=True))
    parser.add("--faults", Kind("NAMES", ", ".join(FAULTS), _read_faults))
    for option in ("--checkpoints", "--preload", "--folder"):
        parser.add(option)
    parser.add(_SWITCH, action="store_true")
    own, script = _split(argv)
    given = vars(parser.read(own))
    options = Options(
        **{name: value for name, value in given.items() if name != "words" and value is not None}
    )
    _check(options, script)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its agents are to end with it
    try:
        report = run_chaos(script, options, lambda line: print(f"chaos: {escaped(line)}", flush=True))
    except OSError as error:
        raise UsageError(f"chaos: cannot make the folders of the run: {error}") from None
    print(report.verdict(), flush=True)
    return ExitCode.FINISHED if report.passed else ExitCode.FAILED


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our options, and the script with its arguments: from the first word that is no option, or after ``--``."""
    arguments = list(argv)
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-m", "--"):
        takes_value = "=" not in arguments[at] and arguments[at] not in (_SWITCH, "-h", "--help")
        at += 2 if takes_value else 1
    return arguments[:at], arguments[at + 1 :] if arguments[at : at + 1] == ["--"] else arguments[at:]


def _read_faults(text: str) -> tuple[str, ...]:
    from elastic_agent.testing.faults import FAULTS

    plan = tuple(name for name in text.split(",") if name)
    for name in plan:
        if name not in FAULTS:
            raise BadValueError(f"where {quoted(name)} is no fault", did_you_mean(name, FAULTS))
    return plan


def _check(given: Options, script: list[str]) -> None:
    from elastic_agent.testing.faults import FAULTS

    if given.min_nodes > given.nodes:
        raise UsageError(
            f"chaos: --min-nodes: got {given.min_nodes}; expected at most the number of --nodes ({given.nodes})"
        )
    if given.nodes > 26:
        raise UsageError(f"chaos: --nodes: got {given.nodes}; expected at most 26")
    names = [name for name in given.faults if FAULTS[name].least_nodes > given.nodes]
    if names:
        least = max(FAULTS[name].least_nodes for name in names)
        raise UsageError(f"chaos: --nodes: got {given.nodes}; {', '.join(names)} require at least {least}")
    if not script or script == ["-m"]:
        raise UsageError(
            "chaos: no script given; expected elastic-agent chaos [OPTIONS] -- train.py [ARGUMENTS]"
        )
    if script[0] != "-m" and not os.path.isfile(script[0]):
        raise UsageError(
            f"chaos: the script {quoted(script[0])} does not exist; expected a Python script, or -m MODULE"
        )
    below = Path(given.checkpoints or "checkpoints")
    if below.is_absolute() or ".." in below.parts or below == Path("."):
        raise UsageError(
            f"chaos: --checkpoints: got {quoted(given.checkpoints)}; expected a folder below the current one, or "
            "{checkpoints} in the arguments of the script"
        )
    if given.folder is not None and os.path.exists(given.folder):
        raise UsageError(
            f"chaos: --folder: {quoted(given.folder)} exists already; expected a name for a new folder"
        )
