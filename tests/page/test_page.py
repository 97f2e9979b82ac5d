"""The page of `bert4rec serve` in a real browser, on a real server: what a person sees is what the
library says, nothing leaves the machine, and nothing is ever logged as an error."""

from __future__ import annotations

import math
import os
import re
import signal
from pathlib import Path

import pytest
from page_visits import (
    CHROME,
    FOCUSED,
    HISTORY,
    HOSTILE,
    KEY,
    LINK,
    N_ITEMS,
    Visit,
    address,
    expect,
    playwright,
    shown_titles,
    visit,
)
from served import Served, serve

from bert4rec.recommender import Recommender

pytest.importorskip("playwright.sync_api", reason="needs the package playwright: pip install playwright")
pytestmark = pytest.mark.skipif(
    CHROME is None, reason="no Chromium or Chrome found: install one, as by `apt install chromium`"
)


def test_items_are_found_and_added_by_keyboard_and_the_recommendations_are_the_librarys(
    desk: Visit, recommender: Recommender
) -> None:
    page = desk.open()
    expect(page.get_by_text("The history is empty: these are popular items.")).to_be_visible()
    assert desk.titles() == shown_titles(recommender, [])
    page.keyboard.press("/")
    page.keyboard.type("title 14")
    expect(page.get_by_role("option", name="Title 14")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.locator("#history .name")).to_have_text(["Title 14"])
    page.keyboard.type("Title 2")  # Enter comes before the suggestions do
    page.keyboard.press("Enter")
    expect(page.locator("#history .name")).to_have_text(["Title 2", "Title 14"])
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # the second most popular item
    history = ["item-14", "item-2", "item-1"]
    expect(page.locator(".pick")).to_have_text(shown_titles(recommender, history))
    assert address(page).endswith("#history=" + ",".join(history))


def test_the_newest_response_wins_over_a_late_one(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK)
    expect(page.locator(".pick")).to_have_text(shown_titles(recommender, HISTORY))
    late: list[playwright.Route] = []

    def hold_the_first(route: playwright.Route) -> None:
        if late:
            route.continue_()
        else:
            late.append(route)

    page.route("**/v1/recommend", hold_the_first)
    with page.expect_request("**/v1/recommend"):
        page.get_by_role("button", name="Remove Title 26").click()
    for name in ("Remove Title 9", "Remove Title 15", "Move Title 3 up"):
        page.get_by_role("button", name=name).click()
    expect(page.locator("#history .name")).to_have_text(["Title 3", "Title 14"])
    newest = shown_titles(recommender, ["item-14", "item-3"])
    expect(page.locator(".pick")).to_have_text(newest)
    expect(page.get_by_role("status")).to_contain_text("for 2 items")
    assert late[0].request.failure == "net::ERR_ABORTED"  # its answer can change nothing any more


def test_reasons_are_the_librarys(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK)
    expect(page.locator(".because").first).not_to_have_text("…")
    for row, found in zip(desk.rows().all(), recommender.recommend(HISTORY), strict=True):
        reasons = recommender.explain(HISTORY, found.item).influences
        pulls = sorted((r for r in reasons if r.influence >= 0.005), key=lambda r: -r.influence)
        told = " and ".join(str(r.title) for r in pulls[:2])
        wanted = f"Because of {told}" if told else "Nothing in the history pulls it up"
        expect(row.locator(".because")).to_have_text(wanted)
        chance = float(row.locator(".probability").inner_text().strip("%<"))
        assert math.isclose(chance / 100, found.probability, abs_tol=0.0006)


def test_pointing_at_a_recommendation_shows_what_pulled_it_up_and_down(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK)
    expect(page.locator(".because").first).not_to_have_text("…")
    for place, point in ((4, "hover"), (6, "focus"), (2, "click")):
        pick = desk.rows().nth(place).locator(".pick")
        getattr(pick, point)()
        reasons = recommender.explain(HISTORY, recommender.recommend(HISTORY).items[place].item)
        title = str(recommender.recommend(HISTORY).items[place].title).strip()
        expect(page.locator("#why-title")).to_contain_text(" ".join(title.split())[:40])
        items = page.locator("#history li").all()
        for item, reason in zip(reversed(items), reasons.influences, strict=True):
            if abs(reason.influence) < 0.005:
                continue
            is_up = reason.influence > 0
            expect(item).to_have_class(re.compile(r"\bup\b" if is_up else r"\bdown\b"))
            text = item.locator(".influence").inner_text()
            arrow, factor = text.split(" ")
            assert (arrow, factor[0]) == (("▲", "×") if is_up else ("▼", "÷"))
            assert math.isclose(float(factor[1:]), math.exp(abs(reason.influence)), rel_tol=0.06)
        expect(page.locator("#why .bars li").first).to_be_visible()


