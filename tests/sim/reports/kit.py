"""Helpers of the tests of reports."""

import csv
import json
from dataclasses import asdict
from html.parser import HTMLParser


def write_lines(path, record):
    """Write a record without checks, as another program may do."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(line)) + "\n" for line in (record.header, *record.rounds)))


def read_csv(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def title_of(figure):
    return figure.axes[0].get_title(loc="left").replace("\n", " ")


def diamonds(axes):
    """The lines of a paper's figures."""
    return [line for line in axes.lines if line.get_marker() == "D"]


class Page(HTMLParser):
    """The tags, images, addresses and text of a page; every tag must be closed."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.images, self.addresses, self.text, self.open = [], [], [], "", []
        self.feed(path.read_text(encoding="utf-8"))
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in ("meta", "img"):
            self.open.append(tag)
        for name, value in attributes:
            if tag == "img" and name == "src":
                self.images.append(value)
            elif name in ("src", "href", "srcset", "action"):
                self.addresses.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
