"""The pages need nothing else: no network, no other file, no scripts."""

import base64
from html.parser import HTMLParser

from fedcore.reports import write_report
from tests.reports.test_report import write


class Seen(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.images, self.addresses, self.text, self.open = [], [], [], "", []

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


def parsed(path):
    seen = Seen()
    seen.feed(path.read_text(encoding="utf-8"))
    assert seen.open == []
    return seen


def test_a_report_is_one_page_by_itself(tmp_path, record):
    write(tmp_path, record("FedAvg <b>", 0, 0, [0.5, 0.6]), record("MimiC", 1, 0, [0.6, 0.7]))
    (tmp_path / "config.json").write_text('{"name": "x & y"}')
    write_report(tmp_path)
    seen = parsed(tmp_path / "report.html")
    assert seen.addresses == []
    assert "script" not in seen.tags
    assert "link" not in seen.tags
    for image, file in zip(seen.images, ("curves.png", "loss.png"), strict=True):
        kind, _, data = image.partition(",")
        assert kind == "data:image/png;base64"
        assert base64.b64decode(data) == (tmp_path / file).read_bytes()
    assert "FedAvg <b>" in seen.text
    assert '{"name": "x & y"}' in seen.text
    assert "url(" not in (tmp_path / "report.html").read_text()
    assert "@import" not in (tmp_path / "report.html").read_text()
