"""What deploy/ and docs/how-to/serving.md say is what the program does."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer.main
import yaml

from bert4rec.cli import app as cli
from bert4rec.serving import serve_settings as settings
from bert4rec.serving import server, service, store
from bert4rec.serving.http.app import make_app
from bert4rec.serving.prometheus_metrics import ServiceMetrics
from bert4rec.serving.serve_settings import ServeSettings

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCS = (ROOT / "docs" / "how-to" / "serving.md").read_text(encoding="utf-8")
SOURCES = sorted((ROOT / "src" / "bert4rec" / "serving").rglob("*.py"))
SERVE = typer.main.get_command(cli).commands["serve"]  # type: ignore[attr-defined]


def lines_of(name: str) -> dict[str, list[str]]:
    """The unit's `Key=value` or the Containerfile's `WORD value`, by key; joined lines."""
    text = (DEPLOY / name).read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"([A-Za-z]+)[= ]\s*(.*)", line)
        if match and not line.startswith("#"):
            found.setdefault(match[1], []).append(match[2])
    return found


def serve_options(words: list[str]) -> dict[str, Any]:
    """As `bert4rec serve` reads them: an unknown option or a wrong value is an error."""
    assert Path(words[0]).name == "bert4rec"
    assert words[1] == "serve"
    with SERVE.make_context("serve", words[2:]) as context:
        return dict(context.params)


def container_words() -> list[str]:
    [entry], [command] = (lines_of("Containerfile")[key] for key in ("ENTRYPOINT", "CMD"))
    return [*json.loads(entry), *json.loads(command)]


@pytest.fixture(scope="module")
def described(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The app's own description; it needs no model."""
    folder = tmp_path_factory.mktemp("deploy")
    guarded = make_app(ServeSettings(model=folder, store=f"sqlite:{folder / 'x.db'}"))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(guarded)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/openapi.json")

    found: dict[str, Any] = asyncio.run(ask()).json()
    return found


def test_the_unit_starts_what_there_is_and_waits_for_its_end() -> None:
    unit = lines_of("bert4rec.service")
    options = serve_options(shlex.split(unit["ExecStart"][0]))
    assert options["keys"] is not None
    assert options["store"].startswith("sqlite:%S/" + unit["StateDirectory"][0])
    assert unit["LoadCredential"][0].split(":")[0] == Path(options["keys"]).name
    assert unit["KillMode"] == ["mixed"]
    assert int(unit["TimeoutStopSec"][0]) > options["drain"] + server.END_WITHIN
    assert "MemoryDenyWriteExecute" not in unit


def test_the_container_starts_what_there_is_as_somebody_without_rights() -> None:
    options = serve_options(container_words())
    container = lines_of("Containerfile")
    assert container["EXPOSE"] == [str(options["port"])]
    assert f"127.0.0.1:{options['port']}/healthz" in container["HEALTHCHECK"][0]
    assert options["store"].startswith(f"sqlite:{container['WORKDIR'][-1]}/")
    assert int(container["USER"][0].split(":")[0]) > 0
    assert container["STOPSIGNAL"] == ["SIGTERM"]


def test_options_behind_the_image_name_win() -> None:
    options = serve_options([*container_words(), "--store", "redis://redis/0", "--workers", "3"])
    assert (options["store"], options["workers"]) == ("redis://redis/0", 3)


def test_the_builder_gets_all_that_is_copied_and_no_more() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = {line[1:] for line in ignored if line.startswith("!")}
    copies = [line.split()[:-1] for line in lines_of("Containerfile")["COPY"]]
    copied = {word for words in copies if "--from=build" not in words for word in words}
    assert "*" in ignored
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def test_compose_starts_what_there_is_and_redis_keeps_what_it_acknowledges() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
    ours, redis = services["bert4rec"], services["redis"]
    options = serve_options([*container_words(), *ours["command"]])
    assert options["workers"] == 2
    assert options["store"].startswith("redis://redis:")
    assert int(ours["stop_grace_period"].rstrip("s")) > options["drain"] + server.END_WITHIN
    said = " ".join(redis["command"])
    for setting in ("appendonly yes", "appendfsync always", "maxmemory-policy noeviction"):
        assert f"--{setting}" in said


