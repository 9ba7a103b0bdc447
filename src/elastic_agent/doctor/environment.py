"""Checks of the environment: variables of other launchers, proxies, names of network interfaces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from .findings import Finding, error, note, warning

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_LOCAL_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "lo")
"""Beginnings of names of interfaces that no other machine reaches."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


def check_launcher_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that another launcher, or a shell in a Slurm job, left behind."""
    names = [name for name in _LAUNCHER if name in environ]
    if names:
        shown = ", ".join(f"{name}={environ[name]}" for name in names)
        yield warning(
            "launcher-variables",
            f"{shown} set in this environment; workers get values of their own, but programs that look for these "
            "variables take the agent's shell for a worker",
            f"unset {' '.join(names)}, and start elastic-agent once per machine, not with another launcher",
        )
    slurm = [name for name in _SLURM if name in environ]
    if slurm and "SLURM_STEP_ID" not in environ:
        yield warning(
            "slurm-variables",
            f"{', '.join(slurm)} set, but this is not a Slurm step; Lightning and other frameworks conclude that "
            "srun has started the workers",
            f"start the agents with srun, or unset {' '.join(slurm)}",
        )


def check_proxies(environ: Mapping[str, str], host: str) -> Iterator[Finding]:
    """Proxies that the endpoint is not exempt from."""
    names = [name for name in environ if name.lower() in _PROXIES and environ[name]]
    exempt = ",".join(environ.get(name, "") for name in ("no_proxy", "NO_PROXY")).split(",")
    if names and not any(one.strip() in ("*", host) for one in exempt):
        yield note(
            "proxy",
            f"{', '.join(sorted(names))} set, and no_proxy does not list {host}; elastic-agent uses no proxy, but "
            "libraries of the script that speak HTTP or gRPC to other machines of the run do",
            f"add {host} and the other machines to no_proxy",
        )


def check_interface_variables(
    environ: Mapping[str, str], interfaces: Collection[str], suggested: str | None, has_gpus: bool
) -> Iterator[Finding]:
    """``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` name interfaces that exist.

    Args:
        environ: the environment.
        interfaces: this machine's.
        suggested: the interface of the route to the other machines, if it is known.
        has_gpus: NCCL will be used.
    """
    has = ", ".join(sorted(interfaces)) or "none"
    set_it = f"={suggested}" if suggested else " to one of them"
    gloo = environ.get("GLOO_SOCKET_IFNAME")
    if gloo is not None and gloo not in interfaces:
        if gloo[:1] in ("^", "=") or "," in gloo:
            cause = (
                f"GLOO_SOCKET_IFNAME={gloo} is a list as NCCL takes it; gloo takes the name of one interface, and "
                'ends with "Unable to find address for"'
            )
        else:
            cause = f"GLOO_SOCKET_IFNAME={gloo} names no interface of this machine (it has {has})"
        yield error(
            "gloo-interface",
            cause,
            f"set GLOO_SOCKET_IFNAME{set_it}, or unset it: elastic-agent then sets the right one",
        )
    elif gloo is not None and suggested not in (None, gloo) and gloo.startswith(_LOCAL_BRIDGES):
        yield error(
            "gloo-interface",
            f"GLOO_SOCKET_IFNAME={gloo} is an interface for containers or virtual machines of this machine; the route "
            f"to the other machines is over {suggested}",
            f"set GLOO_SOCKET_IFNAME={suggested}, or unset it: elastic-agent then sets the right one",
        )
    nccl = environ.get("NCCL_SOCKET_IFNAME")
    if nccl and nccl_interfaces(nccl, list(interfaces)) == []:
        make = error if has_gpus else warning
        yield make(
            "nccl-interface",
            f"NCCL_SOCKET_IFNAME={nccl} matches no interface of this machine (it has {has}); NCCL ends with "
            '"no socket interface found"',
            f"set NCCL_SOCKET_IFNAME{set_it}",
        )


def nccl_interfaces(wanted: str | None, interfaces: list[str]) -> list[str]:
    """The interfaces that NCCL would use, the preferred one first.

    ``wanted`` is the value of ``NCCL_SOCKET_IFNAME``: prefixes, exact names after ``=``, exceptions after ``^``.
    Without it NCCL prefers ``ib*``, then everything but ``docker*`` and ``lo``, then these.
    """
    if not wanted:
        preferred = [name for name in interfaces if name.startswith("ib")]
        usual = [name for name in interfaces if not name.startswith(("docker", "lo"))]
        return preferred or usual or [name for name in interfaces if name.startswith("docker")] or interfaces
    negated = wanted.startswith("^")
    text = wanted.removeprefix("^")
    exact = text.startswith("=")
    names = [name for name in text.removeprefix("=").split(",") if name]

    def matches(interface: str) -> bool:
        if exact:
            return interface in names
        return interface.startswith(tuple(names))

    return [name for name in interfaces if matches(name) is not negated]
