"""Token buckets and concurrency of one key."""

from __future__ import annotations

import pytest

from gateway.errors import ApiError
from gateway.keys import ApiKey
from gateway.limits import Allowance, Allowances


def test_a_minutes_requests_may_come_at_once_and_come_back_one_by_one() -> None:
    allowance = Allowance(ApiKey("a", requests_per_minute=3), 100.0)
    for _ in range(3):
        allowance.enter(100.0)
        allowance.leave()
    with pytest.raises(ApiError) as refused:
        allowance.enter(100.0)
    assert refused.value.status == 429 and refused.value.code == "rate_limit_exceeded"
    assert refused.value.retry_after_s == pytest.approx(20)
    assert refused.value.outcome == "rate_limited", "nothing of the mesh is full"
    allowance.enter(120.0)
    with pytest.raises(ApiError):
        allowance.enter(120.0)
    for _ in range(3):
        allowance.enter(1000.0)
    with pytest.raises(ApiError):
        allowance.enter(1000.0)


def test_so_many_at_once() -> None:
    allowance = Allowance(ApiKey("a", max_concurrency=2), 0.0)
    allowance.enter(0.0)
    allowance.enter(0.0)
    with pytest.raises(ApiError) as refused:
        allowance.enter(0.0)
    assert refused.value.status == 429
    allowance.leave()
    allowance.enter(0.0)


def test_a_refused_request_is_not_counted() -> None:
    allowance = Allowance(ApiKey("a", requests_per_minute=2, max_concurrency=1), 0.0)
    allowance.enter(0.0)
    for _ in range(5):
        with pytest.raises(ApiError):
            allowance.enter(0.0)
    allowance.leave()
    allowance.enter(0.0)


def test_tokens_are_charged_at_their_most_and_what_was_not_used_is_given_back() -> None:
    allowance = Allowance(ApiKey("a", tokens_per_minute=600), 0.0)
    allowance.charge(500, 0.0)
    with pytest.raises(ApiError) as refused:
        allowance.charge(200, 0.0)
    assert refused.value.retry_after_s == pytest.approx(10)
    allowance.refund(450, 0.0)
    allowance.charge(550, 0.0)
    allowance.refund(10_000, 0.0)
    allowance.charge(600, 0.0)


def test_more_than_a_minute_brings_is_let_in_by_a_full_bucket() -> None:
    allowance = Allowance(ApiKey("a", tokens_per_minute=600), 0.0)
    allowance.charge(1800, 0.0)
    with pytest.raises(ApiError) as refused:
        allowance.charge(1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(120, abs=1)
    allowance.charge(1, 121.0)


def test_the_headers_are_openais() -> None:
    allowance = Allowance(ApiKey("a", requests_per_minute=60, tokens_per_minute=600), 0.0)
    allowance.enter(0.0)
    allowance.charge(450, 0.0)
    assert dict(allowance.headers(0.0)) == {
        b"x-ratelimit-limit-requests": b"60",
        b"x-ratelimit-remaining-requests": b"59",
        b"x-ratelimit-reset-requests": b"1s",
        b"x-ratelimit-limit-tokens": b"600",
        b"x-ratelimit-remaining-tokens": b"150",
        b"x-ratelimit-reset-tokens": b"45s",
    }
    allowance.charge(150, 0.0)
    allowance.refund(-600, 0.0)
    assert dict(allowance.headers(0.5))[b"x-ratelimit-reset-tokens"] == b"1m59s"
    assert dict(allowance.headers(0.5))[b"x-ratelimit-remaining-tokens"] == b"0"
    assert dict(allowance.headers(0.75))[b"x-ratelimit-reset-requests"] == b"250ms"
    assert Allowance(ApiKey("free"), 0.0).headers(0.0) == []


def test_a_reload_refills_nobodys_bucket() -> None:
    now = [0.0]
    book = Allowances(lambda: now[0])
    before = ApiKey("a", requests_per_minute=2)
    book.of("a", before).enter(0.0)
    book.of("a", before).enter(0.0)
    again = ApiKey("a", requests_per_minute=2)
    with pytest.raises(ApiError):
        book.of("a", again).enter(0.0)
    more = ApiKey("a", requests_per_minute=60, max_concurrency=9)
    with pytest.raises(ApiError):
        book.of("a", more).enter(0.0)
    book.of("a", more).enter(1.0)
    assert book.of("a", more).in_flight == 3, "what is open stays counted"
    book.of("a", ApiKey("a")).enter(1.0)
    book.of("b", more).enter(0.0)
