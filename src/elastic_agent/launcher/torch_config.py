"""torch's ``LaunchConfig`` in settings of the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

_SAME = (
    "nproc_per_node",
    "max_restarts",
    "monitor_interval",
    "start_method",
    "log_line_prefix_template",
    "local_addr",
    "event_log_handler",
    "signals_to_handle",
    "duplicate_stdout_filters",
    "duplicate_stderr_filters",
    "virtual_local_rank",
    "shutdown_timeout",
    "role",
)
"""Fields that have the name of the setting."""

_WITHOUT_EFFECT = {"monitor_interval": 0.1, "start_method": "spawn"}
"""torch's defaults of fields of which the agent says that they have no effect; a program did not set them."""

_CONFIGS = {"timeout": "join_timeout", "join_timeout": "join_timeout", "last_call_timeout": "settle"}
"""torch's keys of ``rdzv_configs`` that are settings; its others have no meaning here."""


def settings_of(config: LaunchConfig) -> dict[str, Any]:
    """Names and values of settings; a field that the config does not set (None, False, empty) is left out.

    The backend counts only with an endpoint, as its default is an etcd of version 2. ``logs_specs`` gives the log
    directory. ``numa_options`` and ``metrics_cfg`` have no effect.
    """
    found: dict[str, Any] = {
        name: value for name in _SAME if (value := getattr(config, name)) != _WITHOUT_EFFECT.get(name)
    }
    found["nnodes"] = f"{config.min_nodes}:{config.max_nodes}"
    found["rdzv_id"] = config.run_id
    if config.logs_specs is not None:
        found["log_dir"] = config.logs_specs.root_log_dir
    if config.rdzv_endpoint:
        found["rdzv_endpoint"] = config.rdzv_endpoint
        found["rdzv_backend"] = {"etcd-v2": "etcd", "static": "c10d"}.get(
            config.rdzv_backend, config.rdzv_backend
        )
    for key, value in config.rdzv_configs.items():
        if key in _CONFIGS:
            found[_CONFIGS[key]] = value
        elif key == "rank":
            found["node_rank"] = value
    return {name: value for name, value in found.items() if not _is_unset(value)}


def _is_unset(value: Any) -> bool:
    """Not for the number 0, which equals False."""
    return value is None or value is False or value in ("", [])
