"""The secret of a run, from the source that ``--secret-source`` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.config.job_secret import JobSecret
from elastic_agent.config.run_secret import check_only_source, run_secret


@dataclass(frozen=True)
class SecretSource:
    """What is set about the secret."""

    name: str
    """``--secret-source``."""
    file: Path | None
    """``--secret-file``."""
    state_dir: Path
    timeout_s: float
    """For how long to wait for the agent that creates the secret (the join time-out)."""

    @property
    def is_told(self) -> bool:
        """The host of the store tells it, with MUNGE."""
        return self.name == "munge"

    def find(
        self, environ: Mapping[str, str], variable: str | None, say: Callable[[str], object]
    ) -> tuple[bytes, ...]:
        """The secret as :func:`run_secret` returns it; empty if no source was named and there is none, or it is told.

        Blocks while another agent creates the secret.

        Args:
            environ: of this process.
            variable: the value of ELASTIC_AGENT_SECRET; None: it is not set.
            say: is told if that takes long.

        Raises:
            UsageError: the secret cannot be read or created, others can read it, or there is another source as well.
            NoSecretError: no agent has created it in time.
        """
        if self.name == "auto":
            return run_secret(self.file, environ, variable)
        check_only_source(self.name, self.file, environ, variable)
        return () if self.is_told else JobSecret.of_step(self.state_dir, environ).wait(self.timeout_s, say)
