"""Files of this user alone: other users of the machine read none of them, and put none there.

    use_private_umask    what this process and its children make from here on
    tighten              what earlier versions made for all to read
    require_own          that nobody else has put a directory in our place
    private_dir          a place that outlives a run: kernels that were compiled, Ray's logs
    read_secret          a file with a password, made by the first to ask

`engines.shared_memory` has the directories that go with their process.
"""

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from engines.durable import write_durably

UMASK = "REFRAIN_UMASK"
"""Environment variable: permissions that a run's files do not have, octal, as in 027 to let a group
of people read each other's runs."""
_KERNELS = "TORCHINDUCTOR_CACHE_DIR"
_PRIVATE = 0o077
_LOCK_S = 60.0


def use_private_umask() -> None:
    """Let this process and its children make files that this user alone may use, unless
    REFRAIN_UMASK says otherwise. Raises ValueError for one that is none."""
    os.umask(_umask())


def tighten(*paths: Path, umask: int | None = None) -> None:
    """Take the permissions that the umask does not give from files of this user that are there."""
    denied = _umask() if umask is None else umask
    for path in paths:
        with suppress(FileNotFoundError):
            found = path.stat()
            mode = stat.S_IMODE(found.st_mode)
            if found.st_uid == os.getuid() and mode & denied:
                path.chmod(mode & ~denied)


def private_path(name: str, temporary: str | None = None) -> Path:
    """Return the place of `private_dir`, which may not be there."""
    place = Path(temporary or tempfile.gettempdir()).absolute()
    return place / f"refrain-{os.getuid()}" / name


def private_dir(name: str, temporary: str | None = None) -> Path:
    """Return a directory that stays, in one that this user alone may use, in `temporary` or in the
    directory for temporary files.

    Raises RuntimeError where another user has taken that place first.
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
    """Let torch keep the kernels that it compiles, which later processes execute, where nobody else
    puts any: its own place in /tmp has a name that everybody knows. Call it before anything imports
    torch's compiler, which settles the place for all children. `make`: make the directory.

    Raises RuntimeError as `private_dir` does.
    """
    if not os.environ.get(_KERNELS):
        place = private_dir("torchinductor") if make else private_path("torchinductor")
        require_own(place)
        os.environ[_KERNELS] = str(place)


def require_own(directory: Path) -> None:
    """Raise RuntimeError where another user has made this directory, or one that it is in, in a
    place where everybody may, such as /tmp: that user could read and replace what is in it."""
    whole = directory.absolute()
    for path in (whole, *whole.parents):
        with suppress(FileNotFoundError):
            owner = path.lstat().st_uid
            if path.parent.stat().st_mode & stat.S_IWOTH and owner not in (os.getuid(), 0):
                raise RuntimeError(
                    f"{path} is user {owner}'s, who could read and replace what is kept there: "
                    "remove it, or name a directory of your own (for temporary files by TMPDIR)"
                )


def read_secret(file: Path, make: Callable[[], str]) -> str:
    """Return the text of a file of this user alone; the first to ask makes it."""
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
        raise ValueError(f"{UMASK} is {text!r}: give it as chmod does, as in 077 or 027")
    return umask
