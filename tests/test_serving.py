"""The service returns what the library returns; a real server over loopback."""

import asyncio
import contextlib
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from served import N_ITEMS, Served, free_port, save_model, serve, wait_until

from bert4rec.durable import write_manifest
from bert4rec.model_directory import FILES
from bert4rec.recommender import Recommender
from bert4rec.serving.model_registry import ModelRefused, ModelRegistry
from bert4rec.serving.serve_settings import ServeSettings
from bert4rec.serving.server import check_before_start

N_PARITY = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("served") / "films"
    titles = [f"Title {token}" for token in range(N_ITEMS)]
    titles[3:6] = ["Amélie", "The Matrix", "Matrix Reloaded, The"]
    save_model(directory, titles=titles)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Served]:
    with serve(model, "--no-access-log") as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture(scope="module")
def library(model: Path) -> Recommender:
    return Recommender.load(model)


def make_requests(n: int, seed: int) -> list[dict[str, Any]]:
    """Histories of all lengths with unknown items among them, and every kind of filter."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(n):
        ids = [f"item-{i}" for i in generator.integers(0, N_ITEMS + 5, generator.integers(0, 70))]
        request: dict[str, Any] = {"history": ids, "k": int(generator.integers(1, 20))}
        if generator.random() < 0.3:
            request["exclude_seen"] = False
        if generator.random() < 0.3:
            request["block"] = [f"item-{i}" for i in generator.integers(0, N_ITEMS, 5)]
        if generator.random() < 0.3:
            request["allow"] = [f"item-{i}" for i in generator.integers(0, N_ITEMS, 30)]
        made.append(request)
    return made


def assert_same(answer: dict[str, Any], library: Recommender, request: dict[str, Any]) -> None:
    expected = library.recommend(**request)
    assert [found["item"] for found in answer["items"]] == [found.item for found in expected]
    assert [found["title"] for found in answer["items"]] == [found.title for found in expected]
    for found, wanted in zip(answer["items"], expected, strict=True):
        assert found["score"] == pytest.approx(wanted.score, abs=1e-5)
        assert found["probability"] == pytest.approx(wanted.probability, abs=1e-5)
    assert answer["ignored"] == expected.unknown
    assert answer["fallback"] == expected.is_fallback


def test_single_requests_equal_the_library(client: httpx.Client, library: Recommender) -> None:
    for request in make_requests(N_PARITY, seed=1):
        assert_same(client.post("/v1/recommend", json=request).json(), library, request)


def test_concurrent_requests_equal_the_library(server: Served, library: Recommender) -> None:
    made = make_requests(N_PARITY, seed=2)

    async def ask_all() -> list[dict[str, Any]]:
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60, trust_env=False) as client:
            answers = await asyncio.gather(*(client.post("/v1/recommend", json=q) for q in made))
        return [answer.json() for answer in answers]

    before = batch_counts(server)
    answers = asyncio.run(ask_all())
    for request, answer in zip(made, answers, strict=True):
        assert_same(answer, library, request)
    n_batches, n_asked = (a - b for a, b in zip(batch_counts(server), before, strict=True))
    assert n_asked == N_PARITY
    assert n_batches < n_asked  # some were really answered together


def batch_counts(server: Served) -> tuple[float, float]:
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return float(lines["bert4rec_batch_size_count"]), float(lines["bert4rec_batch_size_sum"])


def test_a_batch_request_equals_the_library(client: httpx.Client, library: Recommender) -> None:
    histories = [request["history"] for request in make_requests(256, seed=3)]
    answer = client.post("/v1/recommend/batch", json={"histories": histories, "k": 7}).json()
    assert len(answer["results"]) == 256
    for history, result in zip(histories, answer["results"], strict=True):
        assert_same(result, library, {"history": history, "k": 7})


def test_stored_histories_are_fresh_in_the_next_request(client: httpx.Client, library: Recommender) -> None:
    ids: list[str] = []
    for step in range(5):
        ids.append(f"item-{step * 7}")
        event = {"user": "anna/ä", "item": ids[-1], "time": 1000 + step, "id": f"e{step}"}
        assert client.post("/v1/events", json={"events": [event]}).json() == {
            "stored": 1,
            "duplicates": 0,
            "unknown_items": 0,
        }
        again = client.post("/v1/events", json={"events": [event]}).json()
        assert again["duplicates"] == 1
        answer = client.get("/v1/users/anna%2F%C3%A4/recommendations", params={"k": 5}).json()
        assert answer["user"] == "anna/ä"
        assert answer["n_events"] == step + 1
        assert_same(answer, library, {"history": ids, "k": 5})
    stored = client.get("/v1/users/anna%2F%C3%A4").json()["events"]
    assert [event["item"] for event in stored] == ids
    found = client.get("/v1/users", params={"query": "ann"}).json()["users"]
    assert [user["user"] for user in found] == ["anna/ä"]
    conflict = event | {"item": "item-1"}
    assert client.post("/v1/events", json={"events": [conflict]}).status_code == 409
    assert client.delete("/v1/users/anna%2F%C3%A4").json()["erased"] == 5
    assert client.get("/v1/users/anna%2F%C3%A4").status_code == 404
    assert client.get("/v1/users/anna%2F%C3%A4/recommendations").json()["fallback"]


def test_explanations_equal_the_librarys(client: httpx.Client, library: Recommender) -> None:
    history, items = ["item-1", "no such", "item-2", "item-3"], ["item-9", "item-10"]
    body = {"history": history, "items": items, "attention": True}
    answer = client.post("/v1/explain", json=body).json()
    assert answer["ignored"] == ["no such"]
    assert [read["item"] for read in answer["read"]] == ["item-1", "item-2", "item-3"]
    for item, found in zip(items, answer["explanations"], strict=True):
        expected = library.explain(history, item)
        assert found["probability"] == pytest.approx(expected.probability, abs=1e-5)
        influences = [each.influence for each in expected.influences]
        assert found["influences"] == pytest.approx(influences, abs=1e-4)
    expected_attention = library.explain(history, "item-9").attention
    assert expected_attention is not None
    assert np.allclose(answer["attention"], expected_attention.numpy(), atol=1e-5)


def test_what_cannot_be_explained_is_an_error(client: httpx.Client) -> None:
    def status(**body: Any) -> tuple[int, str]:
        answer = client.post("/v1/explain", json=body)
        return answer.status_code, answer.json()["error"]["code"]

    assert status(history=["item-1"], items=["nothing"]) == (404, "unknown_item")
    assert status(history=["nothing"], items=["item-1"]) == (422, "nothing_to_explain")
    popularity = {"history": ["item-1"], "items": ["item-2"], "model": "popularity"}
    assert status(**popularity) == (422, "nothing_to_explain")
    assert status(history=["item-1"], items=["item-2"], model="no") == (404, "unknown_model")


def test_items_are_found_by_title(client: httpx.Client) -> None:
    def found(query: str) -> list[str]:
        answer = client.get("/v1/items", params={"query": query, "limit": 4}).json()
        return [item["title"] for item in answer["items"]]

    assert found("amelie") == ["Amélie"]
    assert found("MATRIX") == ["Matrix Reloaded, The", "The Matrix"]  # begins with it: first
    assert found("item-7") == ["Title 7"]
    assert found("no such film") == []
    assert found("") == ["Title 0", "Title 1", "Title 2", "Amélie"]  # the most popular


def test_similar_items_equal_the_librarys(client: httpx.Client, library: Recommender) -> None:
    answer = client.get("/v1/items/item-4/similar", params={"k": 5}).json()
    expected = library.similar("item-4", 5)
    assert [each["item"] for each in answer["items"]] == [each.item for each in expected]
    assert client.get("/v1/items/none/similar").json()["error"]["code"] == "unknown_item"
    params = {"model": "popularity"}
    assert client.get("/v1/items/item-4/similar", params=params).status_code == 422


def test_the_model_is_named_everywhere(client: httpx.Client, model: Path) -> None:
    facts = client.get("/v1/model").json()
    assert facts["default"] == "films"
    versions = {each["name"]: each["version"] for each in facts["models"]}
    assert set(versions) == {"films", "popularity"}
    for name in versions:
        answer = client.post("/v1/recommend", json={"history": ["item-1"], "model": name})
        assert answer.json()["model"] == name
        assert answer.json()["model_version"] == versions[name]
        assert answer.headers["x-model-version"] == versions[name]
    popular = client.post("/v1/recommend", json={"history": ["item-1"], "model": "popularity"})
    titles = [item["title"] for item in popular.json()["items"][:2]]
    assert titles == ["Title 0", "Title 2"]


def test_limits_have_clear_errors(client: httpx.Client) -> None:
    def problem(path: str, body: Any) -> tuple[int, str | None]:
        answer = client.post(path, json=body)
        return answer.status_code, answer.json()["error"]["where"]

    one = ["item-1"]
    assert problem("/v1/recommend", {"history": one * 1001}) == (422, "body.history")
    assert problem("/v1/recommend", {"history": one, "k": 1001}) == (422, "body.k")
    assert problem("/v1/recommend", {"history": one, "k": True}) == (422, "body.k")
    assert problem("/v1/recommend", {"history": [1.5]}) == (422, "body.history[0]")
    assert problem("/v1/recommend", {"history": [2**63]}) == (422, "body.history[0]")
    assert problem("/v1/recommend", {"hist": one})[0] == 422
    assert problem("/v1/recommend/batch", {"histories": [one] * 257}) == (422, "body.histories")
    whole = client.post("/v1/recommend", json={"history": one * 1000, "k": 1000})
    assert len(whole.json()["items"]) == N_ITEMS - 1


def test_the_description_is_served_from_here(client: httpx.Client) -> None:
    page = client.get("/docs").text
    assert "http" not in page.replace("http-equiv", "")
    for path in ("/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/docs/start.js"):
        assert client.get(path).status_code == 200
    paths = client.get("/openapi.json").json()["paths"]
    assert {"/v1/recommend", "/v1/events", "/v1/explain", "/v1/model"} <= set(paths)


def test_metrics_show_rate_latency_batches_and_version(client: httpx.Client, model: Path) -> None:
    client.post("/v1/recommend", json={"history": ["item-1"]})
    text = client.get("/metrics").text
    version = client.get("/v1/model").json()["models"][0]["version"]
    for line in (
        'bert4rec_requests_total{method="POST",route="/v1/recommend",status="200"}',
        'bert4rec_request_seconds_bucket{le="0.001",route="/v1/recommend"}',
        "bert4rec_batch_size_count",
        "bert4rec_waiting 0.0",
        f'version="{version}"}} 1.0',
    ):
        assert line in text


def test_head_is_answered_where_monitors_ask(client: httpx.Client) -> None:
    for path in ("/healthz", "/readyz", "/"):
        answer = client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_a_user_whose_recommendations_would_have_anothers_path_is_refused(client: httpx.Client) -> None:
    event = {"user": "a/recommendations", "item": "item-1"}
    answer = client.post("/v1/events", json={"events": [event]})
    assert (answer.status_code, answer.json()["error"]["where"]) == (422, "body.events[0].user")


def test_what_is_on_disk_is_tried_once(tmp_path: Path) -> None:
    """A refused model is not loaded again and again, nor a good one beside it, until a change."""
    save_model(tmp_path / "a", seed=1)
    save_model(tmp_path / "popularity", seed=2)
    registry = ModelRegistry([tmp_path / "a", tmp_path / "popularity"])
    registry.load()
    assert set(registry.models) == {"a", "popularity", "popularity-2"}
    assert not registry.has_news()
    write_manifest_over(tmp_path / "popularity", "items.parquet", b"no Parquet")
    save_model(tmp_path / "a", seed=3)
    assert registry.has_news()
    with pytest.raises(ModelRefused, match="not a whole model"):
        asyncio.run(registry.reload())
    assert not registry.has_news()
    save_model(tmp_path / "popularity", seed=4)
    assert registry.has_news()
    assert [is_new for _, is_new in asyncio.run(registry.reload())] == [True, True]
    (tmp_path / "a" / "model.safetensors").write_bytes(b"broken")
    assert not registry.has_news()  # changed files alone are no new version
    assert [is_new for _, is_new in asyncio.run(registry.reload())] == [False, False]


def write_manifest_over(directory: Path, name: str, content: bytes) -> None:
    (directory / name).write_bytes(content)
    write_manifest(directory, FILES)


def test_several_workers_share_histories_reloads_and_metrics(tmp_path: Path, redis_socket: Path) -> None:
    directory = tmp_path / "model"
    save_model(directory, seed=1)
    store = f"unix://{redis_socket}?db=0&prefix={tmp_path.name}"
    with serve(directory, "--workers", "2", "--store", store) as server:
        save_model(directory, seed=2)
        for n in range(20):  # a connection each: the system spreads them over the workers
            with server.client(connection="close") as client:
                event = {"user": "u", "item": f"item-{n}", "time": n + 1}
                client.post("/v1/events", json={"events": [event]}).raise_for_status()
            with server.client(connection="close") as client:
                answer = client.get("/v1/users/u/recommendations").json()
                assert answer["n_events"] == n + 1
        with server.client() as client:
            [facts] = client.post("/v1/admin/reload").json()["models"]

        def have_both_the_new_model() -> bool:
            for _ in range(10):
                with server.client(connection="close") as client:
                    answer = client.post("/v1/recommend", json={"history": ["item-1"]}).json()
                if answer["model_version"] != facts["version"]:
                    return False
            return True

        wait_until(have_both_the_new_model)
        with server.client() as client:
            text = client.get("/metrics").text
        counted = [
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith("bert4rec_requests_total") and "/v1/events" in line
        ]
        assert math.fsum(counted) == 20
        os.kill(server.workers()[0], signal.SIGKILL)  # another takes its place
        save_model(directory, seed=3)

        def is_one_version_served() -> bool:  # what the killed one said of its models is forgotten
            with contextlib.suppress(httpx.TransportError), server.client() as client:
                client.post("/v1/admin/reload")
                lines = client.get("/metrics").text.splitlines()
                infos = [x for x in lines if x.startswith("bert4rec_model_info")]
                return len([x for x in infos if 'model="model"' in x and x.endswith(" 1.0")]) == 1
            return False

        wait_until(is_one_version_served)


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda d: shutil.rmtree(d), "is not a directory"),
        (lambda d: (d / "manifest.json").unlink(), "not complete"),
        (lambda d: (d / "model.safetensors").write_bytes(b"x"), "damaged"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_a_worker_starts(
    tmp_path: Path, break_it: Any, says: str
) -> None:
    directory = tmp_path / "model"
    save_model(directory)
    break_it(directory)
    settings = ServeSettings(model=directory, store="sqlite:x", port=free_port())
    with pytest.raises(ValueError, match=says):
        check_before_start(settings)


def test_another_address_needs_keys(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    with pytest.raises(AssertionError, match="API keys"), serve(tmp_path / "model", "--host", "0.0.0.0"):
        pass
