"""``python begun.py BEGUN SCRIPT ...`` notes when it began as which rank, then is SCRIPT.

Imports nothing that SCRIPT does not: what it measures is the start of a rank.
"""

import os
import runpy
import sys
import time
from pathlib import Path

begun, script = sys.argv[1:3]
path = Path(f"{begun}-{os.environ['RANK']}")
path.with_suffix(".new").write_text(f"{os.getpid()} {time.time()}")
path.with_suffix(".new").rename(path)
sys.argv = sys.argv[2:]
sys.path[0] = str(Path(script).parent)
runpy.run_path(script, run_name="__main__")
