#!/usr/bin/env python3
"""Stage 5 as a script; see `--help`."""

from equiport.cli.stage5 import main

if __name__ == "__main__":
    main()
