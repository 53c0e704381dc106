"""Profile files: found by name, and refused if unfit for the purpose."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from refrain.engines.user_files import first_problem, read_text
from refrain.schemas.latency import PointKind, Profile
from refrain.schemas.profile import PROFILE_FILE, PROFILES_DIR


def model_hash(model: Path) -> str:
    """Return a hash of the configuration in a Hugging Face directory. A profile fits one
    configuration."""
    return hashlib.blake2b((model / "config.json").read_bytes(), digest_size=8).hexdigest()


def find_profile(name: str, runs_dir: Path) -> Path:
    """Return a profile's file, given its path, its directory or its name. Raise ValueError if there
    is none."""
    for path in (Path(name), runs_dir / PROFILES_DIR / name):
        if path.is_file():
            return path
        if (path / PROFILE_FILE).is_file():
            return path / PROFILE_FILE
    raise ValueError(
        f"no profile at {name}: give a {PROFILE_FILE}, a directory that holds one, or its name "
        f"under {runs_dir / PROFILES_DIR}"
    )


def read_profile(path: Path) -> Profile:
    """Return the profile in a file. Raise ValueError if the file is not a profile, or has no
    points."""
    try:
        profile = Profile.model_validate_json(read_text(path))
    except ValidationError as error:
        raise ValueError(f"{path} is not a profile: {first_problem(error)}") from error
    if not profile.points:
        raise ValueError(f"{path} is empty: a profile has decode and prefill points")
    return profile


def require_points(
    profile: Profile,
    path: Path,
    tp_degrees: Sequence[int],
    kinds: Sequence[PointKind],
    advice: str,
    drafters: Sequence[str] = (),
) -> None:
    """Raise ValueError that names all points that the profile lacks.

    `kinds`: kinds of points that every TP degree needs.
    `advice`: how to fix the profile, for the message.
    `drafters`: drafters that need draft points.
    """
    missing = []
    for kind in kinds:
        known = sorted({point.tp_degree for point in profile.of_kind(kind)})
        missing += [
            f"no {kind} points at TP {tp_degree}, only at TP {', '.join(map(str, known)) or 'none'}"
            for tp_degree in tp_degrees
            if tp_degree not in known
        ]
    timed = {point.drafter for point in profile.of_kind(PointKind.DRAFT)}
    missing += [f"no draft points of {name}" for name in drafters if name not in timed]
    if missing:
        raise ValueError(f"{path} has {'; '.join(missing)}: {advice}")
