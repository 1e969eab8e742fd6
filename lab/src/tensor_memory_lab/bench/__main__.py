import sys

from tensor_memory_lab.bench import main

sys.exit(main(sys.argv[1:]))
