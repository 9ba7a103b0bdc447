"""Checks of the environment: variables of other launchers, names of network interfaces."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from .findings import Finding, error, warning

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_LOCAL_BRIDGES = ("docker", "virbr", "br-", "veth", "cni", "lo")
"""Beginnings of names of interfaces that no other machine reaches."""


def check_launcher_variables(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report variables that another launcher, or a shell in a Slurm job, left behind."""
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


def check_gloo_interface(
    environ: Mapping[str, str], interfaces: Collection[str], suggested: str | None
) -> Iterator[Finding]:
    """Check that ``GLOO_SOCKET_IFNAME`` names an interface at which other machines reach this one.

    Args:
        environ: the environment.
        interfaces: this machine's.
        suggested: the interface of the route to the other machines, if it is known.
    """
    gloo = environ.get("GLOO_SOCKET_IFNAME")
    if gloo is None:
        return
    if gloo not in interfaces and (gloo[:1] in ("^", "=") or "," in gloo):
        cause = (
            "is a list as NCCL takes it; gloo takes the name of one interface, and ends with "
            '"Unable to find address for"'
        )
    elif gloo not in interfaces:
        cause = f"names no interface of this machine (it has {_listed(interfaces)})"
    elif suggested not in (None, gloo) and gloo.startswith(_LOCAL_BRIDGES):
        cause = (
            "is an interface for containers or virtual machines of this machine; the route to the other machines "
            f"is over {suggested}"
        )
    else:
        return
    yield error(
        "gloo-interface",
        f"GLOO_SOCKET_IFNAME={gloo} {cause}",
        f"set GLOO_SOCKET_IFNAME{_value(suggested)}, or unset it: elastic-agent then sets the right one",
    )


def check_nccl_interface(
    environ: Mapping[str, str], interfaces: Collection[str], suggested: str | None, *, has_gpus: bool
) -> Iterator[Finding]:
    """Check that ``NCCL_SOCKET_IFNAME`` matches an interface; arguments as for :func:`check_gloo_interface`.

    Its value is a list of prefixes; of whole names after ``=``, and of exceptions, which are not checked, after ``^``.
    """
    nccl = environ.get("NCCL_SOCKET_IFNAME", "")
    names = tuple(name for name in nccl.removeprefix("=").split(",") if name)
    is_exact = nccl.startswith("=")
    if not nccl or nccl.startswith("^"):
        return
    if not any(interface in names if is_exact else interface.startswith(names) for interface in interfaces):
        make = error if has_gpus else warning
        yield make(
            "nccl-interface",
            f"NCCL_SOCKET_IFNAME={nccl} matches no interface of this machine (it has {_listed(interfaces)}); NCCL "
            'ends with "no socket interface found"',
            f"set NCCL_SOCKET_IFNAME{_value(suggested)}",
        )


def _listed(interfaces: Collection[str]) -> str:
    return ", ".join(sorted(interfaces)) or "none"


def _value(suggested: str | None) -> str:
    return f"={suggested}" if suggested else " to one of them"
