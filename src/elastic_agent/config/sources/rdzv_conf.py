"""``--rdzv-conf``: torch's keys and ours become settings; none is dropped silently."""

from __future__ import annotations

from collections.abc import Iterable

from elastic_agent.config.errors import UsageError, did_you_mean, quoted
from elastic_agent.config.sources import Given, Source

MEANING = {
    "join_timeout": "join_timeout",
    "timeout": "join_timeout",
    "last_call_timeout": "settle",
    "settle": "settle",
    "start_timeout": "start_timeout",
    "lease_ttl": "lease_ttl",
    "fence_margin": "fence_margin",
    "port_range": "port_range",
    "etcd_prefix": "etcd_prefix",
    "cacert": "etcd_ca",
    "ca_cert": "etcd_ca",
    "cert": "etcd_cert",
    "ssl_cert": "etcd_cert",
    "key": "etcd_key",
    "ssl_cert_key": "etcd_key",
    "etcd_user": "etcd_user",
    "etcd_password_file": "etcd_password_file",
    "secret_file": "secret_file",
}
"""Key to setting. A key that bears the setting's own name goes before one that means the same."""

NO_EFFECT = {
    "is_host": "the machine that has the endpoint's address hosts the store",
    "keep_alive_interval": "leases are configured by lease_ttl",
    "keep_alive_max_attempt": "leases are configured by lease_ttl",
    "heartbeat_timeout": "leases are configured by lease_ttl",
    "close_timeout": "the outcome stays readable until every node has seen it",
    "read_timeout": "store calls do not block the agent",
    "use_libuv": "the store always uses it",
    "store_type": "the store is always TCP",
    "rank": "use --node-rank instead",
    "protocol": "connections to etcd use TLS if a certificate is given",
}
"""torch's keys that are accepted but do nothing here, with the reason."""


def meanings(conf: Iterable[tuple[str, str]], source: Source) -> tuple[dict[str, Given], list[str]]:
    """Return the settings that these keys and values give, and notes on the keys that do nothing here.

    Raises:
        UsageError: a key that neither torch nor this agent knows.
    """
    settings: dict[str, Given] = {}
    notes = []
    own_name: set[str] = set()
    for key, value in conf:
        if key in NO_EFFECT:
            notes.append(f"{source}: {key} has no effect: {NO_EFFECT[key]}")
            continue
        if key not in MEANING:
            hint = did_you_mean(key, [*MEANING, *NO_EFFECT])
            raise UsageError(
                f"{source}: unknown key {quoted(key)}; expected one of {', '.join(MEANING)}"
                + (f"; {hint}" if hint else "")
            )
        name = MEANING[key]
        if name in own_name and key != name:
            continue
        if key == name:
            own_name.add(name)
        settings[name] = Given(value, Source(source.layer, f"{source}: {key}"))
    return settings, notes
