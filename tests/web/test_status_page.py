"""The status page: its content, and who can read it."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.diagnosis.records import Usage
from elastic_agent.monitoring.status import GenerationStatus, Goodput, NodeStatus, RunStatus
from elastic_agent.transport import Secret
from elastic_agent.values import Endpoint
from elastic_agent.web import server as server_module
from elastic_agent.web.metrics import CONTENT_TYPE, metrics_text
from elastic_agent.web.server import MOST_CLIENTS, ShownRun, StatusServer
from tests.loop_thread import background_loop, in_loop
from tests.waiting import GUARD_S


@contextmanager
def serving(run: ShownRun, host: str = "127.0.0.1", secret: Secret | None = None) -> Iterator[StatusServer]:
    """Serve the status of this run, in an event loop of this process."""

    async def opened() -> StatusServer:
        return StatusServer(Endpoint(host, 0), run, secret)

    server = in_loop(opened())
    try:
        yield server
    finally:
        background_loop().call_soon_threadsafe(server.close)


def running(nodes: int = 2) -> RunStatus:
    rows = tuple(
        NodeStatus(
            f"n{i}",
            "in the world",
            "running",
            "10.0.0.1",
            workers=2,
            first_rank=2 * i,
            step=7,
            seen_s=99.0,
            steps_per_s=2.5,
            waits=(0.1, 0.3),
            steps=(7, None),
            usage={0: Usage(1.5, 3 * 2**30), 1: Usage()},
            log_dir="/logs/mnist",
        )
        for i in range(nodes)
    )
    past = GenerationStatus(
        1,
        10.0,
        60.0,
        ("n0",),
        2,
        "worker n0/1 exited with code 1: <b>boom</b>",
        cause="root cause",
        failed=True,
    )
    now = GenerationStatus(2, 61.0, None, tuple(node.node_id for node in rows), 2 * nodes)
    return RunStatus(
        "mnist",
        "host0:29400",
        100.0,
        phase="running",
        generation=2,
        since_s=61.0,
        world_size=2 * nodes,
        restarts=1,
        max_restarts=3,
        nodes=rows,
        generations=(past, now),
        goodput=Goodput(60.0, 20.0),
        stragglers=("worker n1/1 (rank 3) is slower than the others",),
    )


def served(determine: Callable[[], RunStatus]) -> AbstractContextManager[StatusServer]:
    """Serve a run whose status is determined when it is asked for."""

    async def status() -> RunStatus:
        return determine()

    return serving(ShownRun(status))


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=GUARD_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def page_of(determine: Callable[[], RunStatus]) -> str:
    with served(determine) as server:
        return get(server.url)[1]


def failed(nodes: int = 3) -> RunStatus:
    """A run that ended long ago; generation 2 was the last one that ran."""
    status = running(nodes)
    cause = "root cause: a full disk"
    ended = replace(status.generations[1], ended_s=110.0, end="n1/0 failed", cause=cause, failed=True)
    rows = tuple(
        NodeStatus(node.node_id, "ended", address=node.address, workers=2, seen_s=99.0)
        for node in status.nodes
    )
    return replace(
        status,
        asked_s=100000.0,
        phase="failed",
        since_s=111.0,
        reason="the restart budget is used up",
        world_size=0,
        nodes=rows,
        generations=(status.generations[0], ended),
        stragglers=(),
    )


def test_page_json_and_metrics_of_a_running_run() -> None:
    with served(running) as server:
        code, page = get(server.url)
        assert (code, "<title>running – mnist</title>" in page) == (200, True)
        assert "http://" not in page, "nothing is loaded from elsewhere"
        code, text = get(f"{server.url}api/status")
        assert (code, json.loads(text)["nodes"][1]["first_rank"]) == (200, 2)
        with urllib.request.urlopen(f"{server.url}metrics", timeout=GUARD_S) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            text = answer.read().decode()
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert samples["elastic_agent_phase", ("phase", "running"), ("run", "mnist")] == 1
        assert samples["elastic_agent_restarts", ("run", "mnist")] == 1
        assert samples["elastic_agent_training_step", ("node", "n1"), ("run", "mnist")] == 7
        assert samples["elastic_agent_training_steps_per_second", ("node", "n1"), ("run", "mnist")] == 2.5
        waits = "elastic_agent_collective_wait_ratio", ("node", "n1"), ("run", "mnist"), ("slot", "1")
        assert samples[waits] == 0.3
        assert samples["elastic_agent_goodput_ratio", ("run", "mnist")] == 0.75
        assert get(f"{server.url}nothing")[0] == 404
        assert get(f"{server.url}../../etc/passwd")[0] == 404


def test_the_page_shows_the_machines_that_host_the_store_together() -> None:
    with served(lambda: replace(running(), store={"lab1": "leads", "lab2": "no answer"})) as server:
        assert "lab1 leads; lab2 no answer" in get(server.url)[1]


def test_nothing_can_be_changed() -> None:
    with served(running) as server:
        request = urllib.request.Request(f"{server.url}api/status", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=GUARD_S)
        with refused.value as answer:
            assert answer.code == 501


def test_pages_of_other_sites_cannot_read_it_through_a_name_of_theirs() -> None:
    with served(running) as server:
        for host, code in (
            ("evil.example", 403),
            ("127.0.0.1.evil.example:80", 403),
            ("localhost:1", 200),
            ("[::1]", 200),
        ):
            assert get(f"{server.url}api/status", Host=host)[0] == code, host


def test_clients_that_send_nothing_keep_no_others_from_being_served_for_long() -> None:
    with served(running) as server:
        port = int(server.url.rsplit(":", 1)[1].strip("/"))
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(MOST_CLIENTS - 1)]
        assert get(f"{server.url}api/status")[0] == 200
        for client in silent:
            client.close()


def test_the_page_shows_300_nodes_and_takes_no_markup_from_messages() -> None:
    with served(lambda: running(300)) as server:
        (_, shown), (_, all_shown) = (get(f"{server.url}{query}") for query in ("", "?all=1"))
    assert "run mnist" in shown
    assert ">598-599</td>" not in shown, "all rows only on request"
    assert '<a href="?all=1">show all</a>' in shown
    assert ">598-599</td>" in all_shown
    assert "&lt;b&gt;boom&lt;/b&gt;" in shown
    assert "1 of 3" in shown
    assert "75 %</b>goodput of this node<" in shown
    assert "2.5</b>steps per second<" in shown
    assert ">10-30 %</td>" in shown
    assert "worker n1/1 (rank 3) is slower than the others" in shown
    assert "output of the workers on each node: /logs/mnist" in shown
    assert 'title="training 1 min"' in shown


def test_the_page_has_a_row_for_each_worker_and_what_is_not_known_of_it_is_left_out() -> None:
    shown = page_of(running)
    rows = re.findall(r'<td class="name">(n1/\d)</td>(.*?)</tr>', shown, re.DOTALL)
    cells = {name: re.findall(r'<td class="number">([^<]*)</td>', row) for name, row in rows}
    assert cells["n1/0"] == ["2", "7", "10 %", "150 %", "3.0 GiB"]
    assert cells["n1/1"] == ["3", "-", "30 %", "-", "-"]


def test_workers_on_gpus_have_these_in_their_rows_and_others_no_empty_columns() -> None:
    status = running()
    on_gpu = replace(status.nodes[0], usage={0: Usage(1.5, 2**30, 0.4, 2 * 2**30)})
    shown = page_of(lambda: replace(status, nodes=(on_gpu, *status.nodes[1:])))
    assert re.findall(r'<th class="number">(GPU[^<]*)</th>', shown) == ["GPU", "GPU memory"]
    assert '<td class="number">40 %</td><td class="number">2.0 GiB</td>' in shown
    assert ">GPU<" not in page_of(running)


def test_those_who_look_at_a_run_see_its_end_before_the_agent_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "NEWS_S", GUARD_S)
    monkeypatch.setattr(server_module, "IDLE_S", GUARD_S)
    seen: list[str] = []
    with served(running) as server:
        assert "<title>running" in get(server.url)[1]
        looking = threading.Thread(target=lambda: seen.append(get(server.url, Prefer="wait")[1]))
        looking.start()
        in_loop(server.tell_end(failed()))
        looking.join()
        assert "<title>failed" in get(server.url)[1]
    assert "<title>failed" in seen[0]
    assert "root cause: a full disk" in seen[0]


def test_output_of_workers_is_shown_to_the_user_of_the_agent_only() -> None:
    async def status() -> RunStatus:
        return running()

    async def output() -> str:
        return "<b>epoch 1</b>"

    run = ShownRun(status, output=output)
    with serving(run) as server, urllib.request.urlopen(f"{server.url}output", timeout=GUARD_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain"), "no markup"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.read() == b"<b>epoch 1</b>"
    with serving(run, "0.0.0.0") as server:
        local = server.url.replace("0.0.0.0", "127.0.0.1")
        assert get(local)[0] == 200
        for target in ("output", "output?x=y", "output?"):
            code, text = get(f"{local}{target}")
            assert (code, "epoch" in text) == (403, False)
    with served(running) as server:  # its workers write to no files
        assert get(f"{server.url}output")[0] == 404


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium")
def test_a_browser_updates_the_page_by_itself(tmp_path: Path) -> None:
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"
    )
    looks: list[int] = []
    open_pages: list[StatusServer] = []

    def changing() -> RunStatus:
        looks.append(1)
        return running() if len(looks) == 1 else failed()

    def gone() -> RunStatus:
        looks.append(1)
        if len(looks) > 1:
            open_pages[-1].close()
        return running()

    def seen(determine: Callable[[], RunStatus]) -> str:
        with served(determine) as server:
            open_pages.append(server)
            command = ["chromium", *flags.split(), f"--user-data-dir={tmp_path}"]
            command += ["--virtual-time-budget=2100", "--dump-dom", server.url]
            return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GUARD_S).stdout

    ended = seen(changing)
    assert "<title>failed – mnist</title>" in ended
    assert '<pre id="cause">root cause: a full disk</pre>' in ended
    looks.clear()
    assert "; this is what was known before" in seen(gone), "a generation failed, not the run"


def test_the_page_names_nodes_that_do_not_train_first_and_why() -> None:
    odd = NodeStatus("n9", "refused", "idle", note="its <script> differs", workers=1)
    status = running()
    shown = page_of(lambda: replace(status, nodes=(*status.nodes, odd)))
    assert shown.index("n9</td>") < shown.index("n0</td>")
    assert '<span class="dot refused"></span>refused (idle): its &lt;script&gt; differs</td>' in shown


def test_the_page_of_a_run_that_forms_says_what_it_waits_for() -> None:
    status = RunStatus(
        "mnist", "host0:29400", 1.0, waiting_for="waiting for 2 more nodes", common_causes="a firewall"
    )
    shown = page_of(lambda: status)
    assert "not formed yet" in shown
    assert "waiting for 2 more nodes" in shown
    assert "a firewall" in shown
    assert "Generations" not in shown


def test_a_run_that_has_ended_is_shown_as_of_its_end() -> None:
    shown = page_of(failed)
    assert "1 d 3 h ago, in generation 2" in shown
    assert "nodes in the world" not in shown
    assert "</b>workers" not in shown
    assert "ended by a failure" in shown, "the legend"
    # 100 of the 101 s from the first generation to the end of the run are covered, not a sliver of a day.
    bars = re.findall(r'<i class="(\w+) failed" style="left:([\d.]+)%; width:([\d.]+)%', shown)
    assert [kind for kind, _, _ in bars] == ["past", "past"]
    assert float(bars[1][1]) + float(bars[1][2]) > 95


def test_labels_of_metrics_may_contain_anything() -> None:
    odd = 'a "run" \\ with\nlines, {braces} and größe'
    families = text_string_to_metric_families(metrics_text(replace(running(), run_id=odd)).decode())
    assert {sample.labels["run"] for family in families for sample in family.samples} == {odd}
