"""What all tests share: kernels that tests compile are kept in the build folder, not in the user's own cache; and they
may be compiled as racecheck understands them."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TILEWISE_CACHE", str(Path(__file__).parent.parent / "build" / "cache"))

if os.environ.get("TILEWISE_EVERY_LANE") == "1":
    from tests.cuda import every_lane

    every_lane.install()
