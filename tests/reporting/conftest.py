"""Lets tests of this folder share records and a browser."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
