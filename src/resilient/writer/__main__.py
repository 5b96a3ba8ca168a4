"""``python -m resilient.writer``: what a trainer starts as its writer process; of no use to people."""

from __future__ import annotations

import os
import sys

from resilient.writer.outliving import main

if __name__ == "__main__":
    # Not the interpreter's own end, which waits for the threads of a client library whose store is away.
    os._exit(main(sys.argv[1:]))
