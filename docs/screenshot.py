"""``make screenshot``: the pictures of docs/cost.md, as Chromium shows the pages.

Every page is made by ``dpkern cost ... --format html`` and shown at the width of a desk and of a
phone. Without Chromium nothing is done, and that is said.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from dpkern import cli

PICTURES = Path(__file__).parent / "pictures"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGES = {
    "compare": ("compare", "--mechanisms", "spof,dpsgd-da", "-n", "14", "-l", "7"),
    "model": ("model", "gredp-resnet18", "--batch-size", "8", "--rounds", "15"),
    "table": ("table",),
}
SHAPES = {"desktop": (960, 1500, "light"), "phone": (390, 1500, "dark")}
"""Width, height and colours; a picture ends where the page does."""
SCALE = 1.5
COLOURS = 192


def main() -> int:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"make screenshot: none of {', '.join(BROWSERS)} is installed; nothing was done")
        return 0
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, arguments in PAGES.items():
            page = Path(folder) / f"{name}.html"
            code = cli.main(["cost", *arguments, "--format", "html", "--out", str(page)])
            if code:
                return code
            for shape, (width, height, colours) in SHAPES.items():
                shot = Path(folder) / "shot.png"
                shoot(browser, page, shot, width, height, colours)
                target = PICTURES / f"cost_{name}_{shape}.png"
                trimmed(Image.open(shot).convert("RGB")).quantize(COLOURS).save(
                    target, optimize=True
                )
                print(f"{target} ({target.stat().st_size // 1024} KiB)")
    return 0


def shoot(browser: str, page: Path, shot: Path, width: int, height: int, colours: str) -> None:
    """One picture of a page, as a new user with these settings sees it."""
    options = ["--headless=new", "--hide-scrollbars", "--disable-gpu", f"--screenshot={shot}"]
    options += [f"--window-size={width},{height}", f"--force-device-scale-factor={SCALE}"]
    options += [f"--user-data-dir={page.parent / 'profile'}", "--no-first-run"]
    if colours == "dark":
        options.append("--blink-settings=preferredColorScheme=0")
    if os.geteuid() == 0:
        options.append("--no-sandbox")  # Chromium's sandbox refuses root
    command = [browser, *options, page.as_uri()]
    subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)


def trimmed(picture: Image.Image) -> Image.Image:
    """Without the empty rows below the page."""
    pixels = np.asarray(picture)
    filled = np.flatnonzero((pixels != pixels[-1, -1]).any(axis=(1, 2)))
    bottom = min(picture.height, int(filled[-1]) + 40) if len(filled) else picture.height
    return picture.crop((0, 0, picture.width, bottom))


if __name__ == "__main__":
    sys.exit(main())
