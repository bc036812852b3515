"""PNG files of the SVG images of a run, drawn by Chromium if it is installed."""

import os
import re
import shutil
import tempfile
from pathlib import Path

from llm_perf_opt.core.processes import ask
from llm_perf_opt.core.records import Maybe, Missing
from llm_perf_opt.core.run_folder import RunFolder

CHROMIUM_VARIABLE = "LLM_PERF_CHROMIUM"
"""Environment variable: the browser to draw with, or `none`."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 120.0
_SIZE = re.compile(r'width="(\d+)" height="(\d+)"')


def draw_images(folder: RunFolder) -> Maybe[list[Path]]:
    """Write a PNG for each SVG image of the run; return the files, or why there are none."""
    wanted = [path for path in (folder.waterfall_file, folder.roofline_file) if path.exists()]
    if not wanted:
        return Missing("the run has no image")
    program = find_chromium()
    if isinstance(program, Missing):
        return program
    made = []
    for image in wanted:
        data = _draw(program, image)
        if isinstance(data, Missing):
            return data
        folder.write(image.with_suffix(".png"), data)
        made.append(image.with_suffix(".png"))
    return made


def find_chromium() -> Maybe[str]:
    """Return the browser named in the environment, or else the first one on PATH."""
    named = os.environ.get(CHROMIUM_VARIABLE, "")
    if named.lower() == "none":
        return Missing(f"{CHROMIUM_VARIABLE}=none")
    found = shutil.which(named) if named else next((path for name in _NAMES if (path := shutil.which(name))), None)
    if found:
        return found
    return Missing(f"{CHROMIUM_VARIABLE}={named} is not a program" if named else "no Chromium on PATH")


def _draw(program: str, image: Path) -> Maybe[bytes]:
    size = _SIZE.search(image.read_text(encoding="utf-8"))
    if size is None:
        return Missing(f"{image.name} has no size")
    with tempfile.TemporaryDirectory(prefix="llm-perf-image-") as scratch:
        out = Path(scratch) / "image.png"
        argv = [
            program, "--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-background-networking",
            f"--user-data-dir={scratch}/profile", f"--screenshot={out}", f"--window-size={size[1]},{size[2]}",
        ]  # fmt: skip
        if os.geteuid() == 0:
            argv += ["--no-sandbox", "--disable-dev-shm-usage"]  # required as root
        ask([*argv, image.resolve().as_uri()], timeout_s=_TIMEOUT_S, whatever_code=True)
        data = out.read_bytes() if out.exists() else b""
    return data if data.startswith(b"\x89PNG") else Missing(f"{program} could not draw {image.name}")
