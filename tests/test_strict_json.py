"""Strict JSON: what json.dumps writes is read, and what RFC 8259 lacks is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert4rec.serving.http.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_KEYS, NotStrictJSON, parse

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=30) | st.dictionaries(text, inner, max_size=5),
    max_leaves=40,
)


class TestStrictJSON:
    @given(plain, st.booleans())
    def test_plain_data_comes_back_as_it_was_written(self, data: object, ascii_only: bool) -> None:
        try:
            assert parse(json.dumps(data, ensure_ascii=ascii_only).encode()) == data
        except NotStrictJSON:
            assert depth(data) > MAX_DEPTH

    @given(st.binary(max_size=60) | st.text('[]{}",:\\ud8dcNaInfity-+.eE0123 \n', max_size=60).map(str.encode))
    @example(b"\xef\xbb\xbf{}")
    def test_any_bytes_are_what_python_reads_or_refused(self, body: bytes) -> None:
        try:
            value = parse(body)
        except NotStrictJSON:
            return
        assert value == json.loads(body)

    @pytest.mark.parametrize(
        "body",
        [
            b"",
            b" ",
            b"SECRET",
            b'{"SECRET": NaN}',
            b"[Infinity]",
            b"[-Infinity]",
            b"[1e999]",
            b"[-1e999]",
            b"[" + b"9" * 5000 + b"]",
            b"[" + b"9" * 400 + b".0]",
            rb'["SECRET\ud800"]',
            rb'{"SECRET\uDfff": 1}',
            rb'["\udc00\ud800"]',
            b'["\xed\xa0\x80"]',
            b'["SECRET\xff"]',
            b"\xef\xbb\xbf{}",
            b'{"SECRET": 1, "SECRET": 2}',
            b'{"a": {"SECRET": 1, "SECRET": 1}}',
            b'{"a": 1} SECRET',
            b'{"a": "SECRET',
            b'["a\nSECRET"]',
            rb'["SECRET\x"]',
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b"[" * 100_000 + b"]" * 100_000,
            json.dumps(dict.fromkeys(map(str, range(MAX_KEYS + 1)))).encode(),
            json.dumps([[]] * MAX_CONTAINERS).encode(),
        ],
        ids=lambda body: repr(body[:24]),
    )
    def test_what_is_not_strict_is_refused_without_an_echo(self, body: bytes) -> None:
        with pytest.raises(NotStrictJSON) as refused:
            parse(body)
        assert "SECRET" not in str(refused.value)
        assert len(str(refused.value)) < 100

    @pytest.mark.parametrize("levels", [MAX_DEPTH, MAX_DEPTH + 1])
    @pytest.mark.parametrize("decoy", ["", '"]]]]]]]]]]]]]]]]]]]]]]]]]",', '"}}}}}}}}}}}}}}}}}}}}}}",'])
    def test_depth_is_counted_in_brackets_that_nest(self, levels: int, decoy: str) -> None:
        body = (f"[{decoy}" * (levels - 1) + "[]" + "]" * (levels - 1)).encode()
        if levels <= MAX_DEPTH:
            parse(body)
        else:
            with pytest.raises(NotStrictJSON, match="levels"):
                parse(body)
        assert parse(b'["' + b"[{" * 1000 + b'"]') == ["[{" * 1000]

    def test_a_whole_surrogate_pair_is_a_character(self) -> None:
        assert parse(rb'["\ud83c\udfac \\ud800"]') == ["\U0001f3ac \\ud800"]


def depth(data: object) -> int:
    if isinstance(data, dict):
        return 1 + max(map(depth, data.values()), default=0)
    return 1 + max(map(depth, data), default=0) if isinstance(data, list) else 0
