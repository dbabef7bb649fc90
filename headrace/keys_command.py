"""``headrace keys``: make API keys, and the entries that a gateway's keys file has of them."""

from __future__ import annotations

import argparse
import getpass
import secrets
import sys
from collections.abc import Sequence

from gateway.keys import ApiKey, KeysError, digest_of, parse_keys
from shared.config import Parser

PREFIX = "hr-"  # tells people, and programs that look for leaked secrets, what it is
RANDOM_BYTES = 32

_OPTIONS = (
    ("tenant", str, "whose share of the workers it uses (default: the id)"),
    ("weight", int, "of the tenant, percent of a normal tenant's share (default: 100)"),
    ("priority", int, "of its requests, lower runs first; they may ask for less, never for more (default: 0)"),
    ("requests_per_minute", int, "per gateway (default: no limit)"),
    ("tokens_per_minute", int, "prompt and max_tokens, per gateway (default: no limit)"),
    ("max_concurrency", int, "requests at once, per gateway (default: no limit)"),
)


def main(argv: Sequence[str]) -> int:
    """``new`` prints an entry on stdout and its key, once, on stderr; ``hash`` prints the digest of a key."""
    parser = Parser(prog="headrace keys", description="Make API keys for a gateway's --api-keys file.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    new = commands.add_parser(
        "new",
        help="make a key and its entry for the keys file",
        description="Make a key. The entry for the keys file goes to stdout, the key to stderr; it is kept nowhere.",
    )
    new.add_argument("id", help="name of the key, for people and logs")
    for name, kind, text in _OPTIONS:
        new.add_argument("--" + name.replace("_", "-"), dest=name, type=kind, default=None, help=text)
    commands.add_parser(
        "hash",
        help="print the digest of a key on stdin",
        description="Read a key from stdin and print the digest that the keys file has of it.",
    )
    args = parser.parse_args(argv)
    if args.command is None:
        parser.error("a command is missing: new ID makes a key, hash prints the digest of one on stdin")
    if args.command == "hash":
        return _hash(parser)
    key = PREFIX + secrets.token_urlsafe(RANDOM_BYTES)
    try:
        print(entry(key, args), end="")
    except KeysError as error:
        parser.error(str(error))
    print(f"the key of {args.id}, shown this once: {key}", file=sys.stderr)
    return 0


def entry(key: str, args: argparse.Namespace) -> str:
    """A ``[[key]]`` table; :class:`KeysError` where a gateway would not take it."""
    lines = ["[[key]]", f'id = "{args.id}"', f'sha256 = "{digest_of(key).hex()}"']
    for name, kind, _ in _OPTIONS:
        value = getattr(args, name)
        if value is not None:
            lines.append(f'{name} = "{value}"' if kind is str else f"{name} = {value}")
    text = "\n".join(lines) + "\n\n"
    found: list[ApiKey] = list(parse_keys(text).values())
    if len(found) != 1 or found[0].id != args.id:
        raise KeysError(f"{args.id!r} is no id")
    return text


def _hash(parser: Parser) -> int:
    key = getpass.getpass("key: ") if sys.stdin.isatty() else sys.stdin.readline()
    key = key.strip()
    if not key:
        parser.error("no key on stdin")
    print(digest_of(key).hex())
    return 0
