#!/usr/bin/env python3
"""Stage 3 as a script; see `--help`."""

from equiport.cli.stage3 import main

if __name__ == "__main__":
    main()
