"""A real server process meets requests that are wrong, too large, too slow, or not allowed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hostile.cases import CUT_OFF, HEADS, INVALID
from hostile.fuzz import ERROR_BODY, by_description, by_hand
from hostile.large import megabytes, push_many, reset_peak
from hostile.raw import ask, connect, head, post, read_answer
from hostile.slow import KINDS, LONG_TITLES, accepted, asking_steadily, seconds_until_closed
from served import Served, free_port, save_model, serve, serve_with, wait_until

from bert4rec.serving.serve_settings import ServeSettings

READ, ADMIN = "read-key-" + "r" * 20, "admin-key-" + "a" * 20
SECONDS = 1.5  # time limits of the second server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hostile") / "model"
    save_model(directory, titles=LONG_TITLES)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    """Without keys. After all that was done to it, it is as it was, and nothing failed inside."""
    with serve(model, "--store", f"sqlite:{model.parent / 'open.db'}") as served:
        workers = served.workers()
        yield served
        assert served.workers() == workers
        assert ask(served.port, head("GET", "/readyz")).status == 200
        assert [line for line in served.log_lines() if line["level"] == "error"] == []


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Served]:
    """With keys, and with little patience."""
    keys = {"BERT4REC_READ_KEY": READ, "BERT4REC_ADMIN_KEY": ADMIN}
    settings = ServeSettings(
        model=model,
        port=free_port(),
        store=f"sqlite:{model.parent / 'histories.db'}",
        header_within=SECONDS,
        body_within=SECONDS,
        send_within=SECONDS,
    )
    with serve_with(settings, keys) as served:
        yield served
        assert [line for line in served.log_lines() if line["level"] == "error"] == []


def test_clients_that_do_not_finish_their_requests_keep_nobody_out(server: Served) -> None:
    body = json.dumps({"history": ["item-1"]}).encode()
    begun = post("/v1/recommend", body)[:-1]
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connect(server.port)) for _ in range(200)]
        for sock in socks:  # more than may wait for the model
            sock.sendall(begun)
        wait_until(lambda: len(accepted(server.port, socks)) == len(socks))
        assert {ask(server.port, post("/v1/recommend", body)).status for _ in range(20)} == {200}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_body_is_refused_without_an_echo(server: Served, name: str) -> None:
    path, body = INVALID[name]
    answer = ask(server.port, post(path, body))
    assert answer.status == 422
    assert answer.error["message"]
    assert len(answer.body) < ERROR_BODY
    assert b"SECRET" not in answer.body


@pytest.mark.parametrize("name", [*HEADS, *CUT_OFF])
def test_a_broken_request_is_refused(server: Served, name: str) -> None:
    request, statuses = (HEADS | CUT_OFF)[name]
    answer = ask(server.port, request, then_ends=name in CUT_OFF)
    assert answer.status in statuses
    assert b"SECRET" not in answer.body
    assert "SECRET" not in str(answer.headers)
    assert not [header for header in answer.headers if header.startswith("access-control")]
    assert answer.status == 200 or len(answer.body) < ERROR_BODY


def test_a_refused_small_body_leaves_the_connection_usable(server: Served) -> None:
    with connect(server.port) as sock:
        for _ in range(3):
            sock.sendall(post("/v1/recommend", b"{}").replace(b"application/json", b"text/plain"))
            assert read_answer(sock).status == 415
        sock.sendall(post("/v1/recommend", b'{"history": []}'))
        assert read_answer(sock).status == 200


def test_hostile_ids_do_not_break_the_log(server: Served) -> None:
    path = "/v1/users/%0a%0d%1b[2J%00%7f%c2%9b%e2%80%a8%ff"
    ask(server.port, head("GET", path, "X-Request-Id: find-me"))
    wait_until(lambda: b"find-me" in server.log.read_bytes())  # written after the response
    lines = server.log.read_bytes().splitlines()
    [line] = [json.loads(line) for line in lines if b"find-me" in line]
    assert line["path"].startswith("/v1/users/\n\r\x1b[2J\x00\x7f\x9b\u2028")
    assert all(0x20 <= byte < 0x7F or byte == 0x0A for byte in server.log.read_bytes())


def test_cases_from_the_api_description(server: Served) -> None:
    outcome = by_description(server.url, 5, 1, {})
    assert outcome.total > 80
    assert (outcome.n_5xx, outcome.n_hangs, outcome.faults) == (0, 0, [])
    assert outcome.largest_error < ERROR_BODY
    assert {200, 404, 422} <= set(outcome.by_status)


def test_spoiled_requests(server: Served) -> None:
    outcome = by_hand(server.url, 200, 1, {})
    assert (outcome.n_5xx, outcome.n_hangs, outcome.total) == (0, 0, 200)
    assert outcome.largest_error < ERROR_BODY
    assert {200, 422} <= set(outcome.by_status)


def test_large_bodies_do_not_fill_the_memory(server: Served) -> None:
    [worker] = server.workers()
    reset_peak(worker)
    before = megabytes(worker, "VmRSS")
    statuses = push_many(server.port, 20, 50 * 2**20)
    assert set(statuses) <= {413, 415, 0}  # 0: the server closed while the body was still coming
    assert statuses[413] >= 5
    assert megabytes(worker) - before < 40


def test_slow_clients_are_closed_and_others_are_answered_meanwhile(guarded: Served) -> None:
    [worker] = guarded.workers()
    key = f"X-API-Key: {READ}"
    with asking_steadily(guarded.port, key) as other:
        closed = seconds_until_closed(guarded.port, worker, KINDS * 3, key, within=60)
    assert max(closed) < float("inf")
    assert other.seconds
    assert other.n_failed == 0


@pytest.mark.parametrize(
    ("method", "path", "body", "statuses"),  # without a key, with a wrong one, reading, admin
    [
        ("GET", "/healthz", None, [200, 200, 200, 200]),
        ("GET", "/", None, [200, 200, 200, 200]),
        ("GET", "/openapi.json", None, [200, 200, 200, 200]),
        ("GET", "/metrics", None, [401, 401, 200, 200]),
        ("GET", "/v1/model", None, [401, 401, 200, 200]),
        ("GET", "/nothing", None, [401, 401, 404, 404]),
        ("POST", "/v1/recommend", {"history": []}, [401, 401, 200, 200]),
        ("POST", "/v1/events", {"events": [{"user": 1, "item": 1}]}, [401, 401, 403, 200]),
        ("DELETE", "/v1/users/1", None, [401, 401, 403, 200]),
        ("POST", "/v1/admin/reload", None, [401, 401, 403, 200]),
        ("OPTIONS", "/v1/recommend", None, [401, 401, 405, 405]),
    ],
)
def test_keys_open_what_they_should(guarded: Served, method: str, path: str, body: object, statuses: list[int]) -> None:
    for scheme in ({"authorization": "Bearer {}"}, {"x-api-key": "{}"}):
        found = []
        for key in (None, "wrong", READ, ADMIN):
            headers = {} if key is None else {n: v.format(key) for n, v in scheme.items()}
            with guarded.client(**headers) as client:
                answer = client.request(method, path, json=body) if body else client.request(method, path)
            assert (answer.status_code == 401) == ("www-authenticate" in answer.headers)
            assert "access-control-allow-origin" not in answer.headers
            found.append(answer.status_code)
        assert found == statuses
    assert READ not in guarded.log.read_text()


def test_other_hosts_are_answered_with_keys_only(server: Served, guarded: Served) -> None:
    headers = {"host": "example.org", "x-api-key": READ}
    assert httpx.get(f"{server.url}/v1/model", headers=headers).status_code == 403
    assert httpx.get(f"{guarded.url}/v1/model", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/web/main.js", "/docs", "/v1/model", "/healthz", "/nothing"])
def test_every_response_has_security_headers(server: Served, path: str) -> None:
    answer = ask(server.port, head("GET", path))
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert len(answer.headers["x-request-id"]) == 16
