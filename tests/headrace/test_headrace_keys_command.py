"""``headrace keys``: what it makes is what a gateway takes."""

from __future__ import annotations

import io
import re

import pytest

from gateway.keys import ApiKey, Keyring, digest_of, parse_keys
from headrace.__main__ import main


def test_a_new_key_opens_and_is_in_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "alice"]) == 0
    out, err = capsys.readouterr()
    key = err.split()[-1]
    assert re.fullmatch(r"hr-[\w-]{43}", key) and key not in out
    assert parse_keys(out) == {digest_of(key): ApiKey("alice", "alice")}


def test_its_options_are_those_of_an_entry(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tenant=team-a", "--weight=200", "--priority=-5", "--requests-per-minute=60"]
    assert main(["keys", "new", "alice", *options, "--tokens-per-minute=1000", "--max-concurrency=4"]) == 0
    (key,) = parse_keys(capsys.readouterr().out).values()
    assert key == ApiKey("alice", "team-a", 200, -5, 60, 1000, 4)


def test_entries_of_several_calls_make_one_file(
    capsys: pytest.CaptureFixture[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys = {}
    with file.open("a") as out:
        for name in ("alice", "bob"):
            main(["keys", "new", name])
            captured = capsys.readouterr()
            out.write(captured.out)
            keys[name] = captured.err.split()[-1]
    ring = Keyring(str(file))
    assert {name: ring.find(key) for name, key in keys.items()} == {
        "alice": ApiKey("alice", "alice"),
        "bob": ApiKey("bob", "bob"),
    }


@pytest.mark.parametrize("arguments", [["a b"], ['"x'], [""], ["alice", "--weight=0"], ["alice", "--tenant=\n"]])
def test_what_no_gateway_would_take_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        main(["keys", "new", *arguments])
    assert exit_code.value.code == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "hr-" not in err


def test_hash_reads_a_key_from_stdin(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("my key\n"))
    assert main(["keys", "hash"]) == 0
    assert capsys.readouterr().out == digest_of("my key").hex() + "\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    with pytest.raises(SystemExit):
        main(["keys", "hash"])


def test_without_a_command_it_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "new ID" in error and "hash" in error
