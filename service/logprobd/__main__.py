"""`python -m logprobd` is `logprobd`."""

import sys

from logprobd.cli import main

if __name__ == "__main__":
    sys.exit(main())