def test_similar_items_open_in_a_drawer_and_can_be_added(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK)
    first = recommender.recommend(HISTORY).items[0]
    desk.rows().first.get_by_role("button", name="Items similar to").click()
    drawer = page.get_by_role("dialog")
    alike = recommender.similar(first.item, 12)
    expect(drawer.locator("li .influence")).to_have_text([f"{each.score:.2f}" for each in alike])
    drawer.get_by_role("button", name="Add").first.click()
    page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()
    assert address(page).endswith(f",{alike[0].item}")
    expect(page.locator("#history li")).to_have_count(6)


def test_filters_are_kept_in_the_link_and_taken_back_by_the_back_button(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK)
    best = [str(each.item) for each in recommender.recommend(HISTORY)]
    everything = shown_titles(recommender, HISTORY)
    expect(page.locator(".pick")).to_have_text(everything)
    desk.rows().first.get_by_role("button", name="Never show").click()
    expect(page.locator(".pick").first).to_have_text(everything[1])
    page.locator("#filters summary").click()
    expect(page.locator("#block li")).to_have_count(1)
    assert f"block={best[0]}" in address(page)
    page.go_back()
    expect(page.locator(".pick")).to_have_text(everything)
    expect(page.locator("#block li")).to_have_count(0)
    page.get_by_role("combobox", name="Search items to allow").fill("Title 7")
    page.get_by_role("option", name="Title 7").click()
    expect(page.locator(".pick")).to_have_text(["Title 7"])
    page.get_by_role("button", name="Allow it no longer").click()
    page.get_by_role("switch", name="Leave out the history").click()
    page.locator("#k").select_option("50")
    expect(page.locator(".pick")).to_have_count(50)
    seen = recommender.recommend(HISTORY, 50, exclude_seen=False)
    assert set(HISTORY) & {str(each.item) for each in seen}
    assert [row.get_attribute("data-id") for row in desk.rows().all()] == [str(each.item) for each in seen]
    assert address(page).endswith("k=50&seen=show")


def test_late_suggestions_do_not_cover_what_was_chosen_before_they_came(desk: Visit) -> None:
    page = desk.open(LINK)
    page.locator("#filters summary").click()
    box = page.get_by_role("combobox", name="Search items to allow")
    box.click()
    popular = page.get_by_role("option", name="Title 7")
    expect(popular).to_be_visible()
    typed = re.compile(r"/v1/items\?.*query=Title")
    page.route(typed, lambda route: None)  # never answered
    with page.expect_request(typed):
        page.keyboard.type("Title 7")
    with page.expect_event("requestfailed"):  # its answer can open nothing any more
        popular.click()
    expect(page.locator("#allow li")).to_have_count(1)
    expect(page.locator("#allow-search-list")).to_be_hidden()


def test_two_models_stand_side_by_side_with_marks_for_what_both_chose(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK + "&k=50")
    expect(page.locator(".pick")).to_have_count(50)
    page.get_by_label("Compare with").select_option("popularity")
    columns = page.locator(".column")
    expect(columns).to_have_count(2)
    expect(columns.nth(1).locator(".because").first).to_have_text("Popular with everybody")
    first, second = (
        [row.get_attribute("data-id") for row in column.locator(".recommendation").all()] for column in columns.all()
    )
    assert first == [str(each.item) for each in recommender.recommend(HISTORY, 50)]
    both = [item for item in first if item in second]
    expect(columns.nth(0).locator(".mark.both")).to_have_count(len(both))
    expect(columns.nth(0).locator("h3 .count")).to_have_text(f"{len(both)} of 50 in both")
    steps = second.index(both[0]) - first.index(both[0])
    told = "same place" if steps == 0 else f"{'▲' if steps > 0 else '▼'} {abs(steps)}"
    expect(columns.nth(0).locator(".mark.both").first).to_contain_text(told)
    assert address(page).endswith("with=popularity")
    page.locator("#model").select_option("popularity")
    expect(page.locator("#attention-body")).to_contain_text("has no attention to show")


