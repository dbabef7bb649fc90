"""The same as ``headrace doctor --gpu``: check and measure the GPU path on this machine's card.

python benchmarks/gpu_check.py --json gpu.json
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from headrace.gpu_check.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
