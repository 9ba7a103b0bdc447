"""The status page: what it serves, and to whom."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from prometheus_client.parser import text_string_to_metric_families

from elastic_agent.agent.web.server import CLIENTS, StatusServer
from elastic_agent.diagnosis.goodput import Goodput
from elastic_agent.diagnosis.status import GenerationStatus, NodeStatus, RunStatus
from elastic_agent.values import Endpoint


def running(nodes: int = 2) -> RunStatus:
    rows = tuple(
        NodeStatus(
            f"n{i}", "in the world", "running", "10.0.0.1", workers=2, first_rank=2 * i, step=7, seen_s=99.0
        )
        for i in range(nodes)
    )
    past = GenerationStatus(
        1, 10.0, 60.0, ("n0",), 2, "worker n0/1 exited with code 1: <b>boom</b>", cause="root cause"
    )
    now = GenerationStatus(2, 61.0, None, tuple(one.node_id for one in rows), 2 * nodes)
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
        goodput=Goodput(training_s=60.0, repeated_s=15.0, starting_s=5.0, knows_steps=True),
    )


@contextmanager
def served(determine: Callable[[], RunStatus], host: str = "127.0.0.1") -> Iterator[StatusServer]:
    """A server, and the loop in which the status is determined, as in an agent."""
    loop = asyncio.new_event_loop()
    ready = threading.Event()

    async def status() -> RunStatus:
        return determine()

    server = StatusServer(Endpoint(host, 0), status)

    async def start() -> None:
        server.start()
        ready.set()

    def live() -> None:
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=live)
    thread.start()
    try:
        assert ready.wait(10)
        yield server
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_page_json_metrics_and_probes_of_a_running_run() -> None:
    with served(running) as server:
        code, page = get(server.url)
        assert (code, "<title>elastic-agent</title>" in page) == (200, True)
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", ""), (
            "nothing is loaded from elsewhere"
        )
        code, text = get(f"{server.url}api/status")
        assert (code, json.loads(text)["nodes"][1]["first_rank"]) == (200, 2)
        assert get(f"{server.url}healthz") == (200, "ok\n")
        assert get(f"{server.url}readyz") == (200, "running\n")
        code, text = get(f"{server.url}metrics")
        assert code == 200
        samples = {
            (one.name, *sorted(one.labels.items())): one.value
            for family in text_string_to_metric_families(text)
            for one in family.samples
        }
        assert samples["elastic_agent_phase", ("phase", "running"), ("run", "mnist")] == 1
        assert samples["elastic_agent_restarts", ("run", "mnist")] == 1
        assert samples["elastic_agent_training_step", ("node", "n1"), ("run", "mnist")] == 7
        assert samples["elastic_agent_goodput_ratio", ("run", "mnist")] == 0.75
        assert samples["elastic_agent_activity_seconds", ("activity", "repeated"), ("run", "mnist")] == 15
        assert get(f"{server.url}nothing")[0] == 404
        assert get(f"{server.url}../../etc/passwd")[0] == 404


def test_a_run_that_forms_is_not_ready_and_nothing_can_be_changed() -> None:
    with served(lambda: RunStatus("mnist", "host0:29400", 1.0, phase="forming")) as server:
        assert get(f"{server.url}readyz") == (503, "forming\n")
        request = urllib.request.Request(f"{server.url}api/status", data=b"{}", method="POST")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
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
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(CLIENTS - 1)]
        assert get(f"{server.url}healthz")[0] == 200
        for one in silent:
            one.close()


def test_an_agent_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_agent.agent.web.server.ANSWER_S", 0.1)
    thaw = threading.Event()

    def frozen() -> RunStatus:
        thaw.wait(20)
        return running()

    with served(frozen) as server:
        code, text = get(f"{server.url}healthz")
        thaw.set()
        assert (code, text) == (503, "the agent did not answer within 0.1 s\n")


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_a_browser_shows_300_nodes_and_takes_no_markup_from_messages() -> None:
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    with served(lambda: running(300)) as server:
        shown = subprocess.run(
            ["chromium", *options, server.url], capture_output=True, text=True, timeout=120
        ).stdout
    assert "run mnist" in shown
    assert "<td>598–599</td>" not in shown, "all rows only on request"
    assert "show all 300" in shown
    assert "&lt;b&gt;boom&lt;/b&gt;" in shown
    assert "1 of 3" in shown
    assert "75 %</b>goodput of this node<" in shown
    assert 'title="training 1 min, repeated 15 s, starting 5.0 s"' in shown
