"""The built site in a real browser, from disk and over HTTP: ``python -m release.browser FOLDER REPORT``.

It searches and follows the results. It finds console errors, failed requests, horizontal scrolling and text with too
little contrast, and writes screenshots to build/screenshots. REPORT is a report.html of an experiment, whose curves it
hides and shows. It needs the group ``browser`` and Chromium of the system.
"""

import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import sync_playwright

SCREENSHOTS = Path(__file__).parent.parent / "build" / "screenshots"
# A search, and the page that must be among its first three.
SEARCHES = {
    "FedAdam": "flower.html",
    "docker": "containers.html",
    "LoRA": "large-models.html",
    "PEFT": "large-models.html",
    "differential privacy": "flower.html",
    "early stopping": "cookbook.html",
    "PYTHONPATH": "own-data.html",
    "non-IID": "tutorials/non_iid.html",
    "median": "trust.html",
}
PAGES = (
    "index.html",
    "flower.html",
    "cookbook.html",
    "trust.html",
    "experiments.html",
    "tutorials/non_iid.html",
    "api/server.html",
)
SIZES = {"desk": (1280, 900), "phone": (390, 844)}


class Quiet(SimpleHTTPRequestHandler):
    """A server without a log."""

    def log_message(self, *_):
        """Print nothing."""


def found(page, words):
    """The links that a search lists, best first."""
    page.evaluate("document.querySelector('#__search').checked || document.querySelector('#__search').click()")
    page.fill("input.md-search__input", "")
    page.focus("input.md-search__input")
    page.keyboard.type(words)
    page.wait_for_selector("a.md-search-result__link", timeout=30_000)
    page.wait_for_timeout(1500)
    return page.eval_on_selector_all("a.md-search-result__link", "all => all.map(each => each.href)")


def look(page, url, name):
    """Return the problems of a page at both sizes."""
    for size, (width, height) in SIZES.items():
        page.set_viewport_size({"width": width, "height": height})
        page.goto(url)
        page.wait_for_timeout(300)
        page.screenshot(path=SCREENSHOTS / f"{name}-{size}.png")
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            yield f"{name}, {size}: scrolls sideways"
    checks = {"runOnly": ["color-contrast"], "resultTypes": ["violations"]}
    for violation in Axe().run(page, options=checks).response["violations"]:
        first = violation["nodes"][0]
        yield f"{name}: {len(violation['nodes'])} x {first['any'][0]['message']} {first['html'][:100]}"


def opened(browser, scheme, wrong):
    """A page in the scheme; what goes wrong in it is added to a list."""

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # which the next page does to requests of the last one
            wrong.append(f"request failed: {request.url}")

    page = browser.new_context(color_scheme=scheme).new_page()
    page.on("console", lambda message: message.type == "error" and wrong.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"script: {error}"))
    page.on("requestfailed", failed)
    page.on("response", lambda reply: reply.status >= 400 and wrong.append(f"status {reply.status}: {reply.url}"))
    return page


def searches(browser, root):
    """Return the problems of the search of the site below a URL."""
    wrong = []
    page = opened(browser, "light", wrong)
    for words, expected in SEARCHES.items():
        page.goto(f"{root}/index.html")
        links = found(page, words)
        pages = list(dict.fromkeys(link.removeprefix(f"{root}/").partition("?")[0].partition("#")[0] for link in links))
        if expected not in pages[:3]:
            wrong.append(f"search for {words}: {pages[:3]}")
            continue
        page.goto(next(link for link in links if link.startswith(f"{root}/{expected}")))
        if not page.evaluate("!location.hash || !!document.getElementById(decodeURIComponent(location.hash.slice(1)))"):
            wrong.append(f"search for {words}: {page.url} has no such heading")
    page.context.close()
    return [f"{root[:4]}: {each}" for each in wrong]


def looks(browser, urls):
    """Return the problems of pages, by their names, in both schemes."""
    wrong = []
    for scheme in ("light", "dark"):
        page = opened(browser, scheme, wrong)
        for name, url in urls.items():
            wrong += look(page, url, f"{name}-{scheme}")
        page.context.close()
    return wrong


def toggles(browser, report):
    """Return the problems of a report's legends: a click hides a curve, another click shows it."""
    wrong = []
    page = opened(browser, "light", wrong)
    page.goto(report)
    keys = page.locator('g[id$="-key"]')
    if not keys.count():
        wrong.append("report: no curve can be hidden")
    for expected in (True, False) if keys.count() else ():
        keys.first.dispatch_event("click")
        if (page.locator("g.off:not([id$='-key'])").count() > 0) != expected:
            wrong.append(f"report: a click does not {'hide' if expected else 'show'} the curve")
    page.context.close()
    return wrong


def main(folder, report):
    """Print the problems; return 1 if there are any, else 0."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        disk, web = folder.as_uri(), f"http://127.0.0.1:{server.server_port}"
        urls = {place.replace("/", "-").removesuffix(".html"): f"{disk}/{place}" for place in PAGES}
        urls["report"] = report.as_uri()
        wrong = [*searches(browser, disk), *searches(browser, web), *looks(browser, urls)]
        wrong += toggles(browser, urls["report"])
        browser.close()
    server.shutdown()
    print(*wrong, f"{len(wrong)} problems; screenshots in {SCREENSHOTS}", sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(*(Path(name).resolve() for name in sys.argv[1:])))
