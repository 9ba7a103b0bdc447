"""From command line, environment, file and site to the settings in force, each with its source."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from elastic_agent.config.builder import Note, SettingsBuilder
from elastic_agent.config.errors import MissingScriptError
from elastic_agent.config.rules import check_all, check_allocation, derive_directories, derive_rendezvous
from elastic_agent.config.script import check_script
from elastic_agent.config.settings import Settings, spec_by_name, specs
from elastic_agent.config.sources import Given, Layer, Source
from elastic_agent.config.sources.command_line import CommandLine, parse_command_line
from elastic_agent.config.sources.environment import doubtful_variables, read_environment, systemd
from elastic_agent.config.sources.slurm import slurm
from elastic_agent.config.sources.toml_file import SettingsFile, read_settings_file

_HARDLY_OF_A_SCRIPT = ("nnodes", "nproc_per_node", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts")
"""Settings that every user of a launcher knows, under names that scripts seldom use."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The settings in force.

    Attributes:
        settings: their values.
        sources: where each value came from, by field name (the script's too).
        notes: what the user should know at the start; the ``run`` command logs them.
    """

    settings: Settings
    sources: Mapping[str, Source]
    notes: tuple[Note, ...] = ()


def load_settings(argv: Sequence[str], environ: Mapping[str, str]) -> Resolved:
    """Read a command line and everything else that sets something: flags, environment, file, site, default.

    Args:
        argv: the words after the program's name (and after the command's).
        environ: the environment, usually ``os.environ``.

    Raises:
        UsageError: something is wrong; its text is the one line to show.
        HelpRequested, VersionRequested: the command line has these options.
    """
    return resolve(parse_command_line(argv), environ)


def resolve(
    line: CommandLine,
    environ: Mapping[str, str],
    *,
    script_needed: bool = True,
    only: Collection[str] | None = None,
) -> Resolved:
    """Do what ``load_settings`` does, for a parsed command line.

    Args:
        line: the command line.
        environ: the environment.
        script_needed: a missing script is an error.
        only: the settings that the command has, by name; for others, and for the script, any value in environment,
            file and site is ignored. None: all.
    """
    builder = SettingsBuilder()
    variables = read_environment(environ)
    named = line.given.get("config") or variables.get("config")
    file = SettingsFile()
    if named is not None:
        file = read_settings_file(spec_by_name()["config"].kind.read(named.text, named.source), named.source)
    layers: list[Mapping[str, Given]] = [
        line.given,
        variables,
        file.given,
        {**systemd(environ), **slurm(environ)},
    ]
    if only is not None:
        layers = [{name: given for name, given in layer.items() if name in only} for layer in layers]
        file = SettingsFile()
    builder.choose(layers)
    for warning in doubtful_variables(environ):
        builder.warn(warning)
    for spec in specs():
        if spec.no_effect and builder.is_given(spec.name):
            builder.note(f"{builder.sources[spec.name]} has no effect: {spec.no_effect}")
    check_allocation(builder, environ)
    derive_rendezvous(builder, environ)
    derive_directories(builder, environ)
    check_all(builder, handles_signals=only is None or "signals_to_handle" in only)
    script, script_args = _script(builder, line, file)
    _warn_of_misplaced_options(builder, script_args)
    if script:
        check_script(builder, script, environ)
    elif script_needed:
        raise MissingScriptError(
            "no script to run; expected: elastic-agent [OPTIONS] SCRIPT [ARGUMENTS OF THE SCRIPT]"
        )
    settings = Settings(script=script, script_args=script_args, **builder.values)
    return Resolved(settings, MappingProxyType(builder.sources), tuple(builder.notes))


def _warn_of_misplaced_options(builder: SettingsBuilder, script_args: Sequence[str]) -> None:
    """Warn of our options after the script: one that ignores unknown arguments would silently run with defaults."""
    options = {word.partition("=")[0].replace("_", "-") for word in script_args if word.startswith("--")}
    flags = [spec.flag for spec in specs() if spec.name in _HARDLY_OF_A_SCRIPT and spec.flag in options]
    if flags:
        are = "is an option" if len(flags) == 1 else "are options"
        builder.warn(
            f"{', '.join(flags)} after the script {are} of the script, not of elastic-agent; put options of "
            "elastic-agent before the script"
        )


def _script(builder: SettingsBuilder, line: CommandLine, file: SettingsFile) -> tuple[str, tuple[str, ...]]:
    """Return the script and its arguments: both from the command line, or both from the file."""
    if line.script is not None or not file.script:
        source, script, arguments = Source(Layer.FLAG, "command line"), line.script or "", line.script_args
    else:
        source, script, arguments = Source(Layer.FILE, "settings file"), file.script, file.script_args
    builder.sources["script"] = builder.sources["script_args"] = source
    return script, arguments
