"""The comparison with PyTorch: `python -m bench --help`. It runs from a checkout."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "tests"))  # the tests' oracles and inputs are the bench's too
