"""Take screenshots of the pages of runs and sweeps, or of any other page, for docs/.

    python scripts/screenshots.py [RUN] [--sweep SWEEP] [--page compare-h200.html] [--out docs/images]

For a run: the first screen and the roofline at 1280 and 800 pixels, light and dark. For another page: its upper part, under the
same name. Needs Chromium on PATH.
"""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
WIDTHS = (1280, 800)
PAGE_HEIGHT = 2030
SCHEMES = ("light", "dark")
LARGEST = 300_000
"""Bytes of one picture in docs/."""


def main() -> None:
    """Command line of the script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", help="a run folder with its report.html")
    parser.add_argument("--sweep", type=Path, help="a sweep folder with its sweep.html")
    parser.add_argument("--page", type=Path, action="append", default=[], help="a page, such as compare --out wrote it")
    parser.add_argument("--height", type=int, default=PAGE_HEIGHT, help="of the picture of such a page, in pixels")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from chromium import Chromium, find_chromium

    program = find_chromium()
    if program is None:
        sys.exit("No Chromium is on PATH. On Debian: apt-get install chromium")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with Chromium(program) as browser:
        for page in arguments.page:
            browser.size(WIDTHS[0], arguments.height)
            browser.open(page)
            _keep(arguments.out / f"{page.stem}.png", browser.screenshot())
        for width in WIDTHS:
            for scheme in SCHEMES:
                browser.size(width, 1000)
                browser.scheme(scheme)
                if arguments.run:
                    browser.open(arguments.run / "report.html")
                    _keep(arguments.out / f"report-{width}-{scheme}.png", browser.screenshot())
                    roofline = browser.screenshot(browser.box("figure:has(#roofline)"))
                    _keep(arguments.out / f"roofline-{width}-{scheme}.png", roofline)
                if arguments.sweep:
                    browser.open(arguments.sweep / "sweep.html")
                    _keep(arguments.out / f"sweep-{width}-{scheme}.png", browser.screenshot())


def _keep(path: Path, data: bytes) -> None:
    if len(data) > LARGEST:
        sys.exit(f"{path} would have {len(data):,} bytes, more than {LARGEST:,}.")
    path.write_bytes(data)
    print(f"{path}  {len(data):,} bytes")


if __name__ == "__main__":
    main()
