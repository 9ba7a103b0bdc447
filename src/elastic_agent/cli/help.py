"""The help page, made from the settings' specs."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Sequence

from elastic_agent.config.settings import GROUPS, Spec, specs
from elastic_agent.exit_codes import MEANINGS, ExitCode

_INDENT = 26

_HEAD = """\
Usage: elastic-agent [run] [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]
       elastic-agent serve [OPTIONS]               host the store on a machine that does not train
       elastic-agent settings [OPTIONS] [--json]   print the settings in force and where each came from
       elastic-agent drain [NODE]                  have a node leave its run, all workers having saved
       elastic-agent stop                          end a run everywhere, all workers having saved
       elastic-agent stacks [RUN]                  have this machine's workers write their stacks, and go on
       elastic-agent version

One agent for each machine, started with the same command everywhere:

    elastic-agent --rdzv-endpoint HOST:29400 --nnodes 1:4 train.py

The agents agree who takes part, start the workers, and go on from the script's last checkpoint when a worker
fails or a machine is lost, joins or leaves. Every torchrun option is understood, with dashes or underscores.
A script called like a command is started as: elastic-agent run ./settings
"""

_SERVE_HEAD = """\
Usage: elastic-agent serve [--rdzv-endpoint HOST[:PORT]] [OPTIONS]

Hosts the store where agents meet, and coordinates their runs, on a machine that does not train (a login or head
node), for as many runs as like. The agents name it by --rdzv-endpoint; no agent needs to host the store then. It
listens at the endpoint's address if it has just one, else on every interface. Started again within the lease of its
runs (--lease-ttl), it finds them training as if nothing had been. It runs until SIGTERM or SIGINT.
"""

_SERVE_ENDPOINT = (
    "Where to serve: a name or address of this machine, and a port, 29400 if none is given. "
    "[default: this machine's host name]"
)

_TAIL = """\
Where a setting may come from, first one first: the option; the variable ELASTIC_AGENT_ and its name
(ELASTIC_AGENT_MAX_RESTARTS), then for torchrun's options PET_ and its name (PET_MAX_RESTARTS); the file named
by --config (max_restarts = 3); systemd's directories; the default."""


def help_page(width: int | None = None) -> str:
    """The whole page, folded to ``width`` columns (None: those of the terminal, at most 110)."""
    columns = min(width or _columns(), 110)
    parts = [_HEAD]
    for group in GROUPS:
        parts.append(f"{group}\n")
        parts += [_entry(spec, columns) for spec in specs() if spec.group == group]
        parts.append("")
    parts += [_TAIL, "", "Exit codes"]
    parts += [_folded(f"  {code.value}", meaning, columns, indent=7) for code, meaning in MEANINGS.items()]
    return "\n".join(parts)


def serve_page(names: Sequence[str], width: int | None = None) -> str:
    """The page of ``serve``, which has only the settings of these names."""
    columns = min(width or _columns(), 110)
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


def _columns() -> int:
    try:
        return int(os.environ.get("COLUMNS", "")) or 110
    except ValueError:
        pass
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or 110
    except (OSError, ValueError):
        return 110


def _entry(spec: Spec, columns: int) -> str:
    left = f"  {spec.short + ', ' if spec.short else ''}{spec.flag} {spec.kind.metavar}".rstrip()
    text = [spec.help]
    if spec.no_effect:
        text.append(f"Accepted, but has no effect here: {spec.no_effect}.")
    if spec.why:
        text.append(f"Differs from torchrun: {spec.why}.")
    text.append(f"[{_default(spec)}{_variables(spec)}]")
    return _folded(left, " ".join(text), columns, indent=_INDENT)


def _default(spec: Spec) -> str:
    return f"default: {spec.shown_default}"


def _variables(spec: Spec) -> str:
    """The variables that do not follow from the setting's name."""
    usual = {f"ELASTIC_AGENT_{spec.name.upper()}", f"PET_{spec.name.upper()}"}
    odd = [variable for variable in spec.variables if variable not in usual]
    return f"; variable: {', '.join(odd)}" if odd else ""


def _folded(left: str, text: str, columns: int, *, indent: int) -> str:
    margin = " " * indent
    lines = textwrap.wrap(text, max(columns - indent, 30), break_long_words=False, break_on_hyphens=False)
    if len(left) + 2 <= indent:
        return "\n".join([left.ljust(indent) + lines[0], *(margin + line for line in lines[1:])])
    return "\n".join([left, *(margin + line for line in lines)])