def test_the_heat_map_shows_the_librarys_attention(desk: Visit, recommender: Recommender) -> None:
    page = desk.open(LINK)
    attention = recommender.explain(HISTORY, "item-0").attention
    assert attention is not None
    page.get_by_label("Layer").select_option("1")
    page.locator(".as-table summary").click()
    table = page.locator(".as-table tbody tr")
    expect(table).to_have_count(len(HISTORY) + 1)

    def weights() -> dict[str, float]:
        cells = [row.inner_text().split("\t") for row in table.all()]
        return {name.strip(): float(value.strip().strip("%")) for name, value in cells}

    names = [f"Title {item.removeprefix('item-')}" for item in HISTORY] + ["[MASK]"]
    wanted = (100 * attention[0].mean(0)[-1]).tolist()
    assert weights() == pytest.approx(dict(zip(names, wanted, strict=True)), abs=0.06)
    page.get_by_label("Head").select_option("2")
    wanted = (100 * attention[0][1][-1]).tolist()
    assert weights() == pytest.approx(dict(zip(names, wanted, strict=True)), abs=0.06)
    page.locator("#attention canvas").focus()
    page.keyboard.press("ArrowUp")  # the first key goes to the strongest cell of [MASK]
    page.keyboard.press("ArrowUp")
    expect(page.locator(".readout")).to_contain_text("Title 26 looks at")


def test_a_long_history_shows_which_items_were_read(desk: Visit, recommender: Recommender) -> None:
    assert recommender.model.max_history == 49
    page = desk.open("#history=" + ",".join(f"item-{token % 54}" for token in range(60)))
    expect(page.locator("#history li")).to_have_count(60)
    expect(page.locator("#history li.unread")).to_have_count(11)
    expect(page.locator("#attention-body")).to_contain_text("The newest 25 of 49 items;")
    expect(page.locator(".matrix li")).to_have_count(26)


def test_a_stored_user_is_found_and_loaded(desk: Visit, recommender: Recommender) -> None:
    page = desk.open()
    page.get_by_role("button", name="Stored user").click()
    page.keyboard.type("an")
    expect(page.get_by_role("option", name="ann")).to_contain_text("6 events")
    page.keyboard.press("Enter")
    expect(page.locator("#history-note")).to_have_text("Stored history of ann")
    expect(page.locator(".pick")).to_have_text(shown_titles(recommender, HISTORY))
    expect(page.get_by_text("Left out, because the model does not know them: gone")).to_be_visible()
    expect(page.locator("#history li.ignored")).to_have_count(1)


def test_ids_can_be_pasted_and_unknown_ones_lead_to_popular_items(desk: Visit, recommender: Recommender) -> None:
    page = desk.open()
    page.get_by_role("button", name="Paste ids").click()
    page.locator("#pasted").fill("nobody, <b>knows</b>\n")
    page.get_by_role("button", name="Add these").click()
    expect(page.get_by_text("Nothing in this history is known: these are")).to_be_visible()
    expect(page.locator("#notes")).to_contain_text("nobody, <b>knows</b>")
    expect(page.locator(".pick")).to_have_text(shown_titles(recommender, []))
    page.get_by_role("button", name="Surprise me").click()
    expect(page.locator("#history li")).to_have_count(5)
    expect(page.locator(".because").first).not_to_have_text("Popular with everybody")


