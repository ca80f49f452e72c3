"""A copy of a program and its runfiles, in a directory that all nodes see.

The copy of //tutorials:x is DIRECTORY/x.KEY; KEY changes with the files. It lies there until the program
has changed and the copy has not been used for a month. A file that an older copy has is linked to that one.
"""
import hashlib
import os
import shutil
import tempfile
import time
from typing import Dict, List, Tuple

from site_file import Error

_UNUSED_SECONDS = 30 * 24 * 3600  # a batch job may wait this long for its turn


class Files:
    """Files by where they lie below the root of the runfiles."""

    def __init__(self, runfiles: str, paths: List[str]):
        self.sources = {}  # type: Dict[str, str]
        for path in paths:
            source = os.path.join(runfiles, path)
            if os.path.isdir(source):
                for folder, _, names in os.walk(source, followlinks=True):
                    for name in names:
                        file = os.path.join(folder, name)
                        self.sources[os.path.join(path, os.path.relpath(file, source))] = file
            else:
                self.sources[path] = source
        digest = hashlib.sha256()
        self.bytes = 0
        for path, source in sorted(self.sources.items()):
            try:
                info = os.stat(source)
            except OSError as error:
                raise Error("%s: %s; build the target anew" % (source, error.strerror)) from error
            self.bytes += info.st_size
            digest.update(("%s\0%d\0%d\0%o\0" % (path, info.st_size, info.st_mtime_ns, info.st_mode)).encode())
        self.key = digest.hexdigest()[:12]


def _same(a: str, b: str) -> bool:
    try:
        x, y = os.stat(a), os.stat(b)
    except OSError:
        return False
    return (x.st_size, x.st_mtime_ns, x.st_mode) == (y.st_size, y.st_mtime_ns, y.st_mode)


def _older(directory: str, name: str) -> List[Tuple[float, str]]:
    found = []
    for entry in os.scandir(directory):
        stem, dot, key = entry.name.rpartition(".")
        if dot and stem == name and len(key) == 12 and entry.is_dir():
            found.append((entry.stat().st_mtime, entry.path))
    return sorted(found, reverse=True)


def place(directory: str, name: str, files: Files) -> str:
    """Where stage() puts the copy."""
    return os.path.join(directory, "%s.%s" % (name, files.key))


def stage(directory: str, name: str, files: Files) -> str:
    """Makes the copy, if it is not there, and returns its place."""
    target = place(directory, name, files)
    try:
        os.makedirs(directory, exist_ok=True)
        if not os.path.isdir(target):
            copies = [path for _, path in _older(directory, name)]
            unfinished = tempfile.mkdtemp(prefix=".staging-", dir=directory)
            try:
                os.chmod(unfinished, 0o755)
                for path, source in files.sources.items():
                    file = os.path.join(unfinished, path)
                    os.makedirs(os.path.dirname(file), exist_ok=True)
                    twin = next((os.path.join(copy, path) for copy in copies if _same(os.path.join(copy, path), source)),
                                None)
                    if twin:
                        os.link(twin, file)
                    else:
                        shutil.copy2(source, file)
                os.rename(unfinished, target)
            except BaseException as error:
                shutil.rmtree(unfinished, ignore_errors=True)
                # Another run may have made the same copy meanwhile.
                if not (isinstance(error, OSError) and os.path.isdir(target)):
                    raise
        os.utime(target)
        for used, path in _older(directory, name):
            if used < time.time() - _UNUSED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
    except OSError as error:
        raise Error("cannot stage to %s: %s; name another directory that all nodes see: [stage] directory in the "
                    "site file" % (directory, error)) from error
    return target
