"""`python -m softgap`: the same as the command `softgap`."""

from __future__ import annotations

import sys

from softgap.cli import main

sys.exit(main())
