"""The service gives the export's lists, refuses hostile requests with a sentence, and is reloaded without a loss."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.serving.conftest import NUM_ITEMS, Client, serving, write_export
from turbogr import cli
from turbogr.errors import UserError
from turbogr.exports import standalone
from turbogr.serving.live_export import LiveExport
from turbogr.serving.request_body import Limits
from turbogr.serving.service import Service


def expected(folder: Path, *args, **options):
    return [[list(pair) for pair in row] for row in standalone.Recommender(folder).recommend(*args, **options)]


def pairs(answer):
    return [[[entry["item"], entry["score"]] for entry in one["items"]] for one in answer["lists"]]


def test_lists_are_those_of_the_export(folder: Path, client: Client) -> None:
    histories = [["item-001", "item-002"], [["item-004", 50], ["item-003", 20]], [], ["nothing"]]
    status, answer = client.recommend(histories=histories, k=5)
    assert status == 200 and answer["version"] == "a" * 64
    assert pairs(answer) == expected(folder, histories, 5)
    assert [one["unknown"] for one in answer["lists"]] == [[], [], [], ["nothing"]]
    assert answer["lists"][0]["items"][0]["title"].startswith("The <b>")
    options = {"include": ["item-005", "item-006", "item-001"], "exclude": ["item-006"], "filter_seen": False}
    status, answer = client.recommend(histories=histories, k=5, **options)
    assert status == 200 and pairs(answer) == expected(folder, histories, 5, **options)
    assert client.recommend(histories=[[]], k=1000)[1]["lists"][0]["items"][-1]["item"] == f"item-{NUM_ITEMS - 1:03d}"


def test_users_are_asked_for_by_their_ids(folder: Path, client: Client) -> None:
    status, answer = client.recommend(users=[7, "8"], k=3)
    assert status == 200
    assert pairs(answer) == expected(folder, [["item-001", "item-002", "item-003"], ["item-004"]], 3)
    assert client.recommend(users=[9]) == (422, {"error": "there is no user 9; give a history instead"})


def test_similar_items(folder: Path, client: Client) -> None:
    status, answer = client.ask("POST", "/similar", {"items": ["item-001"], "k": 4})
    assert status == 200
    assert pairs(answer) == [
        [list(pair) for pair in row] for row in standalone.Recommender(folder).similar(["item-001"], 4)
    ]
    assert client.ask("POST", "/similar", {"items": ["x"]})[0] == 422


def test_what_is_served_can_be_asked(client: Client) -> None:
    assert client.ask("GET", "/health")[1] == {
        "status": "ok",
        "version": "a" * 64,
        "delivered": "random",
        "items": NUM_ITEMS,
        "search": "exact",
        "users": True,
        "similar": True,
        "titles": True,
    }
    client.recommend(histories=[[]])
    client.recommend(histories=7)
    text = client.ask("GET", "/metrics")[1]
    assert 'turbogr_requests_total{path="/recommend",status="200"} 1.0' in text
    assert 'turbogr_requests_total{path="/recommend",status="422"} 1.0' in text
    assert f'turbogr_export_info{{version="{"a" * 64}"}} 1.0' in text
    assert 'turbogr_request_seconds_bucket{le="0.005",path="/recommend"}' in text
    film = {"item": "item-007", "title": "The <b>7</b>th Film"}
    assert client.ask("GET", "/items?query=item-007")[1]["items"] == [film]
    assert client.ask("GET", "/items?query=%3E7%3C/B%3Eth%20f")[1]["items"] == [film]
    assert client.ask("GET", "/items?query=")[1]["items"] == []
    status, page = client.ask("GET", "/")
    assert status == 200 and "Try the recommendations" in page and "http" not in re.sub(r"https?://www\.w3", "", page)


def test_the_description_names_every_path_and_field(client: Client) -> None:
    description = client.ask("GET", "/openapi.json")[1]
    assert set(description["paths"]) == {"/recommend", "/similar", "/items", "/health", "/metrics"}
    described = description["components"]["schemas"]
    error = client.recommend(unheard=1)[1]["error"]
    assert sorted(error.split("Fields: ")[1].split(", ")) == sorted(described["Recommend"]["properties"])
    error = client.ask("POST", "/similar", {"unheard": 1})[1]["error"]
    assert sorted(error.split("Fields: ")[1].split(", ")) == sorted(described["Similar"]["properties"])
    for name in re.findall(r"#/components/schemas/(\w+)", json.dumps(description)):
        assert name in described


HOSTILE = [
    (b"", "is not JSON"),
    (b"{", "is not JSON"),
    (b"[1, 2]", "the body is [1, 2]; give an object"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"histories": [[NaN]]}', "NaN is no number of JSON"),
    (b'{"histories": [[1e999]], "k": 1}', None),
    (b'{"histories": [[' + b"9" * 5000 + b"]]}", "is not JSON"),
    (b"\xff\xfe\x00", "is not JSON"),
    ({"histories": "item-001"}, "histories is 'item-001'; give a list"),
    ({"histories": ["item-001"]}, "histories[0] is 'item-001'; each history is a list"),
    ({"histories": [[{"item": 1}]]}, "items are texts or numbers"),
    ({"histories": [[None]]}, "items are texts or numbers"),
    ({"histories": [[True]]}, "items are texts or numbers"),
    ({"histories": [[["item-001", "soon"]]]}, "cannot read 'soon' as a time"),
    ({"histories": [[["item-001", -5]]]}, "before 1970"),
    ({"histories": [[["item-001", 10**400]]]}, "after 2200"),
    ({"histories": [[["item-001", 1, 2]]]}, "not an (item, time) pair"),
    ({"histories": [[["item-001", [1]]]]}, "cannot read [1] as a time"),
    ({"histories": [["item-001"]], "at": {"a": 1}}, "cannot read"),
    ({"histories": [["\ud800"]]}, None),
    ({"histories": [["x" * 100_000]], "k": 1}, None),
    ({"histories": [[]] * 65}, "at most 64 are taken"),
    ({"histories": [["a"] * 10_001]}, "at most 10,000 are taken"),
    ({"histories": [[]], "users": [1]}, "give either histories"),
    ({}, "give either histories"),
    ({"histories": []}, "must not be empty"),
    ({"users": [[1]]}, "users[0] is [1]; ids are texts or numbers"),
    ({"histories": [[]], "k": 0}, "k is 0; give a whole number from 1 to 1,000"),
    ({"histories": [[]], "k": 10**30}, "from 1 to 1,000"),
    ({"histories": [[]], "k": "10"}, "k is '10'"),
    ({"histories": [[]], "k": True}, "k is True"),
    ({"histories": [[]], "filter_seen": 1}, "filter_seen is 1; give true or false"),
    ({"histories": [[]], "include": "item-001"}, "include is 'item-001'; give a list"),
    ({"histories": [[]], "include": [[1]]}, "include[0] is [1]"),
    ({"histories": [[]], "include": ["x"]}, "include has no item"),
    ({"histories": [[]], "exclude": ["x"] * 10_001}, "at most 10,000"),
    ({"histories": [[]], "filterseen": True}, "unknown field 'filterseen'. Did you mean 'filter_seen'?"),
]


@pytest.mark.parametrize(("body", "sentence"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_requests_get_a_sentence(client: Client, body: object, sentence: str | None) -> None:
    status, answer = client.ask("POST", "/recommend", body)
    if sentence is None:
        assert status == 200
    else:
        assert status == 422 and sentence in answer["error"] and "Traceback" not in answer["error"]
        assert len(answer["error"]) < 400
    assert client.recommend(histories=[[]])[0] == 200


def test_a_large_body_is_refused_before_it_is_read(client: Client) -> None:
    status, answer = client.ask("POST", "/recommend", b" " * ((1 << 20) + 1))
    assert status == 413 and "more than 1,048,576 bytes" in answer["error"]
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        connection.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999999999999999\r\n\r\n")
        assert b" 4" in connection.recv(1 << 16).split(b"\r\n")[0]
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as connection:
        connection.sendall(b"POST /recommend HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.settimeout(60)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 400 << 20:
                sent += connection.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        assert sent < 400 << 20
    assert client.recommend(histories=[[]])[0] == 200


def test_what_is_not_there_gets_a_sentence(client: Client) -> None:
    assert client.ask("GET", "/nothing") == (404, {"error": "there is nothing at '/nothing'; see /openapi.json"})
    status, answer = client.ask("GET", "/recommend")
    assert status == 405 and "GET is not for '/recommend'" in answer["error"]
    assert client.ask("GET", "/items?query=" + "x" * 101)[0] == 422


def test_concurrent_requests_are_computed_together(folder: Path) -> None:
    service = Service(LiveExport(folder))
    sizes, compute, started = [], service.queue._compute, threading.Event()

    def slow(jobs):
        sizes.append(len(jobs))
        started.set()
        time.sleep(0.2)
        return compute(jobs)

    service.queue._compute = slow
    with serving(service) as client:
        answers: list[tuple[int, object]] = [(0, None)] * 20
        want = expected(folder, [[f"item-{row:03d}"] for row in range(20)], 3)

        def ask(number: int) -> None:
            answers[number] = client.recommend(histories=[[f"item-{number:03d}"]], k=3)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
        threads[0].start()
        started.wait(60)
        for thread in threads[1:]:
            thread.start()
        for thread in threads:
            thread.join()
        for (status, answer), wanted in zip(answers, want, strict=True):
            assert status == 200 and pairs(answer) == [wanted]
    assert sum(sizes) == 20 and len(sizes) < 20


def test_too_many_waiting_requests_are_refused(folder: Path) -> None:
    service = Service(LiveExport(folder), most_waiting=1)
    release, started, compute = threading.Event(), threading.Event(), service.queue._compute

    def blocked(jobs):
        started.set()
        release.wait(60)
        return compute(jobs)

    service.queue._compute = blocked
    with serving(service) as client:
        statuses: list[int] = []
        threads = [
            threading.Thread(target=lambda: statuses.append(client.recommend(histories=[[]])[0])) for _ in range(6)
        ]
        threads[0].start()
        started.wait(60)
        for thread in threads[1:]:
            thread.start()
        while len(statuses) < 4:
            time.sleep(0.01)
        assert set(statuses) == {503}
        release.set()
        for thread in threads:
            thread.join()
        assert sorted(statuses) == [200, 200, 503, 503, 503, 503]


def test_a_defect_gives_500_without_a_stack_trace(folder: Path) -> None:
    service = Service(LiveExport(folder))
    service.queue._compute = lambda jobs: 1 // 0
    with serving(service) as client:
        status, answer = client.recommend(histories=[[]])
        assert (status, answer) == (
            500,
            {"error": "this request could not be answered; the log of the service says why"},
        )
        assert client.ask("GET", "/health")[0] == 200


def test_a_new_export_is_served_without_a_lost_request(folder: Path, client: Client) -> None:
    stop, answers, failures = threading.Event(), [], []
    wanted = {}
    for version, seed in (("a", 0), ("b", 1), ("c", 2)):
        write_export(folder.with_name(version), version * 64, seed=seed)
        wanted[version * 64] = expected(folder.with_name(version), [["item-001"]], 3)

    def ask() -> None:
        connection = client.connect()
        while not stop.is_set():
            try:
                status, answer = client.ask("POST", "/recommend", {"histories": [["item-001"]], "k": 3}, connection)
                answers.append((status, answer["version"], pairs(answer)))
            except Exception as error:
                failures.append(error)
        connection.close()

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for version, seed in (("b", 1), ("c", 2)):
        write_export(folder, version * 64, seed=seed)
        while client.ask("GET", "/health")[1]["version"] != version * 64:
            time.sleep(0.02)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures
    assert {version for _, version, _ in answers} >= {"a" * 64, "c" * 64}
    for status, version, lists in answers:
        assert status == 200 and lists == wanted[version]
    assert 'turbogr_reloads_total{result="served"} 2.0' in client.ask("GET", "/metrics")[1]


def test_a_damaged_export_is_not_served(folder: Path, client: Client) -> None:
    write_export(folder, "b" * 64, seed=1, broken=True)
    while "reload_problem" not in (health := client.ask("GET", "/health")[1]):
        time.sleep(0.02)
    assert "items.safetensors is not what was written" in health["reload_problem"]
    assert health["version"] == "a" * 64 and client.recommend(histories=[[]])[0] == 200
    write_export(folder, "c" * 64, seed=1)
    while client.ask("GET", "/health")[1]["version"] != "c" * 64:
        time.sleep(0.02)
    assert "reload_problem" not in client.ask("GET", "/health")[1]


def test_limits_can_be_set(folder: Path) -> None:
    with serving(Service(LiveExport(folder), limits=Limits(k=3, events=2, histories=1))) as client:
        assert "from 1 to 3" in client.recommend(histories=[[]], k=4)[1]["error"]
        assert "at most 2" in client.recommend(histories=[["a", "b", "c"]])[1]["error"]
        assert "at most 1" in client.recommend(histories=[[], []])[1]["error"]


def test_a_folder_that_is_no_export_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="is not an export"):
        LiveExport(folder.parent)
    write_export(folder, "b" * 64, broken=True)
    with pytest.raises(UserError, match="is not what was written"):
        LiveExport(folder)


def test_the_command_serves_without_torch_and_stops_gracefully(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'scipy'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from turbogr.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-c", code, "serve", str(folder), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert "serving random of 50 items at http://127.0.0.1:" in line, line + process.stderr.read()
            client = Client(int(re.findall(r":(\d+) ", line)[0]))
            assert client.recommend(histories=[["item-001"]])[0] == 200
            assert cli.main(["serve", str(folder), "--port", str(client.port)]) == 2
            assert "choose another --port" in capsys.readouterr().err
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) in (0, 143, -signal.SIGTERM)
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()
