"""Draws docs/pictures/report.png: the page of `make demo`, as Chromium shows it. Run it from the root, after that."""

from pathlib import Path

from PIL import Image

from browser import chromium


def draw(page_file: Path, picture: Path, timeline: str) -> None:
    """Photograph the whole page with the timeline and the plan of the run called `timeline`."""
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1000, "height": 800})
        page.goto(page_file.resolve().as_uri())
        for choice in ("timeline", "plan"):
            chooser = page.locator(f"#{choice}-choice select")
            if chooser.count():  # none where one run has such a picture
                chooser.select_option(label=timeline)
        page.screenshot(path=picture, full_page=True)
    Image.open(picture).quantize(256).save(picture, optimize=True)  # a page of flat colours: a quarter of the bytes


if __name__ == "__main__":
    draw(Path("demo/report.html"), Path("docs/pictures/report.png"), "blocks(bits=4), exact plan")
