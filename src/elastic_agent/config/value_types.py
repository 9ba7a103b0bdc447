"""The kinds of value a setting can have: how its text is read, shown, and described to a person."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_agent.config.errors import BadValueError, did_you_mean, quoted
from elastic_agent.config.values import Host, NodeRange, StreamChoice
from elastic_agent.values import DEFAULT_PORT, LONGEST_TIME_S, MOST_NODES, MOST_SLOTS, Endpoint, PortRange

_MOST = 2**31 - 1
_WHOLE = re.compile(r"[+-]?[0-9]{1,15}")
_DECIMAL = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HOST_NAME = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]*)(\.[A-Za-z0-9_-]+)*\.?")
_NAME_CHARACTERS = re.compile(r"[A-Za-z0-9._:@+-]")
_LONGEST_NAME = 128
_LONGEST_COMMAND = 4000

SLOT_WORDS = ("gpu-or-1", "auto", "cpu", "gpu", "xpu")


@dataclass(frozen=True)
class Kind:
    """A kind of value.

    Attributes:
        metavar: how the value is called in help, e.g. ``SECONDS``.
        accepted: what is accepted, as it ends the sentence "expected …".
        parse: text to value; raises ``BadValueError``.
        show: value to the text that ``parse`` reads back.
        empty_is_unset: an empty text counts as not given (for torchrun, that option's default is empty).
        is_switch: an option without a value, which means true.
        choices: all words that are accepted; empty: they cannot be listed.
    """

    metavar: str
    accepted: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str
    empty_is_unset: bool = False
    is_switch: bool = False
    choices: tuple[str, ...] = ()


def _read_whole(text: str) -> int:
    if not _WHOLE.fullmatch(text.strip()):
        raise BadValueError("which is not a whole number")
    return int(text.strip())  # int() alone strips fewer characters


def whole_number(least: int) -> Kind:
    """Return the kind of whole numbers of at least ``least``."""

    def parse(text: str) -> int:
        value = _read_whole(text)
        if value < least:
            raise BadValueError("which is too small")
        if value > _MOST:
            raise BadValueError(f"which is more than {_MOST}")
        return value

    return Kind("N", f"a whole number, {least} or more", parse)


def _read_port(text: str, *, least: int) -> int:
    try:
        port = _read_whole(text)
    except BadValueError:
        raise BadValueError(f"whose port {quoted(text)} is not a number") from None
    if not least <= port <= 65535:
        raise BadValueError(f"whose port {port} is not from {least} to 65535")
    return port


def seconds(least: float, *, above: bool = False, most: float = LONGEST_TIME_S) -> Kind:
    """Return the kind of times in seconds from ``least`` (with ``above``: from more than it) to ``most``."""

    def parse(text: str) -> float:
        if not _DECIMAL.fullmatch(text.strip()):
            raise BadValueError("which is not a number of seconds")
        value = float(text.strip())
        if value > most:
            raise BadValueError(f"which is more than {most:g}")
        if value < least or (above and value <= least):
            raise BadValueError("which is too short")
        return value

    bound = f"more than {least:g}" if above else f"{least:g} or more"
    bound += f", {most:g} at most" if most < LONGEST_TIME_S else ""
    return Kind("SECONDS", f"seconds, {bound}", parse, lambda value: repr(float(value)))


_SIZE = re.compile(r"([0-9]{1,16}(?:\.[0-9]{1,6})?)\s*([KMGT]?)(?:I?B)?", re.IGNORECASE)
_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_LEAST_SIZE = 64 * 1024
_MOST_SIZE = 2**50


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise BadValueError("which is not a valid size")
    size = int(float(match[1]) * _UNITS[match[2].upper()])
    if 0 < size < _LEAST_SIZE:
        raise BadValueError(f"which is {size} bytes, too small")
    if size > _MOST_SIZE:
        raise BadValueError("which is more than 1024T")
    return size


def _show_size(size: int) -> str:
    """Show a size in the largest unit that needs no fraction."""
    for unit, factor in reversed(_UNITS.items()):
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return "0"


SIZE = Kind(
    "SIZE",
    "a size such as 500M or 2G (units K, M, G, T), 64K or more, or 0 for none",
    _parse_size,
    _show_size,
)


def _parse_switch(text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "yes", "on"):
        return True
    if word in ("false", "no", "off"):
        return False
    return _read_whole(word) != 0


SWITCH = Kind(
    "",
    "1, true, yes, on, or 0, false, no, off",
    _parse_switch,
    lambda v: "true" if v else "false",
    is_switch=True,
)


def choice(choices: Iterable[str], *, metavar: str) -> Kind:
    """Return the kind of values that are one of a few words, in any case."""
    allowed = tuple(choices)

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in allowed:
            raise BadValueError(hint=did_you_mean(word, allowed))
        return word

    return Kind(metavar, " or ".join([", ".join(allowed[:-1]), allowed[-1]]), parse, choices=allowed)


def _parse_nodes(text: str) -> NodeRange:
    parts = text.strip().split(":")
    if len(parts) > 2:
        raise BadValueError("which has more than one colon")
    counts = [_read_whole(part) for part in parts]
    least, most = counts[0], counts[-1]
    if least < 1:
        raise BadValueError(
            "which allows a world without nodes" if len(parts) == 2 else "which is less than one node"
        )
    if least > most:
        raise BadValueError(f"whose minimum {least} is greater than its maximum {most}")
    if most > MOST_NODES:
        raise BadValueError(f"which is more than {MOST_NODES} nodes")
    return NodeRange(least, most)


NODES = Kind("MIN:MAX", "N or MIN:MAX, whole numbers with 1 <= MIN <= MAX", _parse_nodes)


def _parse_slots(text: str) -> str:
    word = text.strip().lower()
    if word in SLOT_WORDS:
        return word
    if not _WHOLE.fullmatch(word):
        raise BadValueError(hint=did_you_mean(word, SLOT_WORDS))
    if int(word) < 1:
        raise BadValueError("which starts no workers")
    if int(word) > MOST_SLOTS:
        raise BadValueError(f"which is more than {MOST_SLOTS} workers on one node")
    return str(int(word))


SLOTS = Kind("N", f"a whole number, 1 or more, or one of {', '.join(SLOT_WORDS)}", _parse_slots)


def _parse_host(text: str) -> str:
    """Return a host name or address; IPv6 comes back without brackets."""
    bracketed = text.startswith("[") and text.endswith("]")
    host = text[1:-1] if bracketed else text
    if bracketed or ":" in host or re.fullmatch(r"[0-9.]+", host):
        return _checked_address(host)
    if not host or not _HOST_NAME.fullmatch(host):
        raise BadValueError(f"whose host {quoted(host)} is neither a host name nor an address")
    return host


def _checked_address(host: str) -> str:
    import ipaddress  # takes 5 ms; host names do not need it

    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise BadValueError(f"whose host {quoted(host)} is not an IP address") from None
    return host


HOST = Kind("HOST", "a host name or an IP address", _parse_host, empty_is_unset=True)
PORT = Kind("PORT", "a port from 1 to 65535", lambda text: _read_port(text, least=1))


def _split_endpoint(text: str) -> tuple[str, str | None]:
    if text.startswith("["):
        host, bracket, rest = text.partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise BadValueError("whose brackets do not enclose just an IPv6 address")
        return host + bracket, rest[1:] if rest else None
    if text.count(":") > 1:  # an IPv6 address without brackets cannot carry a port
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def parse_endpoints(text: str, default_port: int) -> Endpoint:
    """Parse one endpoint or several, separated by commas, as one value; ``default_port`` where none is named."""
    first, *others = (_parse_endpoint(part.strip(), default_port) for part in text.split(","))
    return Endpoint(first.host, first.port, tuple(others))


def _parse_endpoint(text: str, default_port: int) -> Endpoint:
    if "://" in text:
        raise BadValueError("which is a URL")
    if "@" in text:
        raise BadValueError("which contains a user name (for etcd, use --etcd-user)")
    host, port = _split_endpoint(text)
    if not host:
        raise BadValueError("which has no host")
    return Endpoint(_parse_host(host), default_port if port is None else _read_port(port, least=0))


ENDPOINT = Kind(
    "HOST[:PORT]",
    "HOST, HOST:PORT or [IPV6]:PORT, without a scheme",
    lambda text: parse_endpoints(text, DEFAULT_PORT),
    empty_is_unset=True,
)


def _parse_machine(text: str) -> Host:
    user, at, place = text.rpartition("@")
    host, workers = _split_endpoint(place)
    name = _parse_host(host)
    return Host(text, f"{user}{at}{name}", name, "" if workers is None else _parse_slots(workers))


HOSTS = Kind(
    "HOSTS",
    "[USER@]HOST[:WORKERS], several separated by commas, e.g. lab1,lab2:4",
    lambda text: tuple(_parse_machine(part.strip()) for part in text.split(",")),
    lambda hosts: ",".join(host.text for host in hosts),
    empty_is_unset=True,
)


def _parse_listener(text: str) -> Endpoint:
    if text.isdecimal():
        return Endpoint("127.0.0.1", _read_port(text, least=0))
    endpoint = _parse_endpoint(text, -1)
    if endpoint.port < 0:
        raise BadValueError("which has no port")
    return endpoint


LISTENER = Kind(
    "[HOST:]PORT",
    "PORT, HOST:PORT or [IPV6]:PORT; without a host, the page is served to this machine only",
    _parse_listener,
    empty_is_unset=True,
)

C10D, ETCD = "c10d", "etcd"


def _parse_backend(text: str) -> str:
    word = text.strip().lower()
    if word in ("c10d", "static", "elastic"):
        return C10D
    if word in ("etcd", "etcd-v3", "elastic-etcd"):
        return ETCD
    if word == "etcd-v2":
        raise BadValueError("which etcd 3.6 has removed")
    raise BadValueError()


BACKEND = Kind("NAME", "c10d or etcd (static is treated as c10d)", _parse_backend)


def _parse_key_prefix(text: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._@+-]+)+/?", text) or len(text) > _LONGEST_NAME:
        raise BadValueError()
    return text.rstrip("/")


KEY_PREFIX = Kind("PREFIX", "a path like /team/elastic-agent", _parse_key_prefix)


def _parse_name(text: str) -> str:
    if not text:
        raise BadValueError("which is empty")
    if text in (".", ".."):
        raise BadValueError("which file systems treat as a directory")
    for position, character in enumerate(text, start=1):
        if not _NAME_CHARACTERS.fullmatch(character):
            raise BadValueError(f"whose character {position}, {quoted(character)}, is not allowed")
    if len(text) > _LONGEST_NAME:
        raise BadValueError(f"which has {len(text)} characters")
    return text


NAME = Kind(
    "ID",
    f"1 to {_LONGEST_NAME} of the characters A-Z a-z 0-9 . _ : @ + -, except . and .. alone",
    _parse_name,
)


def _parse_text(text: str) -> str:
    if not text.strip() or not text.isprintable() or len(text) > _LONGEST_NAME:
        raise BadValueError()
    return text


TEXT = Kind("TEXT", f"1 to {_LONGEST_NAME} printable characters", _parse_text)


def _parse_program(text: str) -> str:
    if not text.strip() or "\0" in text:
        raise BadValueError("which is not a program")
    return text


PROGRAM = Kind("PROGRAM", "the path of a program, or its name on the PATH", _parse_program)


def _parse_command(text: str) -> str:
    if not text.strip():
        raise BadValueError("which is empty")
    if not text.isprintable() or len(text) > _LONGEST_COMMAND:
        raise BadValueError("which is not a single line, or is too long")
    return text.strip()


COMMAND = Kind(
    "COMMAND", f"a single shell command line of at most {_LONGEST_COMMAND} characters", _parse_command
)


def _parse_path(text: str) -> Path:
    if not text or "\0" in text:
        raise BadValueError("which is not a path")
    try:
        return Path(os.path.abspath(os.path.expanduser(text)))
    except FileNotFoundError:
        raise BadValueError("which is relative to the working directory, which was removed") from None


PATH = Kind("PATH", "a path", _parse_path)


def _parse_port_range(text: str) -> PortRange:
    low_text, colon, high_text = text.strip().partition(":")
    if not colon:
        raise BadValueError("which has no colon")
    low, high = _read_port(low_text, least=1), _read_port(high_text, least=1)
    if low > high:
        raise BadValueError(f"whose first port {low} is above its last port {high}")
    return PortRange(low, high)


PORT_RANGE = Kind("LOW:HIGH", "LOW:HIGH, two ports from 1 to 65535", _parse_port_range)


def _parse_streams(text: str) -> StreamChoice:
    text = text.strip()
    if re.fullmatch(r"[0-3]", text):
        return StreamChoice(everywhere=int(text))
    pairs: dict[int, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6}):([0-3])\s*", item)
        if not match:
            raise BadValueError(f"where {quoted(item)} is not RANK:STREAMS")
        pairs[int(match[1])] = int(match[2])
    return StreamChoice(by_rank=tuple(pairs.items()))


STREAMS = Kind(
    "STREAMS",
    "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or RANK:STREAMS,... by local rank, e.g. 0:3,11:1",
    _parse_streams,
)


def _parse_ranks(text: str) -> tuple[int, ...]:
    ranks = []
    for item in text.split(","):
        rank = _read_whole(item)
        if rank < 0:
            raise BadValueError(f"where {rank} is negative")
        ranks.append(rank)
    return tuple(ranks)


RANKS = Kind(
    "RANKS",
    "local ranks separated by commas, e.g. 0,1,2",
    _parse_ranks,
    lambda ranks: ",".join(map(str, ranks)),
    empty_is_unset=True,
)

_COMMA = "\0"


def _parse_filters(text: str) -> tuple[str, ...]:
    items = text.replace(",,", _COMMA).split(",")
    return tuple(item.replace(_COMMA, ",") for item in items)


FILTERS = Kind(
    "TEXT,...",
    "texts separated by commas; a double comma stands for a literal comma",
    _parse_filters,
    lambda filters: ",".join(item.replace(",", ",,") for item in filters),
    empty_is_unset=True,
)


def _parse_modules(text: str) -> tuple[str, ...]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise BadValueError(f"where {quoted(name)} is not a module name")
    return tuple(dict.fromkeys(names))


MODULES = Kind(
    "MODULES",
    "names of modules separated by commas, e.g. lightning,torch._dynamo",
    _parse_modules,
    ",".join,
    empty_is_unset=True,
)


def split_conf(text: str) -> list[tuple[str, str]]:
    """Return the pairs of a ``KEY=VALUE,...`` text, in order, without quotes around them; raises ``BadValueError``."""
    pairs = []
    for item in text.split(","):
        key, equals, value = (part.strip(" \t\n'\"") for part in item.partition("="))
        if not (key and equals and value):
            raise BadValueError(f"where {quoted(item)} is not KEY=VALUE")
        pairs.append((key, value))
    return pairs


def _parse_conf(text: str) -> str:
    return ",".join(f"{key}={value}" for key, value in split_conf(text))


CONF = Kind("KEY=VALUE,...", "KEY=VALUE pairs separated by commas", _parse_conf, empty_is_unset=True)


def _parse_signals(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_read_signal(name.strip()) for name in text.split(",")))


def _read_signal(name: str) -> str:
    known = signal.Signals.__members__
    if name in ("SIGKILL", "SIGSTOP"):
        raise BadValueError(f"where {name} cannot be handled")
    if name not in known:
        raise BadValueError(f"where {quoted(name)} is not a signal on this system", did_you_mean(name, known))
    return name


SIGNALS = Kind("NAMES", "signal names separated by commas, e.g. SIGTERM,SIGINT", _parse_signals, ",".join)

NO_SIGNAL = "none"


def _parse_signal(text: str) -> str:
    return NO_SIGNAL if text.strip().lower() == NO_SIGNAL else _read_signal(text.strip())


SIGNAL = Kind("NAME", "a signal name, e.g. SIGUSR1, or none", _parse_signal)


def _parse_node_counts(text: str) -> tuple[int, ...]:
    counts = []
    for item in text.split(","):
        count = _read_whole(item)
        if count < 1:
            raise BadValueError(f"where {count} is not a positive number of nodes")
        if count > MOST_NODES:
            raise BadValueError(f"where {count} is more than {MOST_NODES} nodes")
        counts.append(count)
    return tuple(sorted(set(counts)))


NODE_COUNTS = Kind(
    "N[,N...]",
    "a whole number, or several separated by commas, e.g. 2 or 1,2,4,8",
    _parse_node_counts,
    lambda counts: ",".join(map(str, counts)),
    empty_is_unset=True,
)
