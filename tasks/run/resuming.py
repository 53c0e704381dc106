"""Check the state of a run before it is resumed.

config.json      `check_run_dir` compares the settings
checkpoints/     the run resumes from the newest verified one, and renames newer damaged ones
refrain.duckdb   read completely, so that DuckDB checks its checksums; with refrain.archive
steps.jsonl      a copy for users; if it is damaged, the run writes it again from the store
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from refrain.engines.durable import set_aside
from refrain.engines.learn.checkpoint import (
    checkpoints_dir,
    named_checkpoints,
    newest_verified,
    read_state,
)
from refrain.engines.learn.mirror import ANSWER_S, CopyTimeout, Mirror, within
from refrain.engines.store.archive import SUFFIX
from refrain.engines.store.open_database import RUN, OtherSchemaError, StoreLockedError
from refrain.engines.store.store import Store, open_read_only
from refrain.engines.tracking.progress_file import STEPS_FILE, readable_steps, write_steps
from refrain.schemas.config import TrainConfig
from refrain.schemas.resume import SettingChange
from refrain.schemas.step import StepReport
from refrain.tasks.run.crashes import read_crashes
from refrain.tasks.run.record import read_mlflow_run
from refrain.tasks.run.run_dir import STORE_FILE, hold_run_dir, read_changes, refuse_live


@dataclass(frozen=True)
class Resumption:
    """The state that a run resumes from."""

    checkpoint: Path | None = None
    """The checkpoint to resume from. None: there is none yet, or the mirror has the only copy."""
    damaged: dict[Path, str] = field(default_factory=dict)
    """Newer checkpoints that are damaged, each with its problem."""
    notes: tuple[str, ...] = ()
    """Sentences for the user about problems."""
    begun: bool = False
    """Whether the run has stored something."""


def mirror_of(config: TrainConfig) -> Mirror | None:
    """Return the mirror of the run's checkpoints, or None without one. Raise ValueError for an
    invalid URL."""
    url = config.trainer.checkpoint_url
    return Mirror(url.get_secret_value(), config.name) if url else None


def check_mirror(config: TrainConfig, resume: bool, changes: Sequence[SettingChange]) -> None:
    """Raise ValueError when a new mirror has the checkpoints of another run."""
    mirror = mirror_of(config)
    # Other keys for the same place are no move.
    moved = any(
        change.name == "trainer.checkpoint_url" and change.before != change.after
        for change in changes
    )
    if mirror is None or (resume and not moved):
        return
    if steps := _copied_steps(mirror):
        raise ValueError(
            f"trainer.checkpoint_url: {config.trainer.checkpoint_url} has step {steps[-1]} of "
            f"another run {config.name}: remove it there, or give this run another name=..."
        )


def check_resumable(config: TrainConfig, *, new_store: bool = False) -> Resumption:
    """Check everything that a resumed run reads. Change nothing.

    `new_store`: do not check the store, because it will be replaced. Raise ValueError that says
    what is missing or damaged, and how to continue.
    """
    run_dir = config.run_dir
    refuse_live(run_dir)
    read_mlflow_run(run_dir)
    read_changes(run_dir)
    read_crashes(run_dir)
    reports, wrong = readable_steps(run_dir)
    begun = _has_begun(config, reported=bool(reports or wrong))
    stored, notes = _check_store(run_dir / STORE_FILE) if begun and not new_store else (None, [])
    num_steps = max((report.step for report in (*reports, *(stored or ()))), default=0)
    checkpoint, damaged = find_checkpoint(config, num_steps)
    if checkpoint is not None and stored is not None:
        _refuse_lack(run_dir / STORE_FILE, reports, stored, read_state(checkpoint).step)
    rewritten = [f"{problem}: the run writes it again from {STORE_FILE}" for problem in wrong]
    told = [f"{path.name} is not used: {why}" for path, why in damaged.items()]
    return Resumption(checkpoint, damaged, (*told, *notes, *rewritten), begun)


def find_checkpoint(config: TrainConfig, num_steps: int) -> tuple[Path | None, dict[Path, str]]:
    """Return the checkpoint to resume from, and the problems of newer ones. None: the run has none
    yet, or only the mirror has one.

    `num_steps`: steps that the run has reported. Raise ValueError when the run has lost all
    checkpoints: otherwise it would start from the beginning.
    """
    directory = checkpoints_dir(config)
    checkpoint, damaged = newest_verified(directory)
    if checkpoint is not None:
        return checkpoint, damaged
    # A run may have been killed between the report of a step and its first checkpoint.
    changes = read_changes(config.run_dir)
    before = [int(str(c.before)) for c in changes if c.name == "trainer.save_every_steps"]
    made_some = damaged or num_steps > min([config.trainer.save_every_steps, *before])
    if made_some and not _is_elsewhere(config):
        why = "; ".join(damaged.values()) or "there is none"
        raise ValueError(
            f"{config.run_dir} has reported {num_steps} steps, but no checkpoint in {directory} "
            f"can be restored ({why}): restore one from a copy, or start again with --overwrite"
        )
    return None, damaged


def _is_elsewhere(config: TrainConfig) -> bool:
    mirror = mirror_of(config)
    return mirror is not None and bool(_copied_steps(mirror))


def _copied_steps(mirror: Mirror) -> list[int]:
    try:
        return within(mirror.steps, ANSWER_S, f"looking for copies in {mirror.place}")
    except (OSError, CopyTimeout) as error:
        raise ValueError(
            f"trainer.checkpoint_url: {mirror.place} cannot be read ({error}): check the address "
            "and the keys, or leave it out"
        ) from error


def _has_begun(config: TrainConfig, *, reported: bool) -> bool:
    """Return whether the run has files that need a store: reports, checkpoints or an archive."""
    archive = (config.run_dir / STORE_FILE).with_suffix(SUFFIX)
    return reported or bool(named_checkpoints(checkpoints_dir(config))) or archive.exists()


def _check_store(path: Path) -> tuple[list[StepReport] | None, list[str]]:
    """Return the step reports in the store, and sentences about problems.

    The reports are None when the store's process of a killed driver still has the file open. The
    run stops this process when it begins. Raise ValueError when the store is missing or damaged.
    """
    if not path.exists():
        raise RUN.damaged(path, "is gone, with the rollouts and rewards of the steps so far")
    try:
        with open_read_only(path) as store:
            notes = store.verify()
            return store.steps(), notes
    except StoreLockedError:
        return None, []


def _refuse_lack(
    path: Path, reports: list[StepReport], stored: list[StepReport], last_step: int
) -> None:
    """Raise ValueError when the store lacks a reported step up to the checkpoint's. It may lack
    later ones, because a resumed run removes and repeats them."""
    known = {report.step for report in stored}
    lost = [one.step for one in reports if one.step <= last_step and one.step not in known]
    if lost:
        raise RUN.damaged(
            path,
            f"lacks step {lost[0]}, which {STEPS_FILE} has: it is an older copy, or has lost "
            f"{path.name}.wal",
        )


def take_up(config: TrainConfig, found: Resumption) -> None:
    """Rename damaged checkpoints, and write `steps.jsonl` again if it is damaged or incomplete. The
    caller must hold the run's lock."""
    for checkpoint in found.damaged:
        set_aside(checkpoint)
    if not found.begun:
        return
    with open_read_only(config.run_dir / STORE_FILE) as store:
        stored = store.steps()
    reports, wrong = readable_steps(config.run_dir)
    by_step = {report.step: report for report in (*reports, *stored)}
    merged = [by_step[step] for step in sorted(by_step)]
    if wrong:
        set_aside(config.run_dir / STEPS_FILE)
    if wrong or merged != reports:
        write_steps(config.run_dir, merged)


def renew_store(run_dir: Path) -> list[Path]:
    """Give a run a usable store: an older copy in its place, or else an empty one. Add the step
    reports that it lacks.

    Return the new paths of a damaged store's files. Raise ValueError when a process uses the store,
    or another version of refrain wrote it.
    """
    store = run_dir / STORE_FILE
    lock = hold_run_dir(run_dir)
    try:
        moved = [] if _is_whole(store) else _set_store_aside(store)
        reports, _ = readable_steps(run_dir)
        with Store(store) as made:
            known = {report.step for report in made.steps()}
            for report in reports:
                if report.step not in known:
                    made.add_step(report)
    finally:
        lock.release()
    return moved


def _is_whole(store: Path) -> bool:
    try:
        with open_read_only(store) as opened:
            opened.verify()
    except (StoreLockedError, OtherSchemaError):
        raise
    except ValueError:
        return False
    return True


def _set_store_aside(store: Path) -> list[Path]:
    parts = (store, store.with_name(f"{store.name}.wal"), store.with_suffix(SUFFIX))
    return [set_aside(part) for part in parts if part.exists()]
