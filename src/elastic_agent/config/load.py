"""From command line, environment, file and site to the settings in force, each with its source."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from elastic_agent.config.builder import Note, SettingsBuilder, default_of, usage_error
from elastic_agent.config.checks import (
    check_allocation,
    check_node_counts,
    check_notices,
    check_paths,
    check_requeue,
    leave_ignored_signals,
)
from elastic_agent.config.derive import derive_directories, derive_rendezvous
from elastic_agent.config.errors import BadValueError, MissingScriptError
from elastic_agent.config.script import check_script
from elastic_agent.config.settings import Settings, spec_by_name, specs
from elastic_agent.config.sources.base import Given, Layer, Source
from elastic_agent.config.sources.command_line import CommandLine, parse_command_line
from elastic_agent.config.sources.environment import doubtful_variables, read_environment
from elastic_agent.config.sources.rdzv_conf import expand
from elastic_agent.config.sources.slurm import slurm
from elastic_agent.config.sources.toml_file import SettingsFile, read_settings_file

_DEFAULT = Source(Layer.DEFAULT, "default")


def _systemd(environ: Mapping[str, str]) -> dict[str, Given]:
    """Return the directories that systemd makes for a service with ``StateDirectory=`` and ``LogsDirectory=``."""
    given = {}
    for name, variable in (("state_dir", "STATE_DIRECTORY"), ("log_dir", "LOGS_DIRECTORY")):
        first = environ.get(variable, "").split(":")[0]
        if first:
            given[name] = Given(first, Source(Layer.SITE, f"systemd's {variable}"))
    return given


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
    file = _read_file(line.given.get("config") or variables.get("config"))
    site = {**_systemd(environ), **slurm(environ)}
    layers: list[Mapping[str, Given]] = [line.given, variables, file.given, site]
    if only is not None:
        layers = [{name: given for name, given in layer.items() if name in only} for layer in layers]
        file = SettingsFile()
    choose(builder, layers)
    for warning in doubtful_variables(environ):
        builder.warn(warning)
    _note_options_without_effect(builder)
    check_allocation(builder, environ)
    derive_rendezvous(builder, environ)
    derive_directories(builder, environ)
    check_paths(builder)
    if only is None or "signals_to_handle" in only:
        leave_ignored_signals(builder)
    check_notices(builder)
    check_node_counts(builder)
    check_requeue(builder)
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


def _read_file(named: Given | None) -> SettingsFile:
    if named is None:
        return SettingsFile()
    spec = spec_by_name()["config"]
    try:
        path = spec.kind.parse(named.text)
    except BadValueError as bad:
        raise usage_error(named.source, named.text, spec.kind, bad) from None
    return read_settings_file(path, named.source)


def choose(builder: SettingsBuilder, layers: Sequence[Mapping[str, Given]]) -> None:
    """Take each setting from the first layer that gives it; in a layer, ``rdzv_conf`` comes after direct settings."""
    expanded: list[Mapping[str, Given]] = []
    conf_taken = False
    for layer in layers:
        expanded.append(layer)
        if "rdzv_conf" in layer and not conf_taken:
            conf_taken = True
            expanded.append(_expanded_conf(builder, layer["rdzv_conf"]))
    for spec in specs():
        given = next((layer[spec.name] for layer in expanded if spec.name in layer), None)
        if given is None:
            builder.put(spec.name, default_of(spec.name), _DEFAULT)
        else:
            builder.take(spec, given)


def _expanded_conf(builder: SettingsBuilder, conf: Given) -> Mapping[str, Given]:
    builder.take(spec_by_name()["rdzv_conf"], conf)
    if not conf.text:
        return {}
    settings, notes = expand(conf)
    for note in notes:
        builder.note(note)
    return settings


def _note_options_without_effect(builder: SettingsBuilder) -> None:
    for spec in specs():
        if spec.no_effect and builder.is_given(spec.name):
            builder.note(f"{builder.sources[spec.name]} has no effect: {spec.no_effect}")


_HARDLY_OF_A_SCRIPT = ("nnodes", "nproc_per_node", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "max_restarts")
"""Settings that every user of a launcher knows, under names that scripts seldom use."""


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
