"""A real server and a real browser; `desk` is a visit to the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from page_visits import ARGUMENTS, CHROME, HISTORY, N_ITEMS, TITLES, Visit, playwright, visit
from served import Served, save_model, serve

from bert4rec.recommender import Recommender


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recommender]:
    directory = tmp_path_factory.mktemp("page") / "model"
    return directory, save_model(directory, n_items=N_ITEMS, titles=TITLES)


@pytest.fixture(scope="module")
def recommender(model: tuple[Path, Recommender]) -> Recommender:
    return model[1]


@pytest.fixture(scope="module")
def server(model: tuple[Path, Recommender]) -> Iterator[Served]:
    with serve(model[0]) as served:
        events = [
            {"user": "ann", "item": item, "time": 1_700_000_000 + place}
            for place, item in enumerate([*HISTORY, "gone"])
        ]
        with served.client() as client:
            client.post("/v1/events", json={"events": events}).raise_for_status()
        yield served


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROME, args=list(ARGUMENTS))
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def desktop(browser: playwright.Browser) -> Iterator[playwright.BrowserContext]:
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    yield context
    context.close()


@pytest.fixture
def desk(desktop: playwright.BrowserContext, server: Served) -> Iterator[Visit]:
    """A quiet visit: whatever a test does, nothing leaves the machine and nothing is an error."""
    made = visit(desktop, server.url)
    yield made
    made.page.close()
    elsewhere = [url for url in made.asked if not url.startswith((server.url, "data:"))]
    assert made.asked
    assert elsewhere == []
    assert made.complaints == []
