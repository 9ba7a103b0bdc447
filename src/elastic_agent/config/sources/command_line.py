"""The command line: torchrun's options and ours, with argparse, made from the specs."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from elastic_agent.config.errors import (
    HelpRequested,
    ShortHelpRequested,
    UsageError,
    VersionRequested,
    did_you_mean,
    quoted,
)
from elastic_agent.config.settings import spec_by_name, specs
from elastic_agent.config.sources import Given, Layer, Source

HELP = "--help"
VERSION = "--version"

_OF_OTHER_LAUNCHERS = {
    "--use-env": "remove it: workers always find their local rank in LOCAL_RANK",
    "--hostfile": "use --hosts lab1,lab2:4",
    "--num-gpus": "use --nproc-per-node",
    "--num-nodes": "use --nnodes",
    "--num-processes": "use --nproc-per-node, the number of workers on each machine",
    "--num-machines": "use --nnodes",
}
"""Options of torch.distributed.launch, DeepSpeed and accelerate, with what to do here."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The content of a command line.

    Attributes:
        given: the settings on it, by name.
        script: the script, or None when none is named.
        script_args: what follows the script.
        switches: the command's own options that were found, e.g. ``--json``.
        values: the values of the command's own options that have one.
    """

    given: dict[str, Given]
    script: str | None
    script_args: tuple[str, ...]
    switches: set[str]
    values: dict[str, str] = field(default_factory=dict)


def parse_command_line(
    argv: Sequence[str], *, switches: Iterable[str] = (), values: Iterable[str] = (), page: str = ""
) -> CommandLine:
    """Read a command line without the program's name.

    Args:
        argv: the words.
        switches: options without a value that only this command has.
        values: options with a value that only this command has.
        page: the page of this command; empty: the general one.

    Raises:
        UsageError: an unknown or ambiguous option, or one without its value.
        HelpRequested, VersionRequested: it has these options.
    """
    parser = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for spec in specs():
        how: dict[str, Any] = {"action": "store_const", "const": "true"} if spec.kind.is_switch else {}
        spellings = [*_written(spec.flag), *([spec.short] if spec.short else [])]
        parser.add_argument(*spellings, dest=spec.name, default=argparse.SUPPRESS, **how)
    for switch in switches:
        parser.add_argument(switch, dest=switch, action="store_true")
    for option in values:
        parser.add_argument(option, dest=option)
    parser.add_argument(HELP, action=_Raise, nargs=0, error=HelpRequested(page))
    parser.add_argument("-h", action=_Raise, nargs=0, error=ShortHelpRequested(page))
    parser.add_argument(VERSION, action=_Raise, nargs=0, error=VersionRequested())
    parser.add_argument("training_script").required = False
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER).required = False
    try:
        found, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise UsageError(_explained(error)) from None
    if unknown:
        raise UsageError(_unknown_option(unknown[0], (*switches, *values)))
    texts, known = vars(found), spec_by_name()
    return CommandLine(
        {name: Given(texts[name], Source(Layer.FLAG, known[name].flag)) for name in texts if name in known},
        found.training_script,
        tuple(found.training_script_args or ()),
        {switch for switch in switches if texts[switch]},
        {option: texts[option] for option in values if texts[option] is not None},
    )


class _Raise(argparse.Action):
    """Ends the parsing at once, as argparse's own help does."""

    def __init__(self, *args: Any, error: Exception, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._error = error

    def __call__(
        self, parser: object, namespace: object, values: Any, option_string: str | None = None
    ) -> None:
        raise self._error


def _written(flag: str) -> list[str]:
    underscored = "--" + flag[2:].replace("-", "_")
    return [flag] if underscored == flag else [flag, underscored]


def _explained(error: argparse.ArgumentError) -> str:
    """Turn argparse's error about one option into our message: the option's first spelling and what it accepts."""
    flag = (error.argument_name or "").split("/")[0]
    spec = spec_by_name().get(flag[2:].replace("-", "_"))
    if spec is None or spec.kind.is_switch:
        return f"{flag}: takes no value"
    return f"{flag}: requires a value; expected {spec.kind.accepted}"


def _unknown_option(word: str, switches: Iterable[str]) -> str:
    option = word.split("=")[0]
    flags = [*(spec.flag for spec in specs()), HELP, VERSION, *switches]
    name = option.replace("_", "-")
    hint = _OF_OTHER_LAUNCHERS.get(name) or did_you_mean(name, flags)
    hint = hint or "elastic-agent --help lists the options"
    return f"unknown option {quoted(option)} (options of the script follow the script); {hint}"
