"""Integrations are installed when a worker imports the framework, and the import works as without them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.support import AGENT_ENVIRONMENT, run_script

TWO_THREADS = """
import sys, threading

searched, begun = threading.Event(), threading.Event()

class Telling:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.trainer":
            searched.set()

from elastic_agent.integrations import post_import

post_import.watch()
sys.meta_path.insert(0, Telling())
sys.path.insert(0, ".")
package = threading.Thread(target=__import__, args=("transformers",), daemon=True)
package.start()
begun.wait()
import transformers.trainer
package.join()
print(transformers.trainer.NAME, transformers.DONE)
"""

PACKAGE = """
import __main__

__main__.begun.set()
__main__.searched.wait()
import beside
DONE = True
"""


def test_two_threads_import_a_package_and_its_module_at_once(tmp_path: Path) -> None:
    """Python looks for the module with its import lock held, so this may not wait for the package."""
    (tmp_path / "beside.py").touch()
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "transformers" / "trainer.py").write_text("NAME = __name__\n")
    done = run_script(TWO_THREADS, AGENT_ENVIRONMENT, cwd=tmp_path)
    assert done.stdout == "transformers.trainer True\n", done.stderr


@pytest.mark.parametrize("say", ["integrations.patching", "survive._copies"])
def test_a_line_is_written_at_once_also_by_a_worker_without_buffers(say: str) -> None:
    """Otherwise that of another process may come between the text and its end."""
    reading, writing = os.pipe2(os.O_DIRECT)  # each read returns what one write has written
    program = f"from elastic_agent.{say} import say; say('here')"
    with os.fdopen(writing), os.fdopen(reading, "rb", buffering=0) as written:
        subprocess.run([sys.executable, "-u", "-c", program], stderr=writing, check=True)
        line = written.read(4096)
    assert re.fullmatch(rb"elastic_agent\S*: here\n", line or b"")
