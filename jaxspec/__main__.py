"""`python -m jaxspec`: the command line."""

import sys

from jaxspec.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
