from __future__ import annotations

from jobs.ledger import Ledger, Trouble
from sensitivity.plan import Shard

SHARDS = [Shard(index, 10 * index, 10 * index + 10) for index in range(3)]


def trouble() -> Trouble:
    try:
        raise ValueError("no such thing")
    except ValueError as error:
        return Trouble.of(error)


def test_shards_come_in_order_and_failed_ones_again_at_the_end():
    ledger = Ledger(SHARDS)
    first = ledger.take()
    assert (first.shard.index, first.number) == (0, 1)
    assert ledger.fail(first, trouble()) is None
    assert [(attempt.shard.index, attempt.number) for attempt in iter(ledger.take, None)] == [(1, 1), (2, 1), (0, 2)]


def test_a_shard_is_given_up_after_its_third_failure():
    ledger = Ledger(SHARDS[:1])
    outcomes = [ledger.fail(attempt, trouble()) for attempt in iter(ledger.take, None)]
    assert outcomes[:2] == [None, None]
    assert (outcomes[2].shard, outcomes[2].attempts) == (0, 3)
    assert outcomes[2].reason == "ValueError: no such thing"
    assert "Traceback" in outcomes[2].traceback


def test_a_worker_gets_a_shard_back_only_where_nobody_else_can_have_it():
    ledger = Ledger(SHARDS)
    while (attempt := ledger.take("broken")) is not None:
        assert ledger.fail(attempt, trouble(), "broken") is None
    assert len(ledger) == 3
    assert [(attempt.shard.index, attempt.number) for attempt in iter(lambda: ledger.take("sound"), None)] == [
        (0, 2),
        (1, 2),
        (2, 2),
    ]


def test_reasons_are_one_line_that_says_what_is_wrong():
    graph = "Graph execution error:\n\nDetected at node a defined at (most recent call last):\n  File 'x', line 1\n"
    error = RuntimeError(
        f"{graph}ValueError: too much\nand too late\nTraceback\n  File 'y'\n\nValueError: too much\nrain\n"
    )
    assert Trouble.of(error).reason == "RuntimeError: ValueError: too much rain"
    assert Trouble.of(KeyError()).reason == "KeyError: no message"


def test_an_attempt_given_back_does_not_count():
    ledger = Ledger(SHARDS[:1])
    for _ in range(5):
        attempt = ledger.take()
        ledger.give_back(attempt)
    assert ledger.take().number == 1
    assert len(ledger) == 0
