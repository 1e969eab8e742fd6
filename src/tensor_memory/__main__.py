"""`python -m tensor_memory` is `tensor-memory`."""

import sys

from tensor_memory.cli import main

if __name__ == "__main__":
    sys.exit(main())
