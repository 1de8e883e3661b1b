"""`python -m tests.jepsen.report HISTORY [--out FOLDER]`: a kept history judged again, as a page."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.jepsen import history
from tests.jepsen.report.page import RunReport


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("history", type=Path)
    parser.add_argument("--out", type=Path, help="folder (default: that of the history)")
    args = parser.parse_args()
    report = RunReport(history.read(args.history))
    print(report.judged)
    print(report.write(args.out or args.history.parent))
    return 0 if report.judged.ok else 1


if __name__ == "__main__":
    sys.exit(main())
