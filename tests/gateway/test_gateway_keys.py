"""The keys file: what it may say, and how it changes while a gateway runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gateway.keys import MAX_FILE_BYTES, ApiKey, Keyring, KeysError, digest_of, parse_keys


def entry(key: str, key_id: str, more: str = "") -> str:
    return f'[[key]]\nid = "{key_id}"\nsha256 = "{digest_of(key).hex()}"\n{more}\n'


def test_an_entry_says_everything_about_its_key() -> None:
    text = entry(
        "k1", "alice",
        'tenant = "team"\nweight = 50\npriority = 3\nrequests_per_minute = 60\ntokens_per_minute = 900\n'
        "max_concurrency = 2",
    )  # fmt: skip
    assert parse_keys(text) == {digest_of("k1"): ApiKey("alice", "team", 50, 3, 60, 900, 2)}
    assert parse_keys(entry("k1", "alice")) == {digest_of("k1"): ApiKey("alice", "alice")}
    assert parse_keys("") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[key]", "no valid TOML"),
        ("a=" + "[" * 500, "nested too deeply"),
        ("a=" + "9" * 5000, "no valid TOML"),
        ("[key]\nid = 'a'", r"\[\[key\]\]"),
        ("key = [1]", r"\[\[key\]\]"),
        ("[[keys]]\nid = 'a'", "unknown key 'keys'"),
        ("[[key]]\nsha256 = 'ab'", "'id'"),
        ("[[key]]\nid = 'a'", "'sha256'"),
        ("[[key]]\nid = 'a'\nsha256 = 'hr-plain-text-key'", "'sha256'"),
        (entry("k", "a", "key = 'k'"), "unknown key 'key'"),
        (entry("k", "a", "weight = 0"), "'weight'"),
        (entry("k", "a", "weight = true"), "'weight'"),
        (entry("k", "a", "weight = 1.5"), "'weight'"),
        (entry("k", "a", "requests_per_minute = -1"), "'requests_per_minute'"),
        (entry("k", "a", "tenant = ''"), "'tenant'"),
        (entry("k", "a") + entry("k2", "a"), "twice"),
        (entry("k", "a") + entry("k", "b"), "twice"),
        (entry("k", "a", "tenant='t'\nweight=1") + entry("k2", "b", "tenant='t'\nweight=2"), "different weights"),
    ],
)
def test_a_bad_file_is_one_line_that_quotes_no_secret(text: str, reason: str) -> None:
    with pytest.raises(KeysError, match=reason) as error:
        parse_keys(text)
    message = str(error.value)
    assert "\n" not in message and "plain-text-key" not in message and digest_of("k").hex() not in message


def test_only_the_very_key_opens(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("secret", "alice"))
    ring = Keyring(str(file))
    assert ring.required and ring.find("secret") == ApiKey("alice", "alice")
    for wrong in ("", "Secret", "secret ", "secre", digest_of("secret").hex(), "x" * 1_000_000, "\ud800"):
        assert ring.find(wrong) is None


def test_without_a_file_and_a_key_nobody_needs_one() -> None:
    assert not Keyring().required


def test_one_key_by_option_and_a_file_go_together(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("filed", "alice"))
    ring = Keyring(str(file), "single")
    assert ring.find("filed") is not None and ring.find("single") is not None
    file.write_text(entry("other", "bob"))
    assert ring.refresh()
    assert ring.find("filed") is None and ring.find("other") is not None and ring.find("single") is not None


def test_a_changed_file_is_in_force_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("one", "alice"))
    ring = Keyring(str(file))
    assert not ring.refresh(), "nothing has changed"
    file.write_text(entry("two", "bob"))
    assert ring.refresh()
    assert ring.find("one") is None and ring.find("two") is not None
    for bad in ("[[key]", entry("three", "carol", "weight = 0")):
        file.write_text(bad)
        assert not ring.refresh()
        assert ring.find("two") is not None and ring.find("three") is None
    assert caplog.text.count("the keys stay as they were") == 2
    assert not ring.refresh(), "a bad file is told of once"
    file.unlink()
    assert not ring.refresh() and ring.find("two") is not None
    replacement = tmp_path / "new.toml"
    replacement.write_text(entry("four", "dave"))
    os.replace(replacement, file)
    assert ring.refresh() and ring.find("four") is not None


HOPELESS = [
    b"a=" + b"[" * 500, b"a=" + b"9" * 5000, b"\xff", b"\0", b"", b"# " + b"x" * MAX_FILE_BYTES,
    b"[" + b"a." * 5000 + b"b]\n" + b"c=1", b"a=" + b"{b=" * 500,
]  # fmt: skip


@pytest.mark.parametrize("content", HOPELESS, ids=lambda content: repr(content[:6]))
def test_nothing_that_the_file_holds_ends_a_gateway(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("one", "alice"))
    ring = Keyring(str(file))
    file.write_bytes(content)
    assert not ring.refresh() and not ring.refresh()
    assert ring.find("one") is not None
    assert caplog.text.count("the keys stay as they were") == 1
    with pytest.raises(KeysError, match=r"keys\.toml: ") as error:
        Keyring(str(file), "single")
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    file.write_text(entry("two", "bob"))
    assert ring.refresh() and ring.find("two") is not None


@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_what_is_no_regular_file_is_refused_without_waiting_for_it(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("one", "alice"))
    ring = Keyring(str(path))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert not ring.refresh() and ring.find("one") is not None
    with pytest.raises(KeysError, match=r"no regular file|Is a directory"):
        Keyring(str(path))


def test_a_file_that_has_lost_all_its_keys_counts_as_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(entry("one", "alice"))
    ring = Keyring(str(file), "single")
    for emptied in ("", "# all gone\n", "key = []\n"):
        file.write_text(emptied)
        assert not ring.refresh() and ring.find("one") is not None
    assert caplog.text.count("there are no keys in it") == 3


def test_a_path_that_names_nothing_is_a_keys_error() -> None:
    for path in ("a\0b", "~no-such-user-here/keys.toml"):
        with pytest.raises(KeysError):
            Keyring(path)


def test_a_gateway_does_not_start_on_a_bad_file(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="No such file"):
        Keyring(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff")
    with pytest.raises(KeysError, match=r"bad\.toml"):
        Keyring(str(tmp_path / "bad.toml"))


def test_a_client_may_lower_its_priority_but_not_better_it() -> None:
    key = ApiKey("a", priority=2)
    assert [key.priority_of(asked) for asked in (None, -100, 0, 2, 5)] == [2, 2, 2, 2, 5]
    assert ApiKey("vip", priority=-5).priority_of(None) == -5
