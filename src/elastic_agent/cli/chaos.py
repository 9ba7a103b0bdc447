"""``elastic-agent chaos [OPTIONS] -- SCRIPT [ARGUMENTS]``: train with faults on a simulated cluster."""

from __future__ import annotations

import os
import signal
from argparse import ArgumentError
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_agent.config.errors import UsageError, did_you_mean, quoted
from elastic_agent.config.parser import HelpRequested, Parser
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import escaped

if TYPE_CHECKING:
    from argparse import Namespace

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

_NUMBERS = {"--nodes": 3, "--min-nodes": 1, "--nproc-per-node": 1}
_SECONDS = {"--every": 5.0, "--hang-timeout": 10.0, "--timeout": 120.0}
_TEXTS = ("--faults", "--seed", "--checkpoints", "--shared", "--preload", "--folder")
_SWITCHES = ("--separate-folders",)


def chaos(argv: Sequence[str]) -> int:
    """Run the script with faults, print what happened, and return the exit code.

    Raises:
        UsageError: nothing was started.
    """
    ours, script = _split(argv)
    if any(word in ("-h", "--help") for word in ours):
        raise HelpRequested(_page())
    options = _options(_parse(ours), script)
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


def _page() -> str:
    from elastic_agent.testing.faults import FAULTS

    return PAGE + "\n".join(f"  {name:<22} {fault.help}" for name, fault in FAULTS.items()) + "\n" + _END


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return our options, and the script with its arguments: from the first word that is no option, or after ``--``."""
    words = list(argv)
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "--"):
        takes_value = words[at] in (*_NUMBERS, *_SECONDS, *_TEXTS)
        at += 2 if takes_value else 1
    return words[:at], words[at + 1 :] if words[at : at + 1] == ["--"] else words[at:]


def _parse(words: Sequence[str]) -> Namespace:
    parser = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in (*_NUMBERS, *_SECONDS, *_TEXTS):
        parser.add_argument(option)
    for option in _SWITCHES:
        parser.add_argument(option, action="store_true")
    try:
        found, unknown = parser.parse_known_args(words)
    except ArgumentError as error:
        raise UsageError(f"chaos: {error.argument_name} requires a value") from None
    if unknown:
        known = (*_NUMBERS, *_SECONDS, *_TEXTS, *_SWITCHES)
        hint = (
            did_you_mean(unknown[0].partition("=")[0], known)
            or "elastic-agent chaos --help lists all options"
        )
        raise UsageError(f"chaos: unknown option {quoted(unknown[0])}; {hint}")
    return found


def _options(found: Namespace, script: list[str]) -> Options:
    from elastic_agent.testing.chaos import Options

    given = vars(found)
    numbers = {name: _number(name, given[_key(name)], default) for name, default in _NUMBERS.items()}
    seconds = {name: _positive(name, given[_key(name)], default) for name, default in _SECONDS.items()}
    nodes, least = numbers["--nodes"], numbers["--min-nodes"]
    if least > nodes:
        raise UsageError(f"chaos: --min-nodes: got {least}; expected at most the number of --nodes ({nodes})")
    if nodes > 26:
        raise UsageError(f"chaos: --nodes: got {nodes}; expected at most 26")
    _check_script(script)
    return Options(
        nodes=nodes,
        min_nodes=least,
        nproc_per_node=numbers["--nproc-per-node"],
        faults=_faults(found.faults, nodes),
        seed=_seed(found.seed),
        every_s=seconds["--every"],
        checkpoints=_checkpoints(found.checkpoints),
        shared=[Path(os.path.abspath(one)) for one in (found.shared or "").split(",") if one],
        separate_folders=found.separate_folders,
        hang_timeout_s=seconds["--hang-timeout"],
        timeout_s=seconds["--timeout"],
        folder=_new_folder(found.folder),
        agent_options=("--preload", found.preload) if found.preload else (),
    )


def _key(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _number(option: str, text: str | None, default: int) -> int:
    if text is None:
        return default
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"chaos: {option}: got {quoted(text)}; expected a whole number of at least 1")
    return int(text)


def _positive(option: str, text: str | None, default: float) -> float:
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e6:
        raise UsageError(f"chaos: {option}: got {quoted(text)}; expected a positive number")
    return value


def _seed(text: str | None) -> int:
    if text is None:
        return 0
    if not text.isdecimal():
        raise UsageError(f"chaos: --seed: got {quoted(text)}; expected a whole number")
    return int(text)


def _faults(text: str | None, nodes: int) -> tuple[str, ...]:
    from elastic_agent.testing.faults import DEFAULT, FAULTS, needs_nodes

    plan = DEFAULT if text is None else tuple(name for name in text.split(",") if name)
    for name in plan:
        if name not in FAULTS:
            hint = did_you_mean(name, FAULTS) or f"expected {', '.join(FAULTS)}"
            raise UsageError(f"chaos: --faults: got {quoted(name)}; {hint}")
    if needs_nodes(plan) > nodes:
        names = ", ".join(name for name in plan if FAULTS[name].least_nodes > nodes)
        raise UsageError(f"chaos: --nodes: got {nodes}; {names} require at least {needs_nodes(plan)}")
    return plan


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
