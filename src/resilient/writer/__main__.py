"""``python -m resilient.writer``: what a trainer starts as its writer process; of no use to people."""

from __future__ import annotations

import sys

from resilient.writer.outliving import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
