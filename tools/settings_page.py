"""Writes ``docs/settings.md`` from the settings' specs: ``python tools/settings_page.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from elastic_agent.config.settings import GROUPS, Spec, specs
from elastic_agent.config.sources.rdzv_conf import MEANING, NO_EFFECT

_HEAD = """\
# Settings

<!-- Made by: python tools/settings_page.py > docs/settings.md (a test compares them) -->

All settings of elastic-agent. `elastic-agent settings [OPTIONS]` prints the effective settings and the source of
each value as a settings file. `elastic-agent init [OPTIONS]` writes a settings file to start
from, with what the options say and every other setting as a comment. `elastic-agent -h` lists what is used most.

`elastic-agent settings --schema > elastic-agent.schema.json` writes a JSON schema of these files, next to them: editors
that check TOML (taplo, Even Better TOML) find it by their line `#:schema`, complete keys and show what they mean.

## Sources

The first source that gives a value wins:

1. The command line. Dashes and underscores are equivalent (`--max-restarts`, `--max_restarts`). Options of
   the script follow the script.
2. Environment variables: `ELASTIC_AGENT_` and the name of the setting in capitals (`ELASTIC_AGENT_MAX_RESTARTS`);
   for options of torchrun also `PET_` and the name (`PET_MAX_RESTARTS`), as with torchrun. An empty variable
   counts as not set. The variables that the agent sets for its workers (`ELASTIC_AGENT_NODE_ID`,
   `ELASTIC_AGENT_GENERATION`, …) are not settings, so that an agent started by a worker does not take over its
   identity. To set the node id, use `ELASTIC_AGENT_SET_NODE_ID`.
3. The TOML file of `--config`, with one key per setting, named as below. `script` and `script_args` are used if
   the command line has no script.

       rdzv_endpoint = "node0:29400"
       nnodes = "2:4"
       lease_ttl = 3.0
       local_ranks_filter = [0, 1]
       rdzv_conf = { join_timeout = 1200 }
       script = "train.py"
       script_args = ["--epochs", "10"]

4. The environment of Slurm or systemd. In a Slurm step (`srun elastic-agent train.py`, one task per node): the
   number of nodes of the step; its first node and a port derived from the job id as endpoint; the job id (for an
   array with the task id) as run id; the node's name and index; and the GPUs that Slurm allocated on this node.
   Under systemd: `STATE_DIRECTORY` and `LOGS_DIRECTORY`.
5. The default.

Times are in seconds. On the command line, a switch needs no value; in a variable or file, use 1, true, yes, on,
or 0, false, no, off. An invalid value ends the command with exit code 2 and a one-line error that contains the
value, its source and the accepted values. An unknown option or key is an error, and an unknown `ELASTIC_AGENT_`
variable a warning; both suggest the nearest known name.
"""

_MEETING = """\
## Rendezvous endpoint

- Pass `--rdzv-endpoint HOST[:PORT]` on every node; the default port is 29400. Write an IPv6 address with a port
  as `[ADDRESS]:PORT`.
- Without an endpoint and with `--nnodes 1` (the default), the agent runs alone, as with `--standalone`. The same
  applies to port 0 with one node (torchrun's `localhost:0`).
- Without an endpoint and with more than one node, the command fails, because each machine would start a separate
  run.
- `--standalone` takes precedence over an endpoint, as in torchrun. With `--nnodes 1:4`, it runs on one node; with
  `--nnodes 2`, it is an error.
- torchrun's static rendezvous (`--nnodes 2 --node-rank 0 --master-addr HOST --master-port PORT`) is treated as
  c10d at that address, with the node rank as the preferred position of the node.
"""


def settings_page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for group in GROUPS:
        parts.append(f"## {group}\n")
        parts.append(
            _table(("Setting", "Default", "Meaning"), (_row(s) for s in specs() if s.group == group))
        )
        if group.startswith("Rendezvous"):
            parts += [_conf_tables(), _MEETING]
    return "\n".join(parts)


def _row(spec: Spec) -> tuple[str, str, str]:
    flag = f"{spec.flag} {spec.kind.metavar}".rstrip()
    name = f"`{flag}`" + (f", `{spec.short}`" if spec.short else "") + f"<br>`{spec.name}`"
    meaning = [spec.help]
    if not spec.kind.is_switch:
        meaning.append(f"Accepted: {spec.kind.accepted}.")
    if spec.no_effect:
        meaning.append(f"**No effect here**: {spec.no_effect}.")
    if spec.why:
        meaning.append(f"*Differs from torchrun*: {spec.why}.")
    names = ", ".join(f"`{variable}`" for variable in spec.variables)
    meaning.append(f"<br>{names}")
    plain = spec.shown_default == spec.default
    return name, f"`{spec.default}`" if plain else spec.shown_default, " ".join(meaning)


def _conf_tables() -> str:
    known = ((f"`{key}`", f"`{name}`") for key, name in MEANING.items())
    ignored = ((f"`{key}`", reason) for key, reason in NO_EFFECT.items())
    return "\n".join(
        [
            "### Keys of `--rdzv-conf`\n",
            "The option of a setting takes precedence over its key here. An unknown key is an error.\n",
            "`torchrun --rdzv-backend elastic` has the same keys.\n",
            _table(("Key", "Setting"), known),
            "Other keys of torch are accepted but have no effect. The agent logs this at startup:\n",
            _table(("Key", "Why"), ignored),
        ]
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(settings_page())
