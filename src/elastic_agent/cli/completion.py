"""``elastic-agent completion SHELL``: a script by which bash, zsh or fish completes commands and options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from elastic_agent.cli.arguments import CommandParser
from elastic_agent.cli.main import COMMANDS, load_command
from elastic_agent.config.errors import HelpRequested, UsageError, quoted
from elastic_agent.config.settings import specs
from elastic_agent.exit_codes import ExitCode

PAGE = """\
Usage: elastic-agent completion bash|zsh|fish

Prints a script by which the shell completes commands, options and files. For every new shell:

    echo 'source <(elastic-agent completion bash)' >> ~/.bashrc
    echo 'source <(elastic-agent completion zsh)' >> ~/.zshrc
    elastic-agent completion fish > ~/.config/fish/completions/elastic-agent.fish"""

_SHELLS = ("bash", "zsh", "fish")

_FISH = "complete -c elastic-agent"

_ZSH = """\
autoload -Uz compinit bashcompinit
(( $+functions[compdef] )) || compinit
bashcompinit
"""

_BASH = """\
_elastic_agent() {
    local word options current=${COMP_WORDS[COMP_CWORD]}
    COMPREPLY=()
    for word in "${COMP_WORDS[@]:0:$COMP_CWORD}"; do
        [[ $word == *.py ]] && return  # what follows is the script's
    done
    if [[ $COMP_CWORD == 1 && $current != -* ]]; then
        COMPREPLY=($(compgen -W "%(commands)s" -- "$current"))
    fi
    [[ $current == -* ]] || return  # without such a command, a value, or the script: files
    case ${COMP_WORDS[1]} in
%(cases)s
    esac
    COMPREPLY=($(compgen -W "$options" -- "$current"))
}
complete -o bashdefault -o default -F _elastic_agent elastic-agent
"""


def completion(argv: Sequence[str]) -> int:
    """Print the script for a shell; raises ``UsageError`` or ``HelpRequested``."""
    expected = f"one of {', '.join(_SHELLS)}"
    words = CommandParser("completion", PAGE, expected=expected, most_words=1).read(argv).words
    shell = words[0] if words else "nothing"
    if shell not in _SHELLS:
        raise UsageError(f"completion: got {quoted(shell)}; expected {expected}")
    print(_fish() if shell == "fish" else (_ZSH if shell == "zsh" else "") + _bash(), end="", flush=True)
    return ExitCode.FINISHED


def _options(name: str) -> list[str]:
    """Return the options of a command: its own, or those of ``run``, which many commands have."""
    try:
        load_command(name)(["--help"])
    except HelpRequested as requested:
        own = requested.options
        return ["--help", *((spec.flag for spec in specs()) if own is None else own), *requested.more]
    return []


def _bash() -> str:
    patterns = {name: own for name in COMMANDS if (own := _options(name)) != _options("run")}
    patterns["*"] = _options("run")
    cases = "\n".join(f'    {name}) options="{" ".join(own)}" ;;' for name, own in patterns.items())
    return _BASH % {"commands": " ".join(COMMANDS), "cases": cases}


def _fish() -> str:
    common = _options("run")
    others = [name for name in COMMANDS if not {*common} <= {*_options(name)}]
    lines = [f"{_FISH} -l help -d 'print the options'"]
    for name, (*_, summary) in COMMANDS.items():
        lines.append(f"{_FISH} -n __fish_use_subcommand -a {name} -d {shlex.quote(summary)}")
    for name in COMMANDS:
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        own = [word.lstrip("-") for word in _options(name)[1:] if name in others or word not in common]
        lines += [f"{_FISH} {seen} -{'s' if len(word) == 1 else 'l'} {word}" for word in own]
    unseen = f"-n 'not __fish_seen_subcommand_from {' '.join(others)}'"
    for spec in specs():
        value, text = "" if spec.kind.is_switch else " -r", shlex.quote(re.split(r"(?<=\.) ", spec.help)[0])
        lines.append(f"{_FISH} {unseen} -l {spec.flag[2:]}{value} -d {text}")
    return "\n".join(lines) + "\n"
