#!/usr/bin/env python3
"""Stage 4 as a script; see `--help`."""

from equiport.cli.stage4 import main

if __name__ == "__main__":
    main()
