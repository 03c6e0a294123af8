"""The live explorer: a local web server on which a model writes while its heads are watched."""

from softgap.report.live.requests import Limits
from softgap.report.live.server import serve

__all__ = ["Limits", "serve"]
