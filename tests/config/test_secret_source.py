"""``--secret-source``: one source, which must work where it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.config.errors import UsageError
from elastic_agent.config.run_secret import check_only_munge
from tests.config.support import Shell


def test_a_second_source_is_refused(shell: Shell, tmp_path: Path) -> None:
    file = shell.write("run.secret", "0" * 32)
    with pytest.raises(UsageError, match=r'--secret-source: got "munge", but --secret-file is given as well'):
        shell.load(["--secret-source", "munge", "--secret-file", file])
    assert shell.load(["--secret-source", "auto", "--secret-file", file]).settings.secret_file == Path(file)
    (tmp_path / "elastic-agent-secret").write_text("0" * 32)
    for environ, variable, what in (
        ({}, "0" * 32, "the variable ELASTIC_AGENT_SECRET"),
        ({"CREDENTIALS_DIRECTORY": str(tmp_path)}, None, "the credential elastic-agent-secret"),
    ):
        with pytest.raises(UsageError, match=f"--secret-source munge: got {what} as well"):
            check_only_munge(None, environ, variable)
    check_only_munge(None, {}, None)


def test_munge_is_refused_where_no_agent_hosts_the_store(shell: Shell) -> None:
    argv = ["--secret-source", "munge", "--rdzv-backend", "etcd", "--rdzv-endpoint", "e1", "--rdzv-id", "job"]
    with pytest.raises(UsageError, match="but a run in etcd has no host"):
        shell.load(argv)
