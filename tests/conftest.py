"""Settings for every test: nothing is downloaded, no calibration is at hand, and Hypothesis has no deadline."""

from __future__ import annotations

import os
import tempfile

# Read by transformers when it is first imported, so it must be set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"
# A calibration that the user has made would join the defaults of every command.
os.environ["SOFTGAP_CALIBRATIONS"] = tempfile.mkdtemp(prefix="softgap-no-calibrations-")

from hypothesis import settings

settings.register_profile("softgap", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("softgap")
