"""Make the pictures of the page in docs/images anew, from the demo model.

    python benchmarks/serving/screenshots.py [runs/demo] [docs/images]

Trains a Markov chain beside it for the picture of two models (some seconds), starts a server and
takes the pictures with the Chromium or Chrome that this machine has.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-gpu",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
)
# Somebody of two tastes, fantasy and then science fiction: what pulls up one pulls down the other.
HISTORY = "m0181,m0184,m0182,m0316,m0206,m0319,m0317,m0342"
LINK = f"#history={HISTORY}"
SHORT = "#history=m0184,m0316,m0319,m0317"
LARGEST = 300_000  # bytes of a picture
DESK, PHONE = (1280, 900), (390, 844)
VERB = (sys.executable, "-c", "from bert4rec.cli import main; main()")
PICTURES = (
    # file, size, colours, link, the row that is chosen
    ("page-light.png", DESK, "light", LINK, 0),
    ("page-dark.png", DESK, "dark", LINK, 2),
    ("page-phone.png", PHONE, "light", SHORT, 0),
    ("page-compare.png", DESK, "light", f"{LINK}&with=markov", 0),
)


@contextlib.contextmanager
def served(model: Path, other: Path, folder: Path) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    store = f"sqlite:{folder / 'histories.db'}"
    options = ["--compare", str(other), "--store", store, "--port", str(port)]
    process = subprocess.Popen([*VERB, "serve", str(model), *options], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/readyz"):
                break
            if process.poll() is not None:
                raise SystemExit(f"`bert4rec serve {model}` ended: run it by hand to see why")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(20)


def take(browser: Browser, url: str, folder: Path) -> None:
    for name, (width, height), colours, link, row in PICTURES:
        is_phone = (width, height) == PHONE
        context = browser.new_context(
            viewport={"width": width, "height": height},
            color_scheme="dark" if colours == "dark" else "light",
            reduced_motion="reduce",
            is_mobile=is_phone,
            has_touch=is_phone,
        )
        page = context.new_page()
        page.goto(f"{url}/{link}")
        page.wait_for_load_state("networkidle")
        page.locator(".recommendation .pick").nth(row).click()
        page.mouse.move(width - 5, height - 5)
        page.evaluate("document.activeElement.blur()")
        page.evaluate("scrollTo(0, 0)")
        page.screenshot(path=folder / name)
        size = (folder / name).stat().st_size
        if size > LARGEST:
            raise SystemExit(f"{name} has {size:,} bytes, more than {LARGEST:,}")
        print(f"{folder / name}: {width} × {height}, {size:,} bytes")
        context.close()


def main(model: Path, folder: Path) -> None:
    chrome = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if chrome is None:
        raise SystemExit("no Chromium or Chrome found: install one, as by `apt install chromium`")
    if not (model / "manifest.json").exists():
        raise SystemExit(f"{model} holds no model: run `bert4rec demo --out {model}` first")
    with tempfile.TemporaryDirectory() as scratch:
        other = Path(scratch) / "markov"
        train = [*VERB, "train", "demo", "--recipe", "markov", "--out", str(other)]
        subprocess.run(train, check=True, capture_output=True)
        with served(model, other, Path(scratch)) as url, sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chrome, args=list(ARGUMENTS))
            take(browser, url, folder)
            browser.close()


if __name__ == "__main__":
    given = [Path(word) for word in sys.argv[1:]]
    main(*(given + [Path("runs/demo"), Path("docs/images")][len(given) :]))
