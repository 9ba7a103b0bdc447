"""What becomes of workers that fail in odd ways, and of what they say: as a user sees it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.agent.support import run

SAYS_WHY_ON_STDOUT = "import os, sys; print('no such device'); sys.exit(3 * int(os.environ['LOCAL_RANK']))"
SAYS_WHY_ON_STDERR = "import sys; print('no such device', file=sys.stderr); sys.exit(3)"
TWO, ALL_FILES = ("--nproc-per-node", "2"), ("--redirects", "3")
READ = r"elastic-agent logs \S+/{} --generation 1 \(the end of its output; on \S+: \S+/{}.log\)"
READ = READ.replace(" ", r"(?:\\n)? +")


@pytest.mark.prove
@pytest.mark.parametrize(
    ("script", "options", "advice"),
    [
        (
            SAYS_WHY_ON_STDOUT,
            (*TWO, "--local-ranks-filter", "0"),
            READ.format(1, "output"),
        ),
        (SAYS_WHY_ON_STDOUT, TWO, READ.format(1, "output")),
        (SAYS_WHY_ON_STDOUT, (*TWO, *ALL_FILES), READ.format(1, "stdout")),
        (SAYS_WHY_ON_STDERR, ALL_FILES, READ.format(0, "stderr")),
        ("import sys; sys.exit(3)", ALL_FILES, "exited with code 3"),
    ],
    ids=["not shown", "on the console", "on stdout", "on stderr", "silent"],
)
def test_a_file_is_recommended_for_reading_if_there_is_output_in_it(
    tmp_path: Path, script: str, options: tuple[str, ...], advice: str
) -> None:
    kept = ("--log-dir", str(tmp_path / "logs"), "--log-format", "json")
    log = run(tmp_path, script, "--max-restarts", "0", *kept, *options).stderr
    assert re.search(advice, log), log
    assert ("elastic-agent logs" in log) == advice.startswith("elastic-agent")


BAD = "import sys; print('step 1', file=sys.stderr)\nraise ValueError('bad label')  # here"


@pytest.mark.parametrize(
    ("options", "times"),
    [
        pytest.param((), 1, id="on the console"),
        pytest.param(("--redirects", "2"), 1, id="in a file", marks=pytest.mark.prove),
        pytest.param(("--log-format", "json"), 2, id="as fields for programs", marks=pytest.mark.prove),
    ],
)
def test_a_traceback_is_shown_once_where_people_read(
    tmp_path: Path, options: tuple[str, ...], times: int
) -> None:
    log = run(tmp_path, BAD, "--max-restarts", "0", *options).stderr
    assert log.count("raise ValueError") == times, log
    assert "exited with code 1: ValueError: bad label" in log


HANGS = """
    import os, time
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
        if dist.get_rank() == 1:
            time.sleep(600)
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.destroy_process_group()  # else torch may abort the interpreter that ends
"""


def test_the_stacks_of_a_hang_are_shown_once_with_their_generation_and_no_frame_of_the_agent(
    tmp_path: Path,
) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--hang-timeout", "6", "--log-format", "json")
    done = run(tmp_path, HANGS, *options)
    log = done.stderr
    assert done.returncode == 0, log
    assert log.count(": has completed 2 collectives, at train.py:10") == 1, log
    assert log.count("where the workers of generation 1 are:") == 1
    assert "most recent call first" not in log
    assert "elastic_agent/integrations" not in log
    (root_cause,) = [line for line in log.splitlines() if "generation 1: root cause: " in line]
    assert root_cause.count("/1 (rank 1)") == 1, "the worker is named once"


TRAINS = """
    import os, torch
    weights = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weights], 0.1)
    for _ in range(int(os.environ["{steps}"])):
        weights.sum().backward()
        optimizer.step()
    raise ValueError("bad label")
"""


@pytest.mark.parametrize(
    ("steps", "starts"),
    [
        pytest.param("ELASTIC_AGENT_GENERATION", 4, id="each time after more steps"),
        pytest.param("LOCAL_WORLD_SIZE", 3, id="each time after one step"),
    ],
)
@pytest.mark.prove
def test_the_same_error_ends_a_run_only_if_it_gets_no_further_by_its_optimizer_steps(
    steps: str, starts: int, tmp_path: Path
) -> None:
    done = run(tmp_path, TRAINS.replace("{steps}", steps), "--max-restarts", "3")
    assert done.returncode == 1
    assert len(set(re.findall(r"generation (\d+): 1 node, 1 worker", done.stderr))) == starts, done.stderr
