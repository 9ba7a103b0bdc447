"""``elastic-agent init [options]``: a settings file to start from, with a comment for each setting."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from pathlib import Path

from elastic_agent.cli.settings import as_toml_entry, as_toml_script
from elastic_agent.config.errors import HelpRequested, UsageError, quoted
from elastic_agent.config.load import Resolved, resolve
from elastic_agent.config.settings import GROUPS, Spec, specs
from elastic_agent.config.sources.base import Layer
from elastic_agent.config.sources.command_line import parse_command_line
from elastic_agent.exit_codes import ExitCode

_OUTPUT = "--output"
_FILE = "elastic-agent.toml"
_COLUMNS = 100

PAGE = f"""\
Usage: elastic-agent init [--output FILE] [OPTIONS OF RUN] [SCRIPT [ARGUMENTS]]

Writes a settings file, {_FILE} unless another one is named, which must not exist yet. It has what these options and
arguments say, and as comments every other setting with its meaning and its default. Start every agent with it:

    elastic-agent --config {_FILE}

  --output FILE     where to write it; -: standard output

elastic-agent --help lists the options of run."""


def init(argv: Sequence[str]) -> int:
    """Write a settings file.

    Raises:
        UsageError: the same as ``run``, except that no script is needed; or the file exists or cannot be written.
    """
    try:
        line = parse_command_line(argv, values=(_OUTPUT,))
    except HelpRequested:
        raise HelpRequested(PAGE, more=(_OUTPUT,)) from None
    text = commented(resolve(line, os.environ, script_needed=False))
    path = line.values.get(_OUTPUT, _FILE)
    if path == "-":
        print(text, end="", flush=True)
        return ExitCode.FINISHED
    try:
        with Path(path).open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"init: {quoted(path)} exists; name another file with --output, or remove it"
        ) from None
    except OSError as error:
        raise UsageError(f"init: cannot write {quoted(path)}: {error.strerror}") from None
    print(f"wrote {path}; start every agent with: elastic-agent --config {path}", flush=True)
    return ExitCode.FINISHED


def commented(resolved: Resolved) -> str:
    """Return a settings file: in force is what the command line says, the rest are comments."""
    lines = [
        "# Settings of elastic-agent, for: elastic-agent --config FILE",
        "# Remove the # of a line to set it.",
        "# For editors that check TOML: elastic-agent settings --schema > elastic-agent.schema.json",
        "#:schema ./elastic-agent.schema.json",
    ]
    lines += [
        "",
        *(as_toml_script(resolved) or ['# script = "train.py"', '# script_args = ["--epochs", "10"]']),
    ]
    for group in GROUPS:
        members = [spec for spec in specs() if spec.group == group and not spec.no_effect]
        lines += ["", "", f"# ---- {group} ----"]
        for spec in members:
            if spec.name != "config":  # a file cannot name another one
                lines += ["", *_entry(spec, resolved)]
    return "\n".join(lines) + "\n"


def _entry(spec: Spec, resolved: Resolved) -> list[str]:
    text = spec.help if not spec.why else f"{spec.help} Differs from torchrun: {spec.why}."
    comment = textwrap.wrap(text, _COLUMNS - 2, break_long_words=False, break_on_hyphens=False)
    entry, source = as_toml_entry(spec, resolved)
    if resolved.sources[spec.name].layer is not Layer.FLAG and not entry.startswith("#"):
        entry = f"# {entry}"
    if entry.endswith("="):
        entry = f"{entry}  {source}"
    return [f"# {line}" for line in comment] + [entry]
