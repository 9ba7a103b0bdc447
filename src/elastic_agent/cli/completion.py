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
    options = {name: _options(name) for name in COMMANDS}
    print(_fish(options) if shell == "fish" else _bash(options, _ZSH * (shell == "zsh")), end="", flush=True)
    return ExitCode.FINISHED


def _options(name: str) -> dict[str, str]:
    """Return the options of a command, each with what its page says of it, and those of ``run`` if it has them, too."""
    of_run = {spec.flag: re.split(r"(?<=\.) ", spec.help)[0] for spec in specs()}
    page, accepted = "", tuple[str, ...]()
    try:
        load_command(name)(["--help"])
    except HelpRequested as requested:
        page, accepted = "".join(requested.args), requested.options
    own = dict.fromkeys(accepted, "")
    described = r"^  (?:(-\w), )?(--[a-z-]+)(?:(?: \S+)? {2,}(.*))?"
    for short, option, text in re.findall(described, page, re.MULTILINE):
        own |= dict.fromkeys(filter(None, (short, option)), text)
    return {"--help": "", **(of_run if not page or "OPTIONS OF RUN" in page else {}), **own}


def _bash(options: dict[str, dict[str, str]], head: str) -> str:
    patterns = {**{name: own for name, own in options.items() if name != "run"}, "*": options["run"]}
    cases = "\n".join(f'    {name}) options="{" ".join(own)}" ;;' for name, own in patterns.items())
    return head + _BASH % {"commands": " ".join(COMMANDS), "cases": cases}


def _fish(options: dict[str, dict[str, str]]) -> str:
    lines = []
    for name, own in options.items():
        summary = shlex.quote(COMMANDS[name][2])
        lines.append(f"complete -c elastic-agent -n __fish_use_subcommand -a {name} -d {summary}")
        seen = f"__fish_seen_subcommand_from {name}"
        if name == "run":
            seen = f"not __fish_seen_subcommand_from {' '.join(other for other in options if other != name)}"
        for option, text in own.items():
            word, told = option.lstrip("-"), f" -d {shlex.quote(text)}" if text else ""
            lines.append(
                f"complete -c elastic-agent -n {shlex.quote(seen)} -{'l' if word[1:] else 's'} {word}{told}"
            )
    return "\n".join(lines) + "\n"
