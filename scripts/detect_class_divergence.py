#!/usr/bin/env python3
"""List where a port picks another class on the CPU than on the device; see `--help`."""

from equiport.cli.class_divergence import main

if __name__ == "__main__":
    main()
