"""`python -m benchmarks`, which is `make bench`: builds the load generator if need be, then runs `command.main`."""

import sys

from .build import CannotBuild, build

if __name__ == "__main__":
    try:
        build()
    except CannotBuild as refusal:
        sys.exit(f"benchmarks: {refusal}")
    from .command import main  # imports the extension that was just built

    sys.exit(main())
