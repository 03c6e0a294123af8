"""Settings for every test: nothing is downloaded, and Hypothesis has no deadline."""

from __future__ import annotations

import os

# Read by transformers when it is first imported, so it must be set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

from hypothesis import settings

settings.register_profile("softgap", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("softgap")
