"""The examples run, and check themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_flash_attention() -> None:
    command = [sys.executable, "-W", "ignore", "examples/flash_attention.py", "--lengths", "64"]
    done = subprocess.run(command, cwd=ROOT, env=None, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("✓") == 5
    assert "✗" not in done.stdout
    assert "Sequence Length: 64\nStandard Attention: " in done.stdout
