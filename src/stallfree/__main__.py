"""`python -m stallfree` is the `stallfree` command."""

import sys

from stallfree.cli import main

if __name__ == "__main__":
    sys.exit(main())
