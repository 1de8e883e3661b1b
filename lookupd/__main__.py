"""The command `nsqlookupd`: upstream's flags and config file."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from nsqha.cli.terminal import exits
from nsqha.options import nsqlookupd_command_line


def main() -> NoReturn:
    loaded = nsqlookupd_command_line(sys.argv[1:], os.environ)
    # Late, so that --version and --help answer before asyncio and aiohttp are loaded.
    from lookupd.daemon import serve

    exits.run(lambda: serve(loaded))


if __name__ == "__main__":
    main()
