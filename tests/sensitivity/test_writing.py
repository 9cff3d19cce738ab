"""Results on their way to the store."""

from __future__ import annotations

import threading
import time

import pytest

from sensitivity.writing import AtOnce, Gate, GivenUp, InBackground

PATIENCE = 60.0  # seconds, with a busy machine


def enter(gate: Gate, *, last: bool = False, inside: threading.Event | None = None) -> list[str]:
    """Pass a gate in a thread that stays inside until told; what became of it, in a list that fills."""
    became: list[str] = []

    def passing() -> None:
        try:
            with gate.passed(last=last):
                became.append("inside")
                if inside:
                    inside.wait(PATIENCE)
            became.append("through")
        except GivenUp:
            became.append("given up")

    threading.Thread(target=passing, daemon=True).start()
    return became


def until(what) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_open_gate_lets_through_until_it_is_closed():
    gate = Gate()
    with gate.passed():
        pass
    assert gate.close()
    with pytest.raises(GivenUp), gate.passed():
        raise AssertionError("it was let through")


def test_a_held_gate_waits_to_be_let_or_closed():
    let, closed = Gate(held=True), Gate(held=True)
    assert not let.reached(0.01)
    passed, refused = enter(let), enter(closed)
    assert let.reached(PATIENCE)
    assert closed.reached(PATIENCE)
    assert passed == refused == []
    let.let()
    assert closed.close()
    until(lambda: passed == ["inside", "through"])
    until(lambda: refused == ["given up"])


@pytest.mark.parametrize("last", [False, True])
def test_closing_waits_for_what_is_being_written_and_tells_whether_more_was_to_come(last):
    gate, inside, answers = Gate(), threading.Event(), []
    became = enter(gate, last=last, inside=inside)
    until(lambda: became == ["inside"])
    closing = threading.Thread(target=lambda: answers.append(gate.close()), daemon=True)
    closing.start()
    time.sleep(0.02)
    assert answers == []
    inside.set()
    closing.join(PATIENCE)
    assert answers == [not last]
    assert became[-1] == "through"


def test_who_is_inside_for_long_is_not_waited_for_but_passes_no_more():
    gate, inside = Gate(), threading.Event()
    became = enter(gate, inside=inside)
    until(lambda: became == ["inside"])
    assert gate.close(0.01) is None
    inside.set()
    until(lambda: became == ["inside", "through"])
    assert gate.close(PATIENCE) is True
    assert enter_now(gate) == "given up"


def enter_now(gate: Gate) -> str:
    try:
        with gate.passed():
            return "inside"
    except GivenUp:
        return "given up"


def test_what_failed_last_was_not_done():
    gate = Gate()
    with pytest.raises(OSError, match="disk"), gate.passed(last=True):
        raise OSError("disk")
    assert gate.close()


def test_in_the_background_one_thing_is_written_at_a_time_and_in_order():
    writer, go, done = InBackground(), threading.Event(), []

    def write(what: int) -> int:
        go.wait(PATIENCE)
        done.append(what)
        return what

    first = writer.hand_over(write, 0)
    assert done == []
    threading.Timer(0.02, go.set).start()
    second = writer.hand_over(write, 1)  # waits for the first
    assert done[0] == 0
    assert [first.result(), second.result()] == [0, 1]


def test_nobody_waits_for_something_small():
    writer, go = InBackground(), threading.Event()
    first = writer.hand_over(go.wait, PATIENCE)
    second = writer.hand_after(int, "2")
    assert not first.done()
    go.set()
    assert second.result() == 2


@pytest.mark.parametrize("writer", [AtOnce(), InBackground()], ids=["at once", "in the background"])
def test_what_goes_wrong_in_writing_is_heard_where_it_is_waited_for(writer):
    failed = writer.hand_over(int, "no number")
    assert writer.hand_over(int, "7").result() == 7
    with pytest.raises(ValueError, match="no number"):
        failed.result()
