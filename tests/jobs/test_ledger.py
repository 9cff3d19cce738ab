from __future__ import annotations

from dataclasses import replace

import pytest

from jobs.ledger import DEATHS, Ledger, Trouble
from sensitivity.commits import Failure
from sensitivity.lease import LeaseLost
from sensitivity.patience import StoreFailed
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
    assert not ledger.fail(first, trouble()).given_up
    assert [(attempt.shard.index, attempt.number) for attempt in iter(ledger.take, None)] == [(1, 1), (2, 1), (0, 2)]


def test_a_shard_is_given_up_after_its_third_failure():
    ledger = Ledger(SHARDS[:1])
    outcomes = [ledger.fail(attempt, trouble()) for attempt in iter(ledger.take, None)]
    assert [(failure.shard, failure.attempts, failure.given_up) for failure in outcomes] == [
        (0, 1, False),
        (0, 2, False),
        (0, 3, True),
    ]
    assert outcomes[2].reason == "ValueError: no such thing"
    assert "Traceback" in outcomes[2].traceback


def test_a_worker_gets_a_shard_back_only_where_nobody_else_can_have_it():
    ledger = Ledger(SHARDS)
    while (attempt := ledger.take("broken")) is not None:
        assert not ledger.fail(attempt, trouble(), "broken").given_up
    assert len(ledger) == 3
    assert [(attempt.shard.index, attempt.number) for attempt in iter(lambda: ledger.take("sound"), None)] == [
        (0, 2),
        (1, 2),
        (2, 2),
    ]


@pytest.mark.parametrize(
    ("before", "numbers"),
    [
        (Failure(0, 0, 10, 1, "", "", "", given_up=False, raised=1), [2, 3]),
        (Failure(0, 0, 10, 3, "", "", "", given_up=True, raised=3), [4, 5, 6]),
        (Failure(0, 0, 10, 4, "", "", "", given_up=False, raised=1, deaths=3), [5, 6]),
    ],
    ids=["one", "given up", "after deaths"],
)
def test_attempts_of_earlier_runs_count_and_a_shard_that_used_them_up_gets_as_many_again(before, numbers):
    ledger = Ledger(SHARDS[:1], {0: before})
    outcomes = [ledger.fail(attempt, trouble()) for attempt in iter(ledger.take, None)]
    assert [failure.attempts for failure in outcomes] == numbers
    assert [failure.given_up for failure in outcomes] == [False] * (len(numbers) - 1) + [True]


def test_workers_may_die_more_often_than_a_shard_may_raise():
    ledger = Ledger(SHARDS[:1])
    died = replace(trouble(), blames="worker")
    outcomes = [ledger.fail(attempt, died) for attempt in iter(ledger.take, None)]
    assert [failure.given_up for failure in outcomes] == [False] * (DEATHS - 1) + [True]
    assert (outcomes[-1].attempts, outcomes[-1].raised, outcomes[-1].deaths) == (DEATHS, 0, DEATHS)


def test_a_store_that_fails_and_a_lease_that_is_lost_are_not_the_shards_fault():
    for error in (StoreFailed("no space left"), LeaseLost("another driver's")):
        with pytest.raises(type(error), match=str(error)):
            Trouble.of(error).require_shard()
    trouble().require_shard()


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
