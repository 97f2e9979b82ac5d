"""A visit to the page in a real browser, and what the page should show."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field

from bert4rec.recommender import Recommender

try:
    from playwright import sync_api as playwright
except ImportError:  # the tests are left out then
    playwright = None  # type: ignore[assignment]

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROME = next((path for path in map(shutil.which, NAMES) if path), None)
ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-gpu",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)
PATIENCE = 20_000  # milliseconds: this machine may be busy with other tests
N_ITEMS = 60
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "evil \u202egnp.exe",
    "very long " * 200,
    "popcorn \U0001f37f & \"quotes' ${x}",
    "   ",
)
TITLES = [f"Title {token}" for token in range(N_ITEMS - len(HOSTILE))] + list(HOSTILE)
HISTORY = [f"item-{token}" for token in (3, 14, 15, 9, 26)]
LINK = "#history=" + ",".join(HISTORY)
FOCUSED = """() => {
  const it = document.activeElement;
  const ring = getComputedStyle(it, it.matches(".pick") ? "::after" : null).outlineStyle;
  if (ring === "none") return `no ring around ${it.outerHTML}`;
  return it.dataset.focus?.split(":").at(-1) ?? it.id;
}"""
KEY = "a-key-for-reading-that-is-long-enough-0123456789"


@dataclass
class Visit:
    """A page, and everything that it asked for and complained about."""

    page: playwright.Page
    url: str
    asked: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, link: str = "") -> playwright.Page:
        self.page.goto(f"{self.url}/{link}")
        return self.page

    def rows(self) -> playwright.Locator:
        return self.page.locator(".recommendation")

    def titles(self) -> list[str]:
        return [text.strip() for text in self.page.locator(".pick").all_inner_texts()]


def visit(context: playwright.BrowserContext, url: str) -> Visit:
    page = context.new_page()
    page.set_default_timeout(PATIENCE)
    made = Visit(page, url)
    page.on("request", lambda request: made.asked.append(request.url))
    page.on("pageerror", lambda error: made.complaints.append(f"page error: {error}"))
    page.on("dialog", lambda dialog: (made.complaints.append("a dialog"), dialog.dismiss()))
    page.on(
        "console",
        lambda message: (
            made.complaints.append(f"console: {message.text}") if message.type in ("error", "warning") else None
        ),
    )
    return made


def shown_titles(recommender: Recommender, history: list[str], k: int = 10) -> list[str]:
    """What should stand there: titles as HTML shows them, or the id where there is none."""
    found = recommender.recommend(history, k)
    return [" ".join(each.title.split()) if each.title and each.title.strip() else str(each.item) for each in found]


def address(page: playwright.Page) -> str:
    """As the page has it: `page.url` comes later, by an event."""
    where: str = page.evaluate("location.href")
    return where


def expect(locator: playwright.Locator) -> playwright.LocatorAssertions:
    playwright.expect.set_options(timeout=PATIENCE)
    return playwright.expect(locator)
