"""Keys that are never printed, and log lines that nobody can break."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bert4rec.serving.http.access import ApiKeys, Role
from bert4rec.serving.json_logs import JSONLogFormatter, log_access, log_config

READ, ADMIN = "r" * 20, "a" * 20
any_text = st.text(st.characters(), max_size=40)  # half surrogates too


class TestKeys:
    def test_file_and_environment_add_up(self, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# ours\n\nread {READ}\nadmin  {ADMIN}\n")
        file.chmod(0o600)
        keys = ApiKeys.load(file, {"BERT4REC_READ_KEY": f"{'x' * 16}, {'y' * 16}"})
        assert keys
        assert keys.role_of(READ) is Role.READ
        assert keys.role_of(ADMIN) is Role.ADMIN
        assert keys.role_of("x" * 16) is keys.role_of("y" * 16) is Role.READ
        for wrong in (None, "", READ[:-1], READ + "r", READ.upper(), "\ud800", "ü" * 20):
            assert keys.role_of(wrong) is None

    def test_no_key_at_all_is_false_and_fits_nobody(self) -> None:
        keys = ApiKeys.load(None, {"BERT4REC_READ_KEY": " , "})
        assert not keys
        assert keys.role_of("") is keys.role_of(None) is None

    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("read SECRET", "16"),
            ("SECRETSECRETSECRET", "read KEY"),
            ("write SECRETSECRETSECRET", "read KEY"),
            ("read SECRETSECRETSECRET more", "read KEY"),
            ("read SECRETSECRETSECRETü", "header"),
            ("read SECRETSECRET,SECRETSECRET", "header"),
            ("read SECRETSECRETSECRET\nadmin SECRETSECRETSECRET", "two keys"),
            ("# nothing", "no key"),
        ],
    )
    def test_errors_help_and_never_print_a_key(self, tmp_path: Path, content: str, said: str) -> None:
        file = tmp_path / "keys"
        file.write_text(content, encoding="utf-8")
        file.chmod(0o600)
        with pytest.raises(ValueError, match=said) as wrong:
            ApiKeys.load(file, {})
        assert "SECRET" not in str(wrong.value)

    def test_a_file_that_cannot_be_read_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="nowhere"):
            ApiKeys.load(tmp_path / "nowhere", {})

    def test_a_file_that_everyone_can_read_is_warned_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        file = tmp_path / "keys"
        file.write_text(f"read {READ}\n")
        for mode, n_warnings in ((0o640, 0), (0o644, 1)):
            file.chmod(mode)
            with caplog.at_level(logging.WARNING):
                ApiKeys.load(file, {})
            assert len(caplog.records) == n_warnings
        assert READ not in caplog.text


class TestLogs:
    @given(any_text, any_text)
    @example("a\nb\r\x1b[2J\x00\x7f\x9b\u2028", "\ud800")
    def test_a_record_is_one_printable_line_with_what_was_logged(self, a: str, b: str) -> None:
        record = logging.makeLogRecord({"msg": "%s", "args": (a,), "path": b, "levelname": "INFO"})
        line = JSONLogFormatter().format(record)
        assert line.isascii()
        assert line.isprintable()
        assert (json.loads(line)["message"], json.loads(line)["path"]) == (a, b)

    @given(any_text)
    @example("/v1/users/\n{}\x1b[2J\x7f")
    def test_so_is_a_line_of_the_access_log(self, hostile: str) -> None:
        stderr, sys.stderr = sys.stderr, io.StringIO()
        try:
            log_access("id", hostile, hostile, 200, 0.0123, "::1", 5)
            line = sys.stderr.getvalue()
        finally:
            sys.stderr = stderr
        assert line.endswith("}\n")
        assert line[:-1].isascii()
        assert line[:-1].isprintable()
        fields = json.loads(line)
        assert fields["path"] == hostile[:200]
        assert (fields["status"], fields["ms"], fields["bytes"]) == (200, 12.3, 5)

    def test_a_record_that_cannot_be_written_is_still_a_line(self) -> None:
        class Broken:
            def __str__(self) -> str:
                raise RuntimeError

            def __repr__(self) -> str:
                return "<broken>"

        record = logging.makeLogRecord({"msg": "%d", "args": ("x",), "odd": Broken(), "n": 1e999})
        assert json.loads(JSONLogFormatter().format(record))["odd"] == "<broken>"

    def test_a_traceback_is_in_its_line(self) -> None:
        try:
            raise ValueError("two\nlines")
        except ValueError:
            record = logging.makeLogRecord({"msg": "m", "exc_info": sys.exc_info()})
        line = JSONLogFormatter().format(record)
        assert "\n" not in line
        assert "two\nlines" in json.loads(line)["traceback"]

    def test_granian_gets_a_plain_dictionary(self) -> None:
        config = log_config("DEBUG")
        assert json.loads(json.dumps(config)) == config
        assert {"_granian", "granian.access", "bert4rec"} <= set(config["loggers"])
