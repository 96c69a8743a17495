import sys
from pathlib import Path

# `chart` is shared by the tests of this folder.
sys.path.insert(0, str(Path(__file__).parent))
