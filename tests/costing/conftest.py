"""Lets tests of this folder share what they draw by hand."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
