import sys

from tensor_memory.bench import main

sys.exit(main(sys.argv[1:]))
