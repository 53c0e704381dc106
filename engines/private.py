"""Private files: other users of the machine can neither read them nor plant their own.

    use_private_umask    make files private that this process and its children create from now on
    tighten              make existing files private
    require_own          check that no other user has created a directory in our place
    private_dir          private directory that outlives a run: compiled kernels, Ray's logs
    read_secret          file with a password, created by the first reader

For directories that go away with their process, see `engines.shared_memory`.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from refrain.engines.durable import write_durably

UMASK = "REFRAIN_UMASK"
"""Environment variable: umask of a run's files, octal.

For example, 027 lets the users of a group read each other's runs.
"""
_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
_PRIVATE = 0o077
_LOCK_S = 60.0


def use_private_umask() -> None:
    """Let this process and its children create private files, unless REFRAIN_UMASK is set.

    Raise ValueError if REFRAIN_UMASK is not a valid umask.
    """
    os.umask(_umask())


def tighten(*paths: Path, umask: int | None = None) -> None:
    """Remove permissions that the umask denies from existing files of this user."""
    denied = _umask() if umask is None else umask
    for path in paths:
        with suppress(FileNotFoundError):
            found = path.stat()
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid == os.getuid() and mode & denied:
                path.chmod(mode & ~denied)


def private_path(name: str, temporary: str | None = None) -> Path:
    """Return the path of `private_dir`, which may not exist yet."""
    place = Path(temporary or tempfile.gettempdir()).absolute()
    return place / f"refrain-{os.getuid()}" / name


def private_dir(name: str, temporary: str | None = None) -> Path:
    """Create a private directory that outlives the run, if needed, and return its path.

    It is below `temporary`, by default the system's directory for temporary files. Raise
    RuntimeError if another user has created a directory there first.
    """
    directory = private_path(name, temporary)
    require_own(directory)
    with suppress(FileExistsError):
        directory.parent.mkdir(0o700)
    require_own(directory)
    tighten(directory.parent, umask=_PRIVATE)
    directory.mkdir(0o700, exist_ok=True)
    return directory


def use_private_kernels(*, make: bool = True) -> None:
    """Let torch keep its compiled kernels in a private directory.

    Later processes execute these kernels. torch's default is a well-known name in /tmp, where
    another user could plant files. Call this before anything imports torch's compiler: the setting
    then holds for all child processes. `make`: create the directory.

    Raise RuntimeError as `private_dir` does.
    """
    if not os.environ.get(_KERNELS):
        place = private_dir("torchinductor") if make else private_path("torchinductor")
        require_own(place)
        os.environ[_KERNELS] = str(place)


def require_own(directory: Path) -> None:
    """Raise RuntimeError if another user owns this directory or one above it in a public place.

    In a public place such as /tmp everybody can create directories. The owner could read and
    replace our files.
    """
    whole = directory.absolute()
    for path in (whole, *whole.parents):
        with suppress(FileNotFoundError):
            owner = path.lstat().st_uid
            if path.parent.stat().st_mode & stat.S_IWOTH and owner not in (os.getuid(), 0):
                raise RuntimeError(
                    f"{path} belongs to user {owner}, who could read and replace files there: "
                    "remove it, or use a directory of your own (set TMPDIR for temporary files)"
                )


def read_secret(file: Path, make: Callable[[], str]) -> str:
    """Return the text of a private file. If the file is missing, create it with `make`."""
    with FileLock(f"{file}.lock", timeout=_LOCK_S):
        if not file.exists():
            write_durably(file, make(), 0o600)
    tighten(file, umask=_PRIVATE)
    return file.read_text(errors="replace").strip()


def _umask() -> int:
    text = os.environ.get(UMASK) or f"{_PRIVATE:o}"
    try:
        umask = int(text, 8)
    except ValueError:
        umask = -1
    if not 0 <= umask <= 0o077:
        raise ValueError(f"{UMASK} is {text!r}: give an octal umask, for example 077 or 027")
    return umask
