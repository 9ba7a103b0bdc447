"""What to do about a store that is not reached: one remedy for each obstacle, and none that the obstacle excludes."""

from __future__ import annotations

from .base import Obstacle


def how_to_reach(
    obstacle: Obstacle, where: str, port: int, start: str = "the same command", *, had_answered: bool = False
) -> str:
    """Return what to do, in words; empty: the error says it.

    Args:
        obstacle: what the last attempt ended with.
        where: the machine of the store, as the user knows it.
        port: of the store.
        start: what to start there.
        had_answered: the store answered before: the endpoint is right.
    """
    opens = f"open the port there: firewall-cmd --add-port={port}/tcp, or ufw allow {port}/tcp"
    checks_endpoint = "check that the endpoint is an address of one of the machines"
    match obstacle, had_answered:
        case Obstacle.REFUSED, True:
            return f"start {start} on {where} again"
        case Obstacle.REFUSED, False:
            compare = f"compare its port with {port}, then check its address and its firewall"
            return f"start {start} on {where}; if it runs there, {compare}"
        case Obstacle.NO_ANSWER, _:
            return f"if {where} is down, switch it on and start {start} there; if it is up, {opens}"
        case Obstacle.UNREACHABLE, True:
            return f"connect {where} to the network again, or switch it on and start {start} there"
        case Obstacle.UNREACHABLE, False:
            return f"{checks_endpoint} that is up and in this network; if `ping {where}` is answered, {opens}"
        case Obstacle.SILENT, True:
            return f"continue what hosts it on {where} (kill -CONT PID), or stop that and start {start} there again"
        case Obstacle.SILENT | Obstacle.CLOSED, False:
            return (
                f"stop what `ss -ltnp` on {where} shows for port {port}, or use another port on all machines"
            )
        case Obstacle.CLOSED | Obstacle.OTHER, True:
            return f"if it has ended there, start {start} on {where} again"
        case Obstacle.OTHER, False:
            return f"{checks_endpoint}, that {start} runs there, and that it has port {port}"
        case Obstacle.OWN_NETWORK, False:
            return f"if the network of this machine is as it should be, {checks_endpoint}"
    return ""
