"""What all tests share: kernels that tests compile are kept in the build folder, not in the user's own cache."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TILEWISE_CACHE", str(Path(__file__).parent.parent / "build" / "cache"))
