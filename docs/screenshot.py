"""``make screenshot``: the pictures of pages and reports in the docs, as Chromium shows them.

    python docs/screenshot.py [NAME ...] [--site FOLDER]

Every page is made by the command beside its name in ``PAGES`` and shown at the width of a desk and
of a phone, in light and in dark colours. ``--site`` adds the front page of a site that ``mkdocs
build`` has written. Without Chromium nothing is done, and that is said.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
from PIL import Image

from dpkern import cli

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGES = {
    "cost_compare": ("cost", "compare", "--mechanisms", "spof,dpsgd-da", "-n", "14", "-l", "7"),
    "cost_model": ("cost", "model", "gredp-resnet18", "--batch-size", "8", "--rounds", "15"),
    "cost_table": ("cost", "table"),
    "train": ("train", "--epsilon", "3", "--audit", "2000", "--ceiling"),
    "audit": ("audit", "dpsgd", "--runs", "2000"),
    "papers": ("reproduce", "ldp", "all", "--quick"),
}
"""Commands by the name of their pictures."""
PLACES = {"train": ("--out", "report.html"), "papers": ("--out", "ldp.html")}
"""Option of the folder of a page, and the page's name there, where the page is not a file given."""
SHAPES = {
    f"{device}{suffix}": (width, colours)
    for device, width in (("desktop", 960), ("phone", 390))
    for suffix, colours in (("", "light"), ("_dark", "dark"))
}
"""Width and colours."""
HEIGHT = 1500
"""Height in pixels of the page; a picture ends where the page does."""
SCALE = 1.5
COLOURS = 192


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Take the pictures of pages and reports.")
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--site", type=Path, help="folder of a built site")
    chosen = parser.parse_args(arguments)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"make screenshot: none of {', '.join(BROWSERS)} is installed; nothing was done")
        return 0
    PICTURES.mkdir(exist_ok=True)
    if chosen.site is not None:
        handler = partial(SimpleHTTPRequestHandler, directory=chosen.site)
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:  # scripts need an origin
            Thread(target=server.serve_forever, daemon=True).start()
            take(browser, "site", f"http://127.0.0.1:{server.server_port}/index.html")
            server.shutdown()
    for name in chosen.names or ([] if chosen.site else PAGES):
        with tempfile.TemporaryDirectory() as folder:
            page, options = place_of(name, Path(folder))
            code = cli.main([*PAGES[name], *options])
            if code:
                return code
            take(browser, name, page.as_uri())
    return 0


def place_of(name: str, folder: Path) -> tuple[Path, list[str]]:
    """Return the file of a page in a folder, and the options that have it written there."""
    if name in PLACES:
        option, file = PLACES[name]
        return folder / "made" / file, [option, str(folder / "made")]
    page = folder / f"{name}.html"
    if PAGES[name][0] == "audit":
        return page, ["--html", str(page)]
    return page, ["--format", "html", "--out", str(page)]


def take(browser: str, name: str, page: str) -> None:
    """Write the pictures of one page."""
    with tempfile.TemporaryDirectory() as folder:
        for shape, (width, colours) in SHAPES.items():
            shot = Path(folder) / "shot.png"
            shoot(browser, page, shot, width, HEIGHT, colours)
            target = PICTURES / f"{name}_{shape}.png"
            trimmed(Image.open(shot).convert("RGB")).quantize(COLOURS).save(target, optimize=True)
            print(f"{target} ({target.stat().st_size // 1024} KiB)")


def shoot(browser: str, page: str, shot: Path, width: int, height: int, colours: str) -> None:
    """One picture of a page, as a new user with these settings sees it."""
    options = ["--headless=new", "--hide-scrollbars", "--disable-gpu", f"--screenshot={shot}"]
    options += [f"--window-size={width},{height}", f"--force-device-scale-factor={SCALE}"]
    options += [f"--user-data-dir={shot.parent / f'profile-{width}-{colours}'}", "--no-first-run"]
    options.append("--virtual-time-budget=5000")  # scripts of the site choose its colours
    if colours == "dark":
        options.append("--blink-settings=preferredColorScheme=0")
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox refuses root
    command = [browser, *options, page]
    subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def trimmed(picture: Image.Image) -> Image.Image:
    """Without the empty rows below the page."""
    pixels = np.asarray(picture)
    filled = np.flatnonzero((pixels != pixels[-1, -1]).any(axis=(1, 2)))
    bottom = min(picture.height, int(filled[-1]) + 40) if len(filled) else picture.height
    return picture.crop((0, 0, picture.width, bottom))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
