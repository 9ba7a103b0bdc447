"""The help page, made from the settings' specs, and ``elastic-agent version``."""

from __future__ import annotations

import platform
import re
import shutil
import textwrap
from collections.abc import Sequence

from elastic_agent import installed_version
from elastic_agent.cli.arguments import CommandParser
from elastic_agent.cli.main import COMMANDS
from elastic_agent.config.settings import GROUPS, Spec, specs
from elastic_agent.exit_codes import MEANINGS, ExitCode
from elastic_agent.worker_variables import PREFIX

_INDENT = 26
_FEW_LETTERS = 20

_USED_MOST = frozenset(
    {
        "hosts",
        "nnodes",
        "nproc_per_node",
        "rdzv_endpoint",
        "rdzv_id",
        "max_restarts",
        "secret_file",
        "status_port",
        "on_event",
        "config",
    }
)

_HEAD = """\
Usage: elastic-agent [run] [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]
{commands}

Run one agent per machine, with the same command on every machine:
    elastic-agent --rdzv-endpoint HOST:29400 --nnodes 1:4 train.py

When a worker fails, or a machine is lost, joins or leaves, the agents restart all workers, and the script resumes from
its last checkpoint. torchrun's options are accepted. To run a script named as a command: elastic-agent run ./settings
"""

_SERVE_HEAD = """\
Usage: elastic-agent serve [--rdzv-endpoint HOST[:PORT]] [OPTIONS]

Hosts the rendezvous store and coordinates the runs that use it, on a machine that does not train (a login or head
node). One server can serve several runs. Pass its address to the agents as --rdzv-endpoint; no agent hosts the store
then. The server listens on the address of the endpoint if that resolves to a single address, else on all interfaces.
If it is restarted within the lease of its runs (--lease-ttl), their workers are not restarted. It runs until SIGTERM
or SIGINT.
"""

_SERVE_ENDPOINT = (
    "The address to serve at: a name or address of this machine, and a port (default 29400). "
    "[default: all addresses of this machine, port 29400]"
)

_TAIL = """\
Sources of a setting, in order of precedence: the option; the environment variable ELASTIC_AGENT_<NAME>
(ELASTIC_AGENT_MAX_RESTARTS), or for torchrun's options PET_<NAME> (PET_MAX_RESTARTS); the file named by --config
(max_restarts = 3); Slurm, or systemd's directories; the default."""


_VERSION_PAGE = """\
Usage: elastic-agent version

Prints the versions of elastic-agent, Python and torch. Include them in bug reports."""


def help_head() -> str:
    """Return the commands and an example: what fits on a terminal."""
    commands = (
        f"       elastic-agent {f'{name} {arguments}':<28}  {summary}"
        for name, (_, arguments, summary) in COMMANDS.items()
        if summary
    )
    return _HEAD.format(commands="\n".join(commands))


def help_page(width: int | None = None) -> str:
    """Return the whole page, folded to ``width`` columns (None: those of the terminal, at most 110)."""
    columns = min(width or shutil.get_terminal_size((110, 24)).columns, 110)
    parts = [help_head()]
    for group in GROUPS:
        parts.append(f"{group}\n")
        parts += [_entry(spec, columns) for spec in specs() if spec.group == group]
        parts.append("")
    parts += [_TAIL, "", "Exit codes"]
    parts += [_folded(f"  {code.value}", meaning, columns, indent=7) for code, meaning in MEANINGS.items()]
    return "\n".join(parts)


def short_page() -> str:
    """Return the commands, the options that are used most, and where the others are explained."""
    columns = min(shutil.get_terminal_size((110, 24)).columns, 110)
    parts = [help_head(), "Options that are used most\n"]
    for spec in (spec for spec in specs() if spec.name in _USED_MOST):
        meaning = f"{_beginning(spec.help)} [default: {spec.shown_default}]"
        parts.append(_folded(f"  {spec.flag} {spec.kind.metavar}", meaning, columns, indent=_INDENT))
    parts += [
        "",
        "All options and the exit codes: elastic-agent --help; of a command: elastic-agent COMMAND --help",
    ]
    return "\n".join(parts)


def serve_page(names: Sequence[str]) -> str:
    """Return the page of ``serve``, which has only the settings of these names."""
    columns = min(shutil.get_terminal_size((110, 24)).columns, 110)
    parts = [_SERVE_HEAD]
    for spec in specs():
        if spec.name == "rdzv_endpoint":
            parts.append(_folded(f"  {spec.flag} HOST[:PORT]", _SERVE_ENDPOINT, columns, indent=_INDENT))
        elif spec.name in names:
            parts.append(_entry(spec, columns))
    parts += ["", _TAIL, "", "Exit codes"]
    parts += [
        _folded(f"  {code.value}", MEANINGS[code], columns, indent=7)
        for code in (ExitCode.FINISHED, ExitCode.USAGE, ExitCode.NO_STORE, ExitCode.INTERNAL)
    ]
    return "\n".join(parts)


def _beginning(text: str) -> str:
    """Return the first sentence, and the second one if the first is a few words only."""
    first, *rest = re.split(r"(?<=\.) (?=[A-Z])", text)
    return first if len(first) > _FEW_LETTERS or not rest else f"{first} {rest[0]}"


def _entry(spec: Spec, columns: int) -> str:
    option = f"  {spec.short + ', ' if spec.short else ''}{spec.flag} {spec.kind.metavar}".rstrip()
    text = [spec.help]
    if spec.no_effect:
        text.append(f"Accepted, but has no effect here: {spec.no_effect}.")
    if spec.why:
        text.append(f"Differs from torchrun: {spec.why}.")
    text.append(f"[default: {spec.shown_default}{_variables(spec)}]")
    return _folded(option, " ".join(text), columns, indent=_INDENT)


def _variables(spec: Spec) -> str:
    """Return the variables that do not follow from the setting's name."""
    usual = {prefix + spec.name.upper() for prefix in (PREFIX, "PET_")}
    odd = [variable for variable in spec.variables if variable not in usual]
    return f"; variable: {', '.join(odd)}" if odd else ""


def _folded(option: str, text: str, columns: int, *, indent: int) -> str:
    margin = " " * indent
    lines = textwrap.wrap(text, max(columns - indent, 30), break_long_words=False, break_on_hyphens=False)
    if len(option) + 2 <= indent:
        return "\n".join([option.ljust(indent) + lines[0], *(margin + line for line in lines[1:])])
    return "\n".join([option, *(margin + line for line in lines)])


def version(argv: Sequence[str]) -> int:
    """Print the versions of this package, Python and torch."""
    CommandParser("version", _VERSION_PAGE, expected="no arguments").read(argv)
    print(
        f"elastic-agent {installed_version()} (Python {platform.python_version()}, torch {_torch_version()})",
        flush=True,
    )
    return ExitCode.FINISHED


def _torch_version() -> str:
    """Return torch's version from its package data; importing torch would take a second."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