def test_nginx_waits_longer_than_the_service() -> None:
    text = (DEPLOY / "nginx.conf").read_text(encoding="utf-8")
    seconds = {name: int(n) for name, n in re.findall(r"(\w+_timeout)\s+(\d+)s;", text)}
    default = ServeSettings(model=Path(), store="")
    assert seconds["proxy_read_timeout"] > max(default.answer_within, service.EXPLAIN_WITHIN)
    [megabytes] = re.findall(r"client_max_body_size\s+(\d+)m;", text)
    assert int(megabytes) * 2**20 > settings.MAX_BODY  # so that our own 413 is the one seen


def test_alerts_and_docs_speak_of_metrics_that_exist() -> None:
    text = ServiceMetrics().text().decode()
    exist = set(re.findall(r"# TYPE (\S+)", text)) - set(re.findall(r"# TYPE (\S+_created)", text))
    rules = (DEPLOY / "bert4rec.rules.yml").read_text(encoding="utf-8")
    name = r"\bbert4rec_[a-z_]+"
    assert {re.sub("_bucket$", "", found) for found in re.findall(name, rules)} <= exist
    assert set(re.findall(name, DOCS)) == exist


def test_the_docs_name_every_endpoint_and_no_other(described: dict[str, Any]) -> None:
    exist = {(method.upper(), path) for path, methods in described["paths"].items() for method in methods}
    assert set(re.findall(r"^\| `([A-Z]+) (/\S*)`", DOCS, re.MULTILINE)) == exist


def test_every_curl_in_the_docs_goes_to_an_endpoint(described: dict[str, Any]) -> None:
    paths = [re.sub(r"\{\w+\}", "[^/]+", path) for path in described["paths"]]
    asked = re.findall(r"curl [^\n]*http://127\.0\.0\.1:8000([^\s'?]*)", DOCS)
    assert len(asked) > 10
    for path in asked:
        assert any(re.fullmatch(pattern, path) for pattern in paths), path


def test_the_docs_name_every_option_with_its_default() -> None:
    options = [param for param in SERVE.params if param.opts[0].startswith("--")]
    assert len(options) > 10
    names = {name for option in options for name in (*option.opts, *option.secondary_opts)}
    for name in names - {"--help", "-h"}:
        assert re.search(rf"`{name}[ `]", DOCS), name
    rows = re.findall(r"^\| (`--[^|]+) \| ([^|]*) \|", DOCS, re.MULTILINE)
    said = {
        name: default.strip()
        for left, right in rows
        for name, default in zip(re.findall(r"`(--[\w-]+)`", left), right.split(","), strict=False)
    }
    for option in options:
        if type(option.default) in (int, float):
            assert float(said[option.opts[0]]) == option.default, option.name


def test_the_docs_name_every_error() -> None:
    problem = re.compile(r'(?:Problem|__init__)\(\s*(\d{3}),\s*"(\w+)"')
    used = {found for path in SOURCES for found in problem.findall(path.read_text("utf-8"))}
    rows = re.findall(r"^\| (\d{3}) \| ([^|]*)", DOCS, re.MULTILINE)
    said = {(status, code) for status, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    assert len(used) > 10
    assert used <= said


def test_the_docs_tell_the_limits() -> None:
    for said, limit in (
        ("history | {:,} ids", settings.MAX_HISTORY),
        ("`k` | {:,}", settings.MAX_K),
        ("events in a request | {:,}", settings.MAX_BATCH),
        ("`block` | {:,} ids", settings.MAX_LISTED),
        ("items to explain | {:,}", settings.MAX_EXPLAINED),
        ("users or items | {:,}", settings.MAX_FOUND),
        ("title query | {:,} characters", settings.MAX_ID),
        ("newest {:,} events of a user.", store.SHOWN_EVENTS),
        ("last {:,} events of a user", store.STORED_EVENTS),
    ):
        assert said.format(limit) in " ".join(DOCS.split())
