"""Stop strings: nothing of a match leaks, the earliest occurrence wins, pieces don't matter."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, bool]:
    matcher = StopMatcher(stops, include)
    out = "".join(matcher.feed(piece) for piece in pieces)
    out += matcher.finish()
    return out, matcher.matched


def expected(stops: list[str], text: str, include: bool = False) -> tuple[str, bool]:
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if not found:
        return text, False
    start, size = min(found)
    return text[: start + size] if include else text[:start], True


def test_a_match_across_pieces() -> None:
    assert run(["END"], ["a", "E", "N", "D", "b"]) == ("a", True)


def test_the_later_listed_stop_that_occurs_first_wins() -> None:
    assert run(["zz", "b"], list("abzz")) == ("a", True)


def test_a_partial_match_that_fails_comes_out_in_full() -> None:
    assert run(["aab"], list("aaaac")) == ("aaaac", False)


def test_nothing_that_may_begin_a_match_is_let_out() -> None:
    matcher = StopMatcher(["abc"])
    assert matcher.feed("xab") == "x"
    assert matcher.feed("abc") == "ab"
    assert matcher.matched
    assert matcher.feed("more") == ""


def test_an_earlier_match_that_is_still_open_is_waited_for() -> None:
    matcher = StopMatcher(["bcdef", "cd"])
    assert matcher.feed("abcd") == "a"
    assert not matcher.matched
    assert matcher.feed("ef") == ""
    assert matcher.matched
    assert run(["bcdef", "cd"], list("abcdx")) == ("ab", True)
    assert run(["bcdef", "cd"], list("abcd")) == ("ab", True)


def test_the_match_can_be_included() -> None:
    assert run(["END"], ["aEN", "Db"], include=True) == ("aEND", True)


def test_a_match_that_may_not_count_is_ordinary_text() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.feed("aa", may_match=False) + matcher.feed("b") == "aab"
    assert not matcher.matched
    overlapping = StopMatcher(["aa"])
    assert overlapping.feed("aa", may_match=False) + overlapping.feed("a") == "a"
    assert overlapping.matched


words = st.text(alphabet="ab", min_size=1, max_size=5)


@given(
    st.lists(words, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=4), max_size=12), st.booleans()
)
def test_pieces_never_matter(stops: list[str], pieces: list[str], include: bool) -> None:
    assert run(stops, pieces, include) == expected(stops, "".join(pieces), include)


@given(st.lists(words, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=4), max_size=12))
def test_what_is_out_never_has_to_be_taken_back(stops: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = ""
    final, _ = expected(stops, "".join(pieces))
    for piece in pieces:
        out += matcher.feed(piece)
        assert final.startswith(out)
