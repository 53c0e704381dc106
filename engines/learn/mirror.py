"""Copies of a run's checkpoints in an object store, by pyarrow's file systems.

```
s3://bucket/checkpoints/NAME/global_step_12/    the files of the run's own, state.json last
```

An object store renames nothing, so what makes a copy whole is that its `state.json` is there, and
what makes it right is that the files have the sizes and the checksums that it tells.
"""

import re
from pathlib import Path, PurePosixPath

import pyarrow as pa
import pyarrow.fs

from engines.checksums import sha256_of
from engines.learn.checkpoint import (
    STATE_FILE,
    CheckpointState,
    checkpoint_name,
    newest_verified,
    parse_state,
    read_state,
    write_checkpoint,
)
from schemas.secret import SecretUrl


class Mirror:
    """The copies of one run."""

    def __init__(self, url: str, run_name: str) -> None:
        """Raises ValueError for a URL that no file system of pyarrow's knows."""
        try:
            self._files, path = pyarrow.fs.FileSystem.from_uri(url)
        except (pa.ArrowInvalid, OSError) as error:
            said = SecretUrl(url).without_credentials(f"{url} cannot be used ({error})")
            # Without the error itself, which may show a key.
            raise ValueError(
                f"trainer.checkpoint_url: {said}: give one such as s3://bucket/folder, "
                "gs://bucket/folder or file:///folder"
            ) from None
        self._root = PurePosixPath(path) / run_name

    def steps(self) -> list[int]:
        """Steps of the copies that are whole, oldest first."""
        selector = pyarrow.fs.FileSelector(str(self._root), allow_not_found=True)
        found: list[pyarrow.fs.FileInfo] = self._files.get_file_info(selector)
        names = (re.fullmatch(r"global_step_(\d+)", info.base_name) for info in found)
        return sorted(step for match in names if match and self._is_whole(step := int(match[1])))

    def put(self, checkpoint: Path, keep: int) -> None:
        """Copy a checkpoint, and remove all copies but the newest `keep`."""
        state = read_state(checkpoint)
        for name in [*state.file_bytes, STATE_FILE]:
            self._copy_out(checkpoint / name, self._path(state.step) / name)
        for step in self.steps()[:-keep]:
            # First what makes it whole.
            self._files.delete_file(str(self._path(step) / STATE_FILE))
            self._files.delete_dir(str(self._path(step)))

    def fetch(self, step: int, directory: Path) -> Path:
        """Bring a copy back among the run's own. Raises ValueError for a damaged one."""
        source = self._path(step) / STATE_FILE
        with self._files.open_input_stream(str(source)) as stream:
            state = parse_state(stream.read(), source)
        if state.step != step:
            raise ValueError(f"{source} is of step {state.step}: remove this copy")
        num_bytes = sum(state.file_bytes.values())
        return write_checkpoint(
            directory, state, lambda path: self._copy_in(state, path), num_bytes
        )

    def fetch_newer(self, directory: Path) -> Path | None:
        """Fetch the newest copy, where the run's own checkpoints are older or gone."""
        (own, _), copies = newest_verified(directory), self.steps()
        own_step = read_state(own).step if own else -1
        return self.fetch(copies[-1], directory) if copies and copies[-1] > own_step else None

    def _path(self, step: int) -> PurePosixPath:
        return self._root / checkpoint_name(step)

    def _is_whole(self, step: int) -> bool:
        return self._files.get_file_info(str(self._path(step) / STATE_FILE)).is_file

    def _copy_out(self, file: Path, target: PurePosixPath) -> None:
        self._files.create_dir(str(target.parent))
        local = pyarrow.fs.LocalFileSystem()
        pyarrow.fs.copy_files(str(file), str(target), local, self._files)

    def _copy_in(self, state: CheckpointState, directory: Path) -> None:
        local = pyarrow.fs.LocalFileSystem()
        for name, num_bytes in state.file_bytes.items():
            source, target = self._path(state.step) / name, directory / name
            target.parent.mkdir(parents=True, exist_ok=True)
            pyarrow.fs.copy_files(str(source), str(target), self._files, local)
            if target.stat().st_size != num_bytes:
                raise ValueError(
                    f"{source} has not the {num_bytes} bytes it was written with; remove this "
                    "copy, so that an earlier one is used"
                )
            if name in state.file_sha256 and sha256_of(target) != state.file_sha256[name]:
                raise ValueError(
                    f"{source} is damaged: its SHA-256 is not the one it was written with; remove "
                    "this copy, so that an earlier one is used"
                )
