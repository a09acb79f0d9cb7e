"""``fedcore audit``: check an exported audit log, without the server's folder."""

import argparse
import re

from fedcore.cli.terminal import Options, Parser
from fedcore.errors import CorruptionError
from fedcore.server.audit import ROUND, checked, read_lines
from fedcore.validation import expand_home, short_repr

HELP = """
    Check the audit log of a server, without its folder.

    Start with: fedcore audit check FILE
"""


def add_arguments(top: Parser) -> None:
    """Add the commands."""
    group = top.add_command("audit", help=HELP)
    group.add_commands()
    parser = group.add_command("check", check)
    parser.add_argument("file", type=expand_home, metavar="FILE", help="JSON lines of `fedcore store audit --export`")
    about = "a digest that was published: the log must contain its document; repeatable"
    parser.add_argument("--anchor", type=_digest, action="append", default=[], metavar="DIGEST", help=about)
    about = "the public key that must sign each document, in hexadecimal digits"
    parser.add_argument("--signer", type=_digest, metavar="PUBLIC", help=about)
    parser.add_argument("--client", metavar="ID", help="list the rounds that count an update of this client")


def check(options: Options) -> None:
    """Check that a log is complete and unchanged up to its anchors.

    Without an anchor or a signer, the check only shows that the documents fit together:
    whoever runs the server can write others that do.

    Example:
      fedcore audit check log.jsonl --anchor 5f0c... --client 7
    """
    anchors, rounds, number, digest = set(options.anchor), 0, -1, "none"
    for number, (digest, document) in enumerate(checked(read_lines(str(options.file)), signer=options.signer)):
        if digest in anchors:
            anchors.discard(digest)
            print(f"anchor {digest}: document {number}, round {document['round']}")
        if document["what"] != ROUND:
            continue
        rounds += 1
        updates = document.get("updates")
        for update in updates if isinstance(updates, list) and options.client is not None else ():
            if isinstance(update, dict) and str(update.get("client")) == options.client:
                weight, own = short_repr(update.get("weight")), short_repr(update.get("digest"))
                print(f"round {document['round']}: weight {weight}, digest {own}")
    if number < 0:
        raise CorruptionError(f"{options.file}: has no documents")
    if anchors:
        listed = ", ".join(sorted(anchors))
        raise CorruptionError(f"--anchor {listed}: no document has this digest; documents were changed, or are missing")
    print(f"sound: {number + 1:,} documents of {rounds:,} rounds; the last one is {digest}")


def _digest(text: str) -> str:
    if not re.fullmatch("[0-9a-fA-F]{64}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: must be 64 hexadecimal digits")
    return text.lower()
