"""The command line: each command parses its options, calls one function and renders what came back."""

from softgap.cli.main import main

__all__ = ["main"]
