"""One view of progress: a bar on a terminal, plain lines elsewhere, nothing for what is quick."""

import io

import pytest
from rich.console import Console

from bert4rec import progress
from bert4rec.progress import ProgressView


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def plain() -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=80)


def lines_of(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_plain_lines_come_after_two_seconds_and_then_every_thirty(clock: Clock) -> None:
    console = plain()
    with ProgressView("evaluating", console=console) as view:
        for done in range(100):  # one per second
            view.update(done, 100)
            clock.now += 1.0
    assert lines_of(console) == [
        "evaluating: 2 of 100  98 s left",
        "evaluating: 32 of 100  68 s left",
        "evaluating: 62 of 100  38 s left",
        "evaluating: 92 of 100  8 s left",
    ]


def test_what_takes_less_than_two_seconds_shows_nothing(clock: Clock) -> None:
    console, terminal = plain(), Console(file=io.StringIO(), force_terminal=True)
    for each in (console, terminal):
        with ProgressView("preparing", console=each) as view:
            view.update(0, 10)
            clock.now += 1.9
            view.update(10, 10)
        assert lines_of(each) == []


def test_the_time_before_the_first_update_does_not_count(clock: Clock) -> None:
    """A view of the evaluation is made before the training begins."""
    console = plain()
    with ProgressView("evaluating", console=console) as view:
        clock.now += 3600
        view.update(0, 10)
    assert lines_of(console) == []


def test_facts_unknown_totals_and_lines_of_its_own(clock: Clock) -> None:
    console = plain()
    with ProgressView("training", console=console) as view:
        view.begin("stage 1", done=500, total=1000)  # a resumed run
        view.update(500)
        clock.now += 10
        view.update(510, facts="epoch 3  loss 4.21")
        view.say("epoch 3  [validated]")
        clock.now += 29
        view.update(520)  # somebody heard of it 29 seconds ago
        view.begin("downloading")
        view.update(0)
        clock.now += 2
        view.update(12_345)
    assert lines_of(console) == [
        "stage 1: 510 of 1,000  epoch 3  loss 4.21  8 min left",
        "epoch 3  [validated]",
        "downloading: 12,345",
    ]


def test_only_the_first_of_several_processes_is_shown(clock: Clock) -> None:
    console = plain()
    with ProgressView("training", console=console, is_shown=False) as view:
        for done in range(10):
            view.update(done, 10)
            view.say("a line")
            clock.now += 10
    assert lines_of(console) == []


def test_on_a_terminal_the_bar_appears_and_leaves_nothing_behind() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with ProgressView("training", console=console) as view:
        view.update(0, 10)
        view._next_line = 0.0  # two seconds later
        view.update(4, 10, "loss 4.21")
        view.update(5, 10, "loss 4.20")
        assert view._bar is not None
        view.say("a line above it")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "loss 4.2" in text
    assert "a line above it" in text
    assert text.endswith("\x1b[1A\x1b[2K")  # the bar's line is cleared
