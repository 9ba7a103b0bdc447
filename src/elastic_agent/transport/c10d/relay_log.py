"""What a relay says of the connections that it refused or dropped: each kind once, as anybody can cause them."""

from __future__ import annotations

import ssl

from elastic_agent.logs import get_logger

_MOST_NAMED = 100


class RelayLog:
    """Log lines about one store."""

    def __init__(self, store: str, port: int) -> None:
        """``store``: in words; ``port``: the one that clients know."""
        self._shown = f"{store} (port {port})"
        self._users: set[int] = set()
        self._addresses: set[str] = set()
        self._was_full = False

    def refused_user(self, uid: int) -> None:
        """Log that a process of another user of this machine tried to connect."""
        if uid not in self._users:
            self._users.add(uid)
            get_logger().warning(
                f"refused a connection to {self._shown} by another user of this machine, user id {uid}"
            )

    def refused_client(self, address: str, error: ssl.SSLError, *, may_have_secret: bool) -> None:
        """Log that a client at this address did not prove that it has the secret.

        An agent that was refused connects again, without a secret, to see which one it should have. An agent with the
        secret that gets no answer for long connects without TLS, too, beside its handshake.

        Args:
            address: of the client.
            error: of the handshake.
            may_have_secret: whether it may have been such a late agent: it has hung up, or a handshake from the same
                address is under way or has just succeeded.
        """
        has_other = getattr(error, "reason", "") in ("CERTIFICATE_VERIFY_FAILED", "TLSV1_ALERT_UNKNOWN_CA")
        if may_have_secret and not has_other:
            return
        why = "it has another secret" if has_other else "it has no secret"
        if address in self._addresses or len(self._addresses) >= _MOST_NAMED:
            return
        self._addresses.add(address)
        get_logger().warning(
            f"refused a connection to {self._shown} from {address}: {why}; start every agent with the same "
            "--secret-file"
        )

    def dropped(self, error: OSError, *, is_full: bool) -> None:
        """Log that a connection broke before it was admitted; ``is_full``: as this process has no descriptor left."""
        if is_full and not self._was_full:
            self._was_full = True
            get_logger().warning(
                f"{self._shown} cannot accept more connections at present: {error.strerror}; raise the limit of open "
                "files to four for each worker of the run and 100 more (ulimit -n; in a service LimitNOFILE)"
            )
        get_logger().debug(f"a connection to {self._shown} was dropped", error=str(error))