def test_hostile_titles_are_text(desk: Visit, recommender: Recommender) -> None:
    hostile = [f"item-{token}" for token in range(N_ITEMS - len(HOSTILE), N_ITEMS)]
    link = f"#history={','.join(hostile)}&k=60&seen=show&block=item-1&with=popularity"
    page = desk.open(link)
    names = page.locator("#history .name")
    expect(names).to_have_count(len(HOSTILE))
    expect(names.nth(5)).to_have_text(HOSTILE[0])
    expect(names.nth(4)).to_have_text(HOSTILE[1])
    expect(names.nth(0)).to_have_text("item-59")  # a title of spaces would be nothing to see
    expect(page.locator(".because").first).not_to_have_text("…")
    for item in hostile:
        row = page.locator(f".column:first-child .recommendation[data-id='{item}']")
        row.locator(".pick").click()
    row.get_by_role("button", name="Items similar to").click()
    expect(page.locator("#similar-title")).to_contain_text("item-59")
    page.keyboard.press("Escape")
    page.get_by_role("combobox", name="Search items to add").fill("<img")
    expect(page.get_by_role("option")).to_contain_text([HOSTILE[0]])
    assert page.locator("img").count() == 1  # our own
    assert page.locator("script").count() == 2  # our own
    isolation = names.nth(3).evaluate("each => getComputedStyle(each).unicodeBidi")
    assert isolation == "isolate"  # an override of the writing direction ends with its title
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_it_is_all_there_on_a_phone(browser: playwright.Browser, server: Served) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    made = visit(context, server.url)
    page = made.open(LINK + "&with=popularity&block=item-57")
    expect(page.locator(".because").first).not_to_have_text("…")
    made.rows().nth(1).tap()
    expect(made.rows().nth(1).locator(".pulls li").first).to_be_visible()
    page.locator("#filters summary").tap()
    page.locator("#attention summary").first.tap()
    expect(page.locator("#attention canvas")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    made.rows().nth(1).get_by_role("button", name="Items similar to").tap()
    expect(page.get_by_role("dialog")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    assert made.complaints == []
    context.close()


def test_the_keyboard_reaches_everything_and_keeps_its_place(desk: Visit) -> None:
    page = desk.open(LINK)
    expect(page.locator(".because").first).not_to_have_text("…")
    expect(page.get_by_role("status")).to_contain_text("10 recommendations for 5 items, first")
    page.keyboard.press("Tab")
    expect(page.locator("#skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#recommendations")).to_be_focused()
    assert LINK in address(page)  # the link to it does not cost us the state
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(FOCUSED))
    assert reached == {"exclude-seen", "k", "", "pick", "plus", "similar", "block"}
    page.get_by_role("button", name="Remove Title 15").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#history li")).to_have_count(4)
    page.wait_for_load_state("networkidle")
    inside = "document.querySelector('#history').contains(document.activeElement)"
    assert page.evaluate(inside)
    page.get_by_role("button", name="Move Title 3 up").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    expect(page.locator("#history .name")).to_have_text(["Title 26", "Title 3", "Title 9", "Title 14"])


def test_dark_and_light_follow_the_system_until_somebody_chooses(browser: playwright.Browser, server: Served) -> None:
    context = browser.new_context(color_scheme="dark")
    made = visit(context, server.url)
    page = made.open()
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.get_by_role("button", name="Dark colours").click()
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    assert page.evaluate(ground) == light
    expect(page.get_by_role("button", name="Dark colours")).to_have_attribute("aria-pressed", "false")
    assert made.complaints == []
    context.close()


def test_a_lost_connection_is_reported_and_restored(browser: playwright.Browser, server: Served) -> None:
    context = browser.new_context()
    made = visit(context, server.url)
    page = made.open(LINK)
    expect(page.locator(".pick")).to_have_count(10)
    context.set_offline(True)
    page.get_by_role("button", name="Remove").first.click()
    expect(page.get_by_role("alert")).to_contain_text("The service does not answer")
    expect(page.locator("#history li")).to_have_count(4)
    context.set_offline(False)
    expect(page.get_by_role("alert")).to_be_hidden()  # by itself, after some seconds
    expect(page.get_by_role("status")).to_contain_text("for 4 items")
    assert [each for each in made.complaints if "ERR_INTERNET_DISCONNECTED" not in each] == []
    context.close()


def test_a_missing_key_a_busy_service_and_a_dead_one_are_reported(
    browser: playwright.Browser, model: tuple[Path, Recommender], tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"read {KEY}\n", encoding="utf-8")
    keys.chmod(0o600)
    store = f"sqlite:{tmp_path / 'histories.db'}"
    options = ("--keys", str(keys), "--store", store, "--answer-within", "0.000001")
    context = browser.new_context()
    with serve(model[0], *options) as served:
        made = visit(context, served.url)
        page = made.open(LINK)
        dialog, alert = page.get_by_role("dialog"), page.get_by_role("alert")
        expect(dialog).to_contain_text("answers only those who have a key")
        page.get_by_label("Key", exact=True).fill("a-wrong-key-of-the-right-length-0123456789")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("That key was refused")
        page.get_by_label("Key", exact=True).fill(KEY)
        page.keyboard.press("Enter")
        expect(alert).to_contain_text("The service is busy: trying again in 1 second")
        expect(dialog).to_be_hidden()
        page.reload()  # the key is kept for this tab
        expect(alert).to_contain_text("The service is busy: trying again in 1 second")
        with page.expect_request(f"{served.url}/v1/recommend"):
            pass  # by itself, after a second
        assert KEY not in address(page)
        for process in (*served.workers(), served.process.pid):
            os.kill(process, signal.SIGKILL)
        served.process.wait(5)
        expect(alert).to_contain_text("The service does not answer. Is it still running?")
    assert [each for each in made.complaints if "Failed to load resource" not in each] == []
    context.close()


def test_the_description_of_the_api_is_shown_and_comes_from_here(desk: Visit) -> None:
    page = desk.open("docs")
    expect(page.locator("#operations-recommend-recommend_v1_recommend_post")).to_be_visible()
    assert f"{desk.url}/openapi.json" in desk.asked
