"""The page of results in a real browser: on a desk and on a phone, by day and by night."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from benchmarks.report.page import render
from benchmarks.report.sections import read_sections

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PROBE = """
<script>
addEventListener("load", () => {
  const images = [...document.querySelectorAll("header img")];
  const wide = [...document.querySelectorAll(".wide")];
  document.title = JSON.stringify({
    sideways: document.documentElement.scrollWidth - innerWidth,
    images: images.map(
      one => [one.complete && one.naturalWidth > 0, one.getBoundingClientRect().width]),
    first: images[0].getBoundingClientRect().top,
    tables: wide.every(one => getComputedStyle(one).overflowX === "auto"),
    open: document.querySelectorAll("details[open]").length,
    back: getComputedStyle(document.body).backgroundColor,
    dark: images.map(one => one.currentSrc.length),
  });
});
</script>
"""
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")


class Title(HTMLParser):
    text = ""
    inside = False

    def handle_starttag(self, tag, attrs):
        self.inside = tag == "title"

    def handle_data(self, data):
        if self.inside:
            self.text += data


def look(directory, width, *flags):
    page = directory / "page.html"
    text = render(read_sections(RESULTS), RESULTS)
    assert "<script" not in text
    page.write_text(text.replace("</body>", PROBE + "</body>"))
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--disable-dev-shm-usage", f"--user-data-dir={directory / 'profile'}", *flags,
        f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = Title()
    title.feed(re.search("<title>.*?</title>", found.stdout, re.DOTALL)[0])
    return json.loads(title.text)


@pytest.mark.cases(1)
@pytest.mark.parametrize("width", [500, 1280])  # as narrow as a headless window becomes
def test_the_page_fits_and_opens_with_its_pictures(tmp_path, width):
    seen = look(tmp_path, width)
    assert seen["sideways"] <= 0
    assert len(seen["images"]) == 3
    assert all(loaded and 0 < shown <= width for loaded, shown in seen["images"])
    assert seen["first"] < 300
    assert seen["tables"]
    assert seen["open"] == 0


@pytest.mark.long
def test_by_night_it_is_dark_with_pictures_of_its_own(tmp_path):
    light = look(tmp_path, 1280)
    dark = look(tmp_path, 1280, "--blink-settings=preferredColorScheme=0")
    assert light["back"] != dark["back"]
    assert sum(map(int, re.findall(r"\d+", dark["back"])[:3])) < 150
    assert all(loaded for loaded, _ in dark["images"])
