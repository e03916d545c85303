"""`python -m etrace_bridge`."""

from __future__ import annotations

import sys

from etrace_bridge.cli import main

if __name__ == "__main__":
    sys.exit(main())
