"""Sentences for what goes wrong outside of softgap: the system refuses, or there is not enough memory."""

from __future__ import annotations

import errno
import os

__all__ = ["outside_sentence"]

_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL)
_RIGHTS = (errno.EACCES, errno.EPERM, errno.EROFS)
_FILES = (errno.EMFILE, errno.ENFILE)
_DISK = (errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE)
_REMEDIES = {
    **dict.fromkeys(_SPACE, "free some space or choose another disk"),
    **dict.fromkeys(_PATHS, "check the path"),
    **dict.fromkeys(_RIGHTS, "choose a place you may use"),
    **dict.fromkeys(_FILES, "raise the limit of open files with ulimit -n"),
    **dict.fromkeys(_DISK, "check the disk"),
}
# What torch says when an allocation fails, which is no MemoryError there.
_NO_MEMORY = ("DefaultCPUAllocator", "out of memory")


def outside_sentence(error: Exception) -> str | None:
    """One sentence with a remedy; None for an error that is softgap's own."""
    if isinstance(error, MemoryError) or any(mark in str(error) for mark in _NO_MEMORY):
        return f"there is not enough memory for this ({_said(error)}); ask for less, or use a larger machine"
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return f"the home folder is not known ({_said(error)}); set HOME, or write paths in full"
    if isinstance(error, OSError) and error.errno in _REMEDIES:
        where = f"'{os.fsdecode(error.filename)}'" if error.filename else "standard output"
        return f"the system refused {where}: {os.strerror(error.errno)}; {_REMEDIES[error.errno]}"
    return None


def _said(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
