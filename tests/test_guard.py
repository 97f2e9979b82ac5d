"""Laws of what stands between the network and the handlers, without a network."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from guarded_site import ADMIN, CHUNKED, JSON, READ, Message, Site, always_ok
from hypothesis import given, settings
from hypothesis import strategies as st

from bert4rec.serving.http import access
from bert4rec.serving.http.access import Role
from bert4rec.serving.http.problems import Problem
from bert4rec.serving.serve_settings import MAX_BODY


class TestProblems:
    @pytest.mark.parametrize(
        ("body", "where", "said"),
        [
            ({"k": "SECRET"}, "body.k", "integer"),
            ({"k": 1001}, "body.k", "1000"),
            ({"SECRET": 1}, "body", "unknown field"),
            ({"histories": [[], ["a", True]]}, "body.histories[1][1]", "string or an integer"),
            ({"events": [{"user": 1}, {"user": None}]}, "body.events[1].user", "string or an int"),
            ({"events": [{"user": 1, "SECRET": 1}]}, "body.events[0]", "unknown field"),
            ({"events": [{}, {}]}, "body.events[0].user", "missing. There is 1 more problem"),
            (["SECRET"], "body", "object"),
        ],
    )
    def test_an_invalid_body_says_where_and_what_but_not_the_value(self, body: object, where: str, said: str) -> None:
        answer = Site().post("/v1/recommend", json.dumps(body).encode())
        assert answer.status == 422
        assert (answer.error["code"], answer.error["where"]) == ("invalid", where)
        assert said in answer.error["message"]
        assert b"SECRET" not in answer.body

    def test_an_invalid_query_says_where(self) -> None:
        answer = Site().ask("GET", "/v1/items?limit=SECRET")
        assert (answer.status, answer.error["where"]) == (422, "query.limit")
        assert b"SECRET" not in answer.body

    @pytest.mark.parametrize(
        ("method", "path", "status", "code"),
        [
            ("GET", "/SECRET", 404, "not_found"),
            ("GET", "/v1/recommend", 405, "method_not_allowed"),
            ("GET", "/v1/model", 500, "internal"),
            ("GET", "/v1/users", 503, "overloaded"),
        ],
    )
    def test_every_failure_has_the_same_small_body(
        self, method: str, path: str, status: int, code: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        answer = Site().ask(method, path)
        assert (answer.status, answer.error["code"]) == (status, code)
        assert b"SECRET" not in answer.body
        assert ("SECRET" in caplog.text) == (status == 500)  # the log has the traceback
        assert answer.header("retry-after") == ("2" if status == 503 else None)


class TestRefusals:
    @pytest.mark.parametrize(
        "host", [b"localhost", b"LOCALHOST:1", b"127.0.0.1", b"127.0.0.1:65535", b"[::1]:80", b"our.name:8"]
    )
    def test_without_keys_this_machine_is_answered(self, host: bytes) -> None:
        assert Site(allowed_host=["our.name"]).ask("GET", "/v1/items", host=host).status == 200

    @pytest.mark.parametrize(
        "host",
        [b"", b"evil.example", b"127.0.0.1.evil.example", b"evil@127.0.0.1", b"127.0.0.1:x",
         b"localhost:80:80", b"\xff\xfe", b"::1", b"0.0.0.0"],
    )  # fmt: skip
    def test_other_host_names_are_answered_only_with_keys(self, host: bytes) -> None:
        answer = Site().ask("GET", "/v1/items", host=host)
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        key = (b"x-api-key", READ.encode())
        assert Site(with_keys=True).ask("GET", "/v1/items", (), [key], host=host).status == 200

    @pytest.mark.parametrize("path", ["", "*", "evil.example:443"])
    def test_a_request_needs_a_path(self, path: str) -> None:
        assert Site().ask("GET", path).status == 400

    def test_two_host_headers_are_one_too_many(self) -> None:
        assert Site().ask("GET", "/v1/items", (), [(b"host", b"localhost")]).status == 403

    @pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"http://127.0.0.1:9999"])
    def test_pages_of_other_sites_change_nothing(self, origin: bytes) -> None:
        for method, path in (("POST", "/v1/admin/reload"), ("DELETE", "/v1/users/u")):
            answer = Site().ask(method, path, (), [(b"origin", origin)])
            assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
        own = Site().post("/v1/recommend", b"{}", headers=[(b"origin", b"http://127.0.0.1:8000")])
        assert own.status == 200

    @pytest.mark.parametrize(
        ("method", "path", "role"),
        [
            ("GET", "/", None),
            ("GET", "/web/main.js", None),
            ("GET", "/healthz", None),
            ("GET", "/readyz", None),
            ("GET", "/docs", None),
            ("GET", "/docs/swagger-ui.css", None),
            ("GET", "/openapi.json", None),
            ("GET", "/metrics", Role.READ),
            ("POST", "/v1/recommend", Role.READ),
            ("POST", "/v1/recommend/batch", Role.READ),
            ("POST", "/v1/explain", Role.READ),
            ("GET", "/v1/users", Role.READ),
            ("GET", "/v1/users/u/recommendations", Role.READ),
            ("GET", "/v1/model", Role.READ),
            ("GET", "/anything", Role.READ),
            ("OPTIONS", "/v1/recommend", Role.READ),
            ("POST", "/v1/events", Role.ADMIN),
            ("DELETE", "/v1/users/u", Role.ADMIN),
            ("POST", "/v1/admin/reload", Role.ADMIN),
            ("POST", "/v1/recommend/", Role.ADMIN),
            ("PUT", "/v1/anything", Role.ADMIN),
        ],
    )
    def test_who_may_do_what(self, method: str, path: str, role: Role | None) -> None:
        allowed = {None: None, READ: Role.READ, ADMIN: Role.ADMIN, "wrong-key-wrong-key": None}
        for key, given_role in allowed.items():
            bearer = b"Bearer " + (key or "").encode()
            for header in ((b"authorization", bearer), (b"x-api-key", (key or "").encode())):
                answer = Site(with_keys=True, app=always_ok).ask(method, path, (), [header])
                if role is None or (given_role is not None and given_role >= role):
                    assert answer.status == 200
                elif given_role is not None:
                    assert (answer.status, answer.error["code"]) == (403, "role_missing")
                else:
                    code = "key_missing" if key is None else "key_wrong"
                    assert (answer.status, answer.error["code"]) == (401, code)
                    assert answer.header("www-authenticate") == "Bearer"

    @pytest.mark.parametrize(
        ("kind", "is_taken"),
        [
            (b"application/json", True),
            (b"Application/JSON ; Charset=UTF-8", True),
            (b'application/json; charset="utf8"; x=y', True),
            (b"application/json; charset=latin-1", False),
            (b"application/json; charset=", False),
            (b"application/jsonp", False),
            (b"text/plain", False),
            (b"application/x-www-form-urlencoded", False),
            (b"multipart/form-data; boundary=x", False),
            (b"text/plain; application/json", False),
            (b"\xff", False),
            (b"", False),
        ],
    )
    def test_a_body_has_to_say_that_it_is_json(self, kind: bytes, is_taken: bool) -> None:
        answer = Site().post("/v1/recommend", b"{}", kind=kind)
        assert answer.status == (200 if is_taken else 415)

    def test_a_full_queue_refuses_before_the_body_is_read(self) -> None:
        async def unread() -> Message:
            raise AssertionError("the body was read")

        site = Site()
        site.service.refused = Problem(503, "overloaded", "Full.", headers={"Retry-After": "3"})
        answer = site.post("/v1/recommend", b"{}", receive=unread)
        assert (answer.status, answer.header("retry-after")) == (503, "3")
        assert site.ask("GET", "/v1/items").status == 200


class TestBodies:
    def test_all_chunks_arrive_as_one(self) -> None:
        for headers in ([JSON, (b"content-length", b"9")], [JSON, CHUNKED]):
            answer = Site().ask("POST", "/v1/recommend", [b'{"k"', b"", b": 77}"], headers)
            assert json.loads(answer.body) == {"k": 77}

    def test_the_limit_is_exact(self) -> None:
        body = b'{"k": 7}'.ljust(MAX_BODY)
        halves = [body[: MAX_BODY // 2], body[MAX_BODY // 2 :]]
        assert Site().post("/v1/recommend", *halves).status == 200
        assert Site().ask("POST", "/v1/recommend", halves, [JSON, CHUNKED]).status == 200
        over = Site().ask("POST", "/v1/recommend", [*halves, b" "], [JSON, CHUNKED])
        assert (over.status, over.error["code"]) == (413, "body_too_large")
        assert over.header("connection") == "close"

    @pytest.mark.parametrize("length", [str(MAX_BODY + 1).encode(), b"9" * 4000])
    def test_a_length_over_it_is_refused_unread(self, length: bytes) -> None:
        async def unread() -> Message:
            raise AssertionError("the body was read")

        headers = [JSON, (b"content-length", length)]
        answer = Site().ask("POST", "/v1/recommend", (), headers, receive=unread)
        assert answer.status == 413

    @pytest.mark.parametrize("length", [b"-1", b"x", b"1,1", b"\xb2"])
    def test_a_length_that_is_no_number_is_a_bad_request(self, length: bytes) -> None:
        headers = [JSON, (b"content-length", length)]
        assert Site().ask("POST", "/v1/recommend", [b"{}"], headers).status == 400

    def test_a_body_that_ends_too_early_is_a_bad_request(self) -> None:
        headers = [JSON, (b"content-length", b"100")]
        answer = Site().ask("POST", "/v1/recommend", [b'{"k"'], headers, is_cut_off=True)
        assert (answer.status, answer.error["code"]) == (400, "bad_request")

    def test_a_body_that_dribbles_is_given_up(self) -> None:
        async def dribble() -> Message:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        site = Site(body_within=0.1)
        answer = site.post("/v1/recommend", b" " * 1000, receive=dribble)
        assert (answer.status, answer.error["code"]) == (408, "body_too_slow")
        assert answer.header("connection") == "close"

    def test_the_app_is_told_that_the_client_has_gone(self) -> None:
        heard: list[str] = []
        told: list[Message] = [
            {"type": "http.request", "body": b"{}", "more_body": True},
            {"type": "http.request", "body": b"", "more_body": False},
            {"type": "http.disconnect"},
        ]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            heard.extend([(await receive())["type"], (await receive())["type"]])
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async def receive() -> Message:
            return told.pop(0)

        Site(app=app).post("/v1/recommend", b"{}", receive=receive)
        assert heard == ["http.request", "http.disconnect"]


class TestResponses:
    @pytest.mark.parametrize(("path", "script"), [("/", True), ("/web/x", True), ("/docs", True), ("/v1/items", False)])
    def test_every_response_has_security_headers(self, path: str, script: bool) -> None:
        answer = Site().ask("GET", path)
        policy = answer.header("content-security-policy") or ""
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert ("script-src 'self'" in policy) == script
        assert ("unsafe-inline" in policy) == (path == "/docs")
        assert answer.header("x-content-type-options") == "nosniff"
        assert answer.header("referrer-policy") == "no-referrer"
        assert answer.header("cross-origin-resource-policy") == "same-origin"
        assert answer.header("cache-control") == ("no-cache" if script else "no-store")
        assert not [name for name, _ in answer.headers if name.startswith("access-control")]

    @pytest.mark.parametrize(
        ("given_id", "is_kept"),
        [
            (b"a.B-9_", True),
            (b"x" * 64, True),
            (b"x" * 65, False),
            (b"a b", False),
            (b"\xff", False),
            (b"a\nb", False),
            (b"", False),
        ],
    )
    def test_a_sane_request_id_is_kept(self, given_id: bytes, is_kept: bool) -> None:
        site = Site()
        ids = [site.ask("GET", "/v1/items", (), [(b"x-request-id", given_id)]).header("x-request-id") for _ in range(2)]
        assert (ids == [given_id.decode("latin-1")] * 2) == is_kept
        assert is_kept or ids[0] != ids[1]
        assert all(access.valid_request_id({b"x-request-id": (i or "").encode()}) for i in ids)

    def test_connections_are_closed_while_draining(self) -> None:
        site = Site()
        assert site.ask("GET", "/v1/items").header("connection") is None
        site.service.is_draining = True
        assert site.ask("GET", "/v1/items").header("connection") == "close"
        assert site.ask("GET", "/nothing").header("connection") == "close"

    @pytest.mark.parametrize("n", [1, 2**16 - 2, 2**16, 300_000])
    def test_a_large_response_is_sent_in_chunks(self, n: int) -> None:
        answer = Site().ask("GET", f"/v1/items?limit={n}")
        assert answer.body == b'"' + b"x" * n + b'"'
        assert max(len(each["body"]) for each in answer.messages[1:]) <= 2**16
        more = [each.get("more_body", False) for each in answer.messages[1:]]
        assert more == [True] * (len(more) - 1) + [False]

    def test_a_client_that_does_not_read_is_given_up(self) -> None:
        n_sent = 0

        async def stuck(message: Message) -> None:
            nonlocal n_sent
            n_sent += message["type"] == "http.response.body"
            if n_sent > 2:
                await asyncio.sleep(60)

        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)
            await stuck(message)

        site = Site(send_within=0.1)
        with pytest.raises(IndexError):  # no message was kept by the site itself
            site.ask("GET", "/v1/items?limit=900000", send=send)
        assert not [each for each in sent if each.get("more_body") is False]
        assert site.guard.n_answered == 1

    def test_half_a_response_is_never_completed(self, caplog: pytest.LogCaptureFixture) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            raise RuntimeError("in the middle")

        answer = Site(app=app).ask("GET", "/v1/items")
        assert answer.messages[-1]["more_body"] is True
        assert "in the middle" in caplog.text

    @pytest.mark.parametrize("fails", [True, False])
    def test_an_app_without_a_response_is_an_internal_error(self, fails: bool) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            if fails:
                raise RuntimeError

        answer = Site(app=app).ask("GET", "/v1/items")
        assert (answer.status, answer.error["code"]) == (500, "internal")

    def test_few_routes_are_counted_however_many_paths_there_are(self) -> None:
        site = Site()
        paths = ["/v1/users/a", "/v1/users/b/c", "/v1/users/a/recommendations", "/v1/items/x/similar"]
        for path in [*paths, "/web/a", "/nothing/at/all", "/v1/items"]:
            site.ask("GET", path)
        site.ask("BREW", "/")
        assert {(method, route) for method, route, _, _ in site.service.answers} == {
            ("GET", "/v1/users/{user}"),
            ("GET", "/v1/users/{user}/recommendations"),
            ("GET", "/v1/items/{item}/similar"),
            ("GET", "/web/*"),
            ("GET", "other"),
            ("GET", "/v1/items"),
            ("other", "/"),
        }

    def test_a_websocket_is_closed(self) -> None:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.run(Site().guard({"type": "websocket", "path": "/"}, receive, send))
        assert [message["type"] for message in sent] == ["websocket.close"]


HEADERS = st.sampled_from(
    b"host origin authorization x-api-key content-type content-length x-request-id transfer-encoding".split()
)


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200),
    st.lists(st.tuples(HEADERS, st.binary(max_size=20)), max_size=5),
    st.text(st.characters(), max_size=40),
)
def test_no_request_makes_the_guard_fail(body: bytes, headers: list[tuple[bytes, bytes]], path: str) -> None:
    for with_keys in (False, True):
        answer = Site(with_keys=with_keys).ask("POST", f"/{path}", [body], headers)
        assert 400 <= answer.status < 500
        assert answer.error
