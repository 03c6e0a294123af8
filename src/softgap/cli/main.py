"""Runs a command: turns its outcome into an exit code and, on failure, into one sentence."""

from __future__ import annotations

import errno
import io
import logging
import os
import shlex
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import typer

from softgap.errors import NonFiniteWarning, SoftgapError
from softgap.progress import in_command

__all__ = ["main"]


_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)


_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)


_FILES = (errno.EMFILE, errno.ENFILE)


_DISK = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE)


_REMEDIES = {
    **dict.fromkeys(_SPACE, "free some space or choose another disk"),
    **dict.fromkeys(_PATHS, "check the path"),
    **dict.fromkeys(_RIGHTS, "choose a path that you may write to"),
    **dict.fromkeys(_FILES, "raise the limit on open files with ulimit -n"),
    **dict.fromkeys(_DISK, "check the disk"),
}


# Messages of torch when an allocation fails: it does not raise MemoryError.
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory")


def system_error_sentence(error: Exception) -> str | None:
    """One sentence with a remedy for an error of the system; None for any other error."""
    if isinstance(error, MemoryError) or any(mark in str(error) for mark in _NO_MEMORY):
        return f"not enough memory ({_first_line(error)}); reduce the size of the request, or use a larger machine"
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return f"the home folder is unknown ({_first_line(error)}); set HOME, or give absolute paths"
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        where = f"'{os.fsdecode(error.filename)}'" if error.filename else "standard output"
        return f"the system refused {where}: {os.strerror(error.errno)}; {_REMEDIES[error.errno]}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def reopen_streams() -> None:
    """Open closed output streams, and escape characters that their encoding cannot represent."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            # This also occupies the free descriptor, which the next opened file would otherwise take.
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123  open as long as we run
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def abandon_output() -> None:
    """Discard remaining output: the interpreter flushes once more at exit, and that must not raise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_LONGEST_COMMAND_LINE = 120


_LONGEST_WORD = 300


# Set by the shell while it asks for completions.
_COMPLETING = "_SOFTGAP_COMPLETE"


_GREETING = """\
softgap measures the gap between softmax and linear attention, per head and per token. Three things to try:

  softgap calibrate --quick                                    which heads of the embedded model need softmax (a minute)
  softgap run "Tell me a story about a fox." --out runs/fox    measure every head while the model answers
  softgap report runs/fox                                      explore every head and token in a browser

Is everything installed: softgap doctor. All commands: softgap --help
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one softgap command and return its exit code."""
    command_line = sys.argv[1:] if arguments is None else list(arguments)
    reopen_streams()
    # transformers imports torchao where it is installed, which then tells of kernels for other machines.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    signals: list[int] = []

    def terminated(number: int, _: object) -> None:
        # Clean up as after Ctrl-C: a scheduler asks before it kills.
        signals.append(number)
        raise KeyboardInterrupt

    before = _on_terminate(terminated)
    try:
        code = _outcome(command_line)
    finally:
        _on_terminate(before)
    return 128 + signals[0] if signals and code == 130 else code


def _on_terminate(handler: Any) -> Any:
    """Set the handler of SIGTERM and return the previous one; only the main thread may."""
    if threading.current_thread() is not threading.main_thread() or handler is None:
        return None
    return signal.signal(signal.SIGTERM, handler)


def _outcome(command_line: list[str]) -> int:
    try:
        code = _run(command_line) if command_line or _COMPLETING in os.environ else _greet()
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_output()
        return 141
    except SystemExit as leave:
        # A rich console exits this way when its pipe is closed.
        if isinstance(leave.__context__, BrokenPipeError):
            abandon_output()
            return 141
        raise
    except (KeyboardInterrupt, typer.Abort) as stop:
        return _fail(130, str(stop) or "interrupted")
    except typer.TyperException as error:
        return _fail(2, _usage_sentence(error, command_line))
    except SoftgapError as error:
        return _fail(2, str(error))
    except Exception as error:
        outside = system_error_sentence(error)
        if outside is not None:
            return _fail_by_system(outside)
        remedy = "this is a bug in softgap; rerun with SOFTGAP_DEBUG=1 for the traceback"
        return _fail(70, f"{type(error).__name__}: {error}; {remedy}")
    return code


def _greet() -> int:
    sys.stdout.write(_GREETING)
    return 0


def _run(arguments: list[str]) -> int:
    # Not app(): it turns interrupts and closed pipes into exit codes before they can be told apart here.
    from softgap.cli.app import app

    command = typer.main.get_command(app)
    if _COMPLETING in os.environ:
        command(prog_name="softgap")
    try:
        with (
            warnings.catch_warnings(),
            in_command(announce=_takes_model(command, arguments)),
            command.make_context("softgap", list(arguments)) as context,
        ):
            # Commands say it themselves, in their first sentence.
            warnings.simplefilter("ignore", NonFiniteWarning)
            result = command.invoke(context)
    except typer.Exit as leave:
        return leave.exit_code
    return result if isinstance(result, int) else 0


def _takes_model(command: Any, arguments: Sequence[str]) -> bool:
    """Whether the command that these arguments name may load a model."""
    for word in arguments:
        if word not in getattr(command, "commands", {}):
            break
        command = command.commands[word]
    return any(parameter.name == "model" for parameter in command.params)


def _fail_by_system(sentence: str) -> int:
    code = _fail(2, sentence)
    try:
        sys.stdout.flush()
    except OSError:
        abandon_output()
    return code


def _fail(code: int, message: str) -> int:
    if os.environ.get("SOFTGAP_DEBUG"):
        traceback.print_exc()
    sys.stderr.write(f"softgap: {' '.join(map(_shorten, message.split()))}\n")
    return code


def _shorten(word: str) -> str:
    """A word short enough for a sentence: a path of thousands of characters is cut in the middle."""
    return word if len(word) <= _LONGEST_WORD else f"{word[: _LONGEST_WORD // 2]}…{word[-_LONGEST_WORD // 4 :]}"


def _usage_sentence(error: typer.TyperException, command_line: list[str]) -> str:
    """The parser's message as one sentence: what is allowed, what was given, and where the help is."""
    message = error.format_message().rstrip(".").replace("Value error, ", "")
    context = getattr(error, "ctx", None)
    commands = getattr(context.command, "commands", {}) if context else {}
    allowed = f"; the commands are: {', '.join(sorted(commands))}" if "command" in message else ""
    help_command = f"{context.command_path if context else 'softgap'} --help"
    # A prompt can be long.
    line = textwrap.shorten(shlex.join(command_line), _LONGEST_COMMAND_LINE, placeholder=" …")
    return f"{message[:1].lower()}{message[1:]}{allowed}; given 'softgap {line}', see '{help_command}'"
