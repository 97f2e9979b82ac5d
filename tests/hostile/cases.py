"""Hand-made requests that must be refused with a clear 4xx. SECRET must never come back."""

from __future__ import annotations

import json

from hostile.raw import chunked, head, post

RECOMMEND, BATCH, EXPLAIN = "/v1/recommend", "/v1/recommend/batch", "/v1/explain"
EVENTS, RELOAD = "/v1/events", "/v1/admin/reload"
MEGABYTE = 2**20


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


# name: (path, body); each is answered with 422
INVALID: dict[str, tuple[str, bytes]] = {
    "empty": (RECOMMEND, b""),
    "spaces": (RECOMMEND, b"   "),
    "no JSON": (RECOMMEND, b"SECRET"),
    "truncated": (RECOMMEND, b'{"history": ["SECRET"'),
    "NaN": (RECOMMEND, b'{"history": [NaN]}'),
    "Infinity": (RECOMMEND, b'{"history": [], "k": Infinity}'),
    "1e999": (EVENTS, b'{"events": [{"user": "SECRET", "item": 1, "time": 1e999}]}'),
    "many digits": (RECOMMEND, b'{"history": [' + b"7" * 5000 + b"]}"),
    "over 64 bits": (RECOMMEND, b'{"history": [92233720368547758080]}'),
    "k over 64 bits": (RECOMMEND, b'{"history": [], "k": 92233720368547758080}'),
    "lone surrogate": (RECOMMEND, rb'{"history": ["SECRET\ud800"]}'),
    "lone surrogate as key": (RECOMMEND, rb'{"history": [], "SECRET\udc00": 1}'),
    "surrogate bytes": (RECOMMEND, b'{"history": ["SECRET\xed\xa0\x80"]}'),
    "not UTF-8": (RECOMMEND, b'{"history": ["SECRET\xff"]}'),
    "UTF-16": (RECOMMEND, '{"history": ["SECRET"]}'.encode("utf-16")),
    "byte order mark": (RECOMMEND, b'\xef\xbb\xbf{"history": ["SECRET"]}'),
    "21 deep": (RECOMMEND, b'{"history": ' + b"[" * 20 + b"]" * 20 + b"}"),
    "100,000 deep": (RECOMMEND, b'{"history": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "deep objects": (RECOMMEND, b'{"history": ' + b'{"a":' * 100_000),
    "duplicate key": (RECOMMEND, b'{"history": ["SECRET"], "history": []}'),
    "duplicate key inside": (EVENTS, b'{"events": [{"user": 1, "user": "SECRET", "item": 1}]}'),
    "unknown field": (RECOMMEND, b'{"history": [], "SECRET": 1}'),
    "many unknown fields": (RECOMMEND, _json({f"SECRET-{i}": i for i in range(40_000)})),
    "a list": (RECOMMEND, b'["SECRET"]'),
    "a string": (RECOMMEND, b'"SECRET"'),
    "null": (RECOMMEND, b"null"),
    "no history": (RECOMMEND, b"{}"),
    "history null": (RECOMMEND, b'{"history": null}'),
    "history a string": (RECOMMEND, b'{"history": "SECRET"}'),
    "history an object": (RECOMMEND, b'{"history": {"0": "SECRET"}}'),
    "id true": (RECOMMEND, b'{"history": [true]}'),
    "id 1.0": (RECOMMEND, b'{"history": [1.0]}'),
    "id null": (RECOMMEND, b'{"history": [null]}'),
    "id a list": (RECOMMEND, b'{"history": [["SECRET"]]}'),
    "id of 1,001 characters": (RECOMMEND, _json({"history": ["x" * 1001]})),
    "1,001 items": (RECOMMEND, _json({"history": ["SECRET"] * 1001})),
    "300,000 wrong items": (RECOMMEND, b'{"history": [' + b"[]," * 300_000 + b"[]]}"),
    "180,000 wrong items": (BATCH, _json({"histories": [[True] * 1000] * 170})),
    "10,001 allowed": (RECOMMEND, _json({"history": [], "allow": [1] * 10_001})),
    "blocked a string": (RECOMMEND, b'{"history": [], "block": "SECRET"}'),
    "k 0": (RECOMMEND, b'{"history": [], "k": 0}'),
    "k 1,001": (RECOMMEND, b'{"history": [], "k": 1001}'),
    "k a string": (RECOMMEND, b'{"history": [], "k": "10"}'),
    "k true": (RECOMMEND, b'{"history": [], "k": true}'),
    "k 1e1": (RECOMMEND, b'{"history": [], "k": 1e1}'),
    "exclude_seen 1": (RECOMMEND, b'{"history": [], "exclude_seen": 1}'),
    "model 1": (RECOMMEND, b'{"history": [], "model": 1}'),
    "model too long": (RECOMMEND, _json({"history": [], "model": "x" * 201})),
    "no histories": (BATCH, b'{"histories": []}'),
    "257 histories": (BATCH, _json({"histories": [[]] * 257})),
    "histories flat": (BATCH, b'{"histories": ["SECRET"]}'),
    "no events": (EVENTS, b'{"events": []}'),
    "257 events": (EVENTS, _json({"events": [{"user": 1, "item": 1}] * 257})),
    "100,000 empty events": (EVENTS, _json({"events": [{}] * 100_000})),
    "event without item": (EVENTS, b'{"events": [{"user": "SECRET"}]}'),
    "event time a string": (EVENTS, b'{"events": [{"user": 1, "item": 1, "time": "SECRET"}]}'),
    "event time true": (EVENTS, b'{"events": [{"user": 1, "item": 1, "time": true}]}'),
    "event time negative": (EVENTS, b'{"events": [{"user": 1, "item": 1, "time": -1}]}'),
    "event time 1e300": (EVENTS, b'{"events": [{"user": 1, "item": 1, "time": 1e300}]}'),
    "event id 1": (EVENTS, b'{"events": [{"user": 1, "item": 1, "id": 1}]}'),
    "event id empty": (EVENTS, b'{"events": [{"user": 1, "item": 1, "id": ""}]}'),
    "event id too long": (EVENTS, _json({"events": [{"user": 1, "item": 1, "id": "x" * 201}]})),
    "nothing to explain": (EXPLAIN, b'{"history": ["item-1"], "items": []}'),
    "101 to explain": (EXPLAIN, _json({"history": ["item-1"], "items": ["item-2"] * 101})),
    "unknown history": (EXPLAIN, b'{"history": ["SECRET"], "items": ["item-2"]}'),
    "attention 1": (EXPLAIN, b'{"history": ["item-1"], "items": ["item-2"], "attention": 1}'),
    "reload what": (RELOAD, b'{"SECRET": 1}'),
}

_CL = "Content-Length"
_JSON = "Content-Type: application/json"
_FORM = "Content-Type: application/x-www-form-urlencoded"
_OTHER_SITE = "Origin: http://evil.example"
_BODY = b'{"history": ["SECRET"]}'
_BIG_CHUNK = b" " * 65_536

# name: (request, statuses it may have; 0 is closed without a word)
HEADS: dict[str, tuple[bytes, set[int]]] = {
    "length negative": (head("POST", RECOMMEND, _JSON, f"{_CL}: -5") + _BODY, {400}),
    "length no number": (head("POST", RECOMMEND, _JSON, f"{_CL}: SECRET") + _BODY, {400}),
    "length over 64 bits": (head("POST", RECOMMEND, _JSON, f"{_CL}: {10**30}") + _BODY, {400, 413}),
    "two lengths": (head("POST", RECOMMEND, _JSON, f"{_CL}: 5", f"{_CL}: 6") + _BODY, {400}),
    "length over 1 MiB": (head("POST", RECOMMEND, _JSON, f"{_CL}: {MEGABYTE + 1}"), {413}),
    "length 200 GB": (head("POST", RECOMMEND, _JSON, f"{_CL}: {200 * 10**9}") + _BODY, {413}),
    "chunked over 1 MiB": (chunked(RECOMMEND, *[_BIG_CHUNK] * 17), {413}),
    "chunk size no number": (chunked(RECOMMEND)[:-5] + b"SECRET\r\nx\r\n", {400}),
    "unknown transfer coding": (head("POST", RECOMMEND, _JSON, "Transfer-Encoding: x"), {400, 501}),
    "text/plain": (post(RECOMMEND, _BODY).replace(b"application/json", b"text/plain"), {415}),
    "no content type": (head("POST", RECOMMEND, f"{_CL}: {len(_BODY)}") + _BODY, {415}),
    "charset latin-1": (post(RECOMMEND, _BODY).replace(b"/json", b"/json; charset=latin-1"), {415}),
    "a form": (head("POST", RELOAD, _FORM, f"{_CL}: 2") + b"a=", {415}),
    "bytes in path": (b"GET /v1/users/\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", {400}),
    "%ff in path": (head("GET", "/v1/users/%ff%fe"), {404, 422}),
    "%00 in path": (head("GET", "/v1/users/%00"), {404, 422}),
    "line breaks in path": (head("GET", "/v1/users/%0d%0aSECRET%1b[2J"), {404}),
    "line break after a path": (post(f"{RECOMMEND}%0A", _BODY), {404}),
    "lone surrogate in path": (head("GET", "/v1/users/%ed%a0%80"), {404, 422}),
    "dots in path": (head("GET", "/web/../../../../etc/passwd"), {404}),
    "encoded dots in path": (head("GET", "/web/%2e%2e/service.py"), {404}),
    "NUL in a file's name": (head("GET", "/web/a%00.js"), {404}),
    "a file's long name": (head("GET", f"/web/{'x' * 5000}"), {404}),
    "long user": (head("GET", f"/v1/users/{'x' * 20_000}"), {404, 422}),
    "path of 70,000": (head("GET", f"/{'x' * 70_000}"), {414}),
    "bytes in query": (b"GET /v1/items?query=\xff HTTP/1.1\r\nHost: localhost\r\n\r\n", {200, 400}),
    "%ff in query": (head("GET", "/v1/items?query=%ff%fe"), {200, 422}),
    "%00 in query": (head("GET", "/v1/items?query=%00"), {200, 422}),
    "bad escape in query": (head("GET", "/v1/items?query=%zz%"), {200, 422}),
    "limit SECRET": (head("GET", "/v1/items?limit=SECRET"), {422}),
    "limit many digits": (head("GET", f"/v1/items?limit={'9' * 5000}"), {422}),
    "limit 0": (head("GET", "/v1/users?limit=0"), {422}),
    "k NaN": (head("GET", "/v1/users/u/recommendations?k=nan"), {422}),
    "257 allowed in query": (head("GET", f"/v1/users/u/recommendations?{'allow=1&' * 257}"), {422}),
    "similar to nothing": (head("GET", "/v1/items/SECRET/similar"), {404}),
    "unknown model": (head("GET", "/v1/items?model=SECRET"), {404}),
    "300 headers": (head("GET", "/healthz", *(f"X-{i}: SECRET" for i in range(300))), {431}),
    "header of 1 MB": (head("GET", "/healthz", f"X: {'x' * 10**6}"), {0, 400, 431}),
    "header without colon": (head("GET", "/healthz", "SECRET"), {400}),
    "line folding": (head("GET", "/healthz", "X: a", " SECRET"), {400}),
    "bytes in headers": (head("GET", "/v1/nothing", "Authorization: Bearer \xff\xfe"), {404}),
    "unknown method": (head("SECRET", RECOMMEND), {405}),
    "OPTIONS *": (head("OPTIONS", "*"), {400}),
    "CONNECT": (head("CONNECT", "evil.example:443"), {400}),
    "TRACE": (head("TRACE", "/v1/model"), {405}),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 9, {0, 400}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200, {0, 400}),
    "garbage": (b"\x00\xff" * 500 + b"\r\n\r\n", {0, 400}),
    "other host": (b"GET /v1/model HTTP/1.1\r\nHost: evil.example\r\n\r\n", {403}),
    "no host": (b"GET /v1/model HTTP/1.1\r\n\r\n", {400, 403}),
    "two hosts": (b"GET /v1/model HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", {400, 403}),
    "page of another site": (head("POST", RELOAD, _OTHER_SITE, f"{_CL}: 0"), {403}),
    "erased by another site": (head("DELETE", "/v1/users/u", _OTHER_SITE), {403}),
    "preflight": (
        head("OPTIONS", RECOMMEND, _OTHER_SITE, "Access-Control-Request-Method: POST"),
        {405},
    ),
    "websocket": (
        head("GET", "/v1/nothing", "Connection: Upgrade", "Upgrade: websocket",
             "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
        {400, 404},
    ),
}  # fmt: skip

# requests that end in the middle, by the client closing its side
CUT_OFF: dict[str, tuple[bytes, set[int]]] = {
    "within the head": (b"GET /healthz HT", {0, 400}),
    "within the body": (post(RECOMMEND, _BODY)[:-5], {400}),
    "within a chunk of 2**64": (chunked(RECOMMEND)[:-5] + b"f" * 16 + b"\r\nSECRET", {400, 413}),
    "within a chunk": (chunked(RECOMMEND, _BODY)[:-12], {400}),
    "before the last chunk": (chunked(RECOMMEND, _BODY)[:-5], {400}),
}
