"""The checkpoints of a run, on the driver's side: begun, committed, found again, and thinned out.

    checkpoints/
      latest                          one line: the folder that was written last; for people and scripts
      global_step_20/
        manifest.json                 every file with its size and SHA-256, written last
        state.json                    the driver's state
        actor/  critic/  …            the state of each learning role, see `shards.py`
        huggingface/                  the policy, for anything that loads Hugging Face folders
      .global_step_30.tmp-1f0c…/      being written, or left by a process that died

A folder becomes `global_step_N` by one rename, after all of it is on disk. Nothing is ever changed inside one, and none
is deleted before a newer one is complete, so at every moment the last checkpoint or the one before can be loaded.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from quadriga.atomic_file import write_atomically
from quadriga.checkpoint.checkpoint import Checkpoint, Draft
from quadriga.checkpoint.disk import (
    is_abandoned,
    lock_folder,
    readable_disk_errors,
    require_room,
    sync,
    sync_tree,
)
from quadriga.checkpoint.manifest import MANIFEST, NewerFormat, encode, make_manifest
from quadriga.errors import CheckpointError

_LOG = logging.getLogger(__name__)
LATEST = "latest"
VERLS_SHARDS = "model_world_size_*_rank_*.pt"
_NAME = re.compile(r"global_step_(\d+)")
_DRAFT, _REPLACED, _REMOVED = "tmp", "replaced", "removed"
_TEMPORARY = re.compile(rf"\.global_step_(\d+)\.({_DRAFT}|{_REPLACED}|{_REMOVED})-[0-9a-f]+")


class CheckpointStore:
    """The folder `checkpoints/` of one run. One process writes to it at a time; any number may read.

    Args:
        folder: made when the first checkpoint is written.
        keep: so many of the newest checkpoints stay, those of earlier processes counted too; None: all.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise CheckpointError(f"keep={keep} would leave no checkpoint", "keep at least 1, or None for all")
        self.folder = Path(folder).expanduser().absolute()
        self.keep = keep
        self.has_written = False
        """Whether a checkpoint was committed through this object."""

    # ---- writing ----

    @contextmanager
    def writing(self, step: int, need_bytes: int | None = None) -> Iterator[Draft]:
        """The checkpoint of `step`. When the block ends well it is committed; when it raises, nothing is left of it.

        Args:
            need_bytes: what it will take on disk; None: as much as the last one.

        Raises:
            CheckpointError: no room, a full or read-only disk, something missing from the draft. Older checkpoints
                are as they were.
        """
        draft = self.begin(step, need_bytes)
        try:
            with readable_disk_errors("write a checkpoint into", self.folder):
                yield draft
        except BaseException:
            draft.discard()
            raise
        self.commit(draft)

    def begin(self, step: int, need_bytes: int | None = None) -> Draft:
        """The first half of `writing`; `commit` or `Draft.discard` is the second."""
        with readable_disk_errors("write a checkpoint into", self.folder):
            self._make_folder()
            self.recover()
            require_room(self.folder, self._expected_bytes() if need_bytes is None else need_bytes)
            path = self._temporary(step, _DRAFT)
            path.mkdir()
            return Draft(path, step, lock_folder(path))

    def commit(self, draft: Draft) -> None:
        """Make the draft a checkpoint, or nothing."""
        try:
            with readable_disk_errors("write a checkpoint into", self.folder):
                draft.require_complete()
                self._commit(draft)
        except BaseException:
            draft.discard()
            raise
        draft.close()
        self.has_written = True
        self._thin_out()

    def _commit(self, draft: Draft) -> None:
        """Order matters: data on disk, manifest on disk, rename on disk, `latest`."""
        sync_tree(draft.path)
        serial = 1 + max((c.manifest.serial for c in self.checkpoints()), default=0)
        write_atomically(draft.path / MANIFEST, encode(make_manifest(draft.path, draft.step, serial)))
        final = self.folder / f"global_step_{draft.step}"
        with self._name_freed(final):
            os.rename(draft.path, final)
            sync(self.folder)
        self._move_latest()

    @contextmanager
    def _name_freed(self, final: Path) -> Iterator[None]:
        """Move what has the name `final` away: a checkpoint until the new one has the name, anything else for good."""
        if not final.exists():
            yield
            return
        lock = lock_folder(final)
        try:
            Checkpoint(final).verify()
            away = self._temporary(int(final.name.rpartition("_")[2]), _REPLACED)
        except CheckpointError as error:
            away = final.with_name(f"{final.name}.unusable-{secrets.token_hex(4)}")
            _LOG.warning("%s; it is now %s, because its step is written anew", error.what, away.name)
        try:
            os.rename(final, away)
            yield
            if _TEMPORARY.fullmatch(away.name):
                shutil.rmtree(away, ignore_errors=True)
        except BaseException:
            if not final.exists() and away.exists():
                os.rename(away, final)
            raise
        finally:
            os.close(lock)

    def _move_latest(self) -> None:
        newest = self.checkpoints()[0]
        write_atomically(self.folder / LATEST, f"{newest.path.name}\n".encode())

    def _thin_out(self) -> None:
        if self.keep is None:
            return
        for old in self.checkpoints()[self.keep :]:
            gone = self._temporary(old.step, _REMOVED)  # renamed first: a half-deleted checkpoint has no proper name
            try:
                os.rename(old.path, gone)
                shutil.rmtree(gone)
            except OSError as error:
                _LOG.warning("the old checkpoint %s cannot be deleted: %s", old.path, error)

    def _make_folder(self) -> None:
        if not self.folder.is_dir():
            self.folder.mkdir(parents=True, exist_ok=True)
            sync(self.folder.parent)
        for unfinished in self.folder.glob(f".{LATEST}.*.tmp"):
            unfinished.unlink(missing_ok=True)

    def _expected_bytes(self) -> int:
        return max((c.manifest.total_bytes for c in self.checkpoints()[:1]), default=0)

    def _temporary(self, step: int, kind: str) -> Path:
        return self.folder / f".global_step_{step}.{kind}-{secrets.token_hex(8)}"

    # ---- reading ----

    def find(
        self, resume_mode: str = "auto", resume_from_path: str | os.PathLike[str] | None = None
    ) -> Checkpoint | None:
        """The checkpoint to resume from, every byte of it verified; None: start anew.

        Args:
            resume_mode: `auto`: the newest good one here; `disable`: none; `resume_path`: the one at `resume_from_path`.
            resume_from_path: a checkpoint folder, or a run directory or its `checkpoints/` (then the newest in it).

        Raises:
            CheckpointError: the one asked for cannot be used; or there are checkpoints here, and not one can be used;
                or the newest needs a later version of Quadriga; or verl has left checkpoints in this run directory.
        """
        if resume_mode == "disable":
            return None
        if resume_mode == "resume_path":
            if resume_from_path is None:
                raise CheckpointError("trainer.resume_from_path is not set", "give a checkpoint folder")
            return locate(resume_from_path)
        if resume_mode != "auto":
            raise CheckpointError(f"unknown resume_mode {resume_mode!r}", "use auto, disable or resume_path")
        try:
            self.recover()
        except OSError as error:
            _LOG.warning("what a dead process left in %s cannot be tidied up: %s", self.folder, error)
        newest = _newest_good(self.folder)
        if newest is None and (verls := _newest_of_verl(self.folder.parent)) is not None:
            refusal = _not_ours(verls)
            raise CheckpointError(refusal.what, f"{refusal.fix}; trainer.resume_mode=disable begins anew beside it")
        return newest

    def checkpoints(self) -> list[Checkpoint]:
        """Those with a readable manifest, the newest first. Their other files are not looked at."""
        return [checkpoint for checkpoint, _ in _sorted_folders(self.folder) if checkpoint is not None]

    def recover(self) -> None:
        """Finish or undo what a dead process left half-done; delete its drafts; let `latest` name the newest."""
        if not self.folder.is_dir():
            return
        left: dict[str, list[Path]] = {_DRAFT: [], _REPLACED: [], _REMOVED: []}
        for path in self.folder.iterdir():
            if (match := _TEMPORARY.fullmatch(path.name)) and is_abandoned(path):
                left[match[2]].append(path)
        for path in left[_DRAFT] + left[_REPLACED]:  # drafts first: a complete one is newer than what it replaces
            self._restore(path)
        for path in (p for paths in left.values() for p in paths if p.exists()):
            shutil.rmtree(path, ignore_errors=True)
        newest, latest = self.checkpoints()[:1], self.folder / LATEST
        self.refuse_folder_called_latest()
        if newest and (
            not latest.exists() or latest.read_text(encoding="utf-8", errors="replace").strip() != newest[0].path.name
        ):
            self._move_latest()  # it died between the two renames

    def refuse_folder_called_latest(self) -> None:
        """CheckpointError where a folder stands in the way of the file that names the newest checkpoint."""
        latest = self.folder / LATEST
        if latest.is_dir():
            raise CheckpointError(
                f"{latest} is a folder, where a file names the newest checkpoint",
                f"move it away: mv {latest} {latest}.old",
            )

    def _restore(self, path: Path) -> None:
        """Give a complete checkpoint its name, if the process died when the name was free."""
        with suppress(CheckpointError):
            checkpoint = Checkpoint(path)
            final = self.folder / f"global_step_{checkpoint.step}"
            if not final.exists():
                checkpoint.verify()
                os.rename(path, final)
                sync(self.folder)
                self._move_latest()
                _LOG.warning("%s was complete but not in place when its process died; it is now", final)


def locate(path: str | os.PathLike[str]) -> Checkpoint:
    """The verified checkpoint at `path`: a checkpoint folder, or the newest good one of a run directory or `checkpoints/`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    folder = Path(path).expanduser().absolute()
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}", "give a checkpoint folder or a run directory")
    if not (folder / MANIFEST).exists():
        if _is_verls(folder):
            raise _not_ours(folder)
        for inner in (folder, folder / "checkpoints"):
            if (newest := _newest_good(inner)) is not None:
                return newest
    checkpoint = Checkpoint(folder)
    checkpoint.verify()
    return checkpoint


def _not_ours(folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{folder} is a checkpoint of verl's, in pickled files of its own",
        f"write its policy as a Hugging Face folder with `quadriga export {folder} --output my_model`, and start from that",
    )


def _is_verls(folder: Path) -> bool:
    return any(any(where.glob(VERLS_SHARDS)) for where in (folder, folder / "actor"))


def _newest_of_verl(run: Path) -> Path | None:
    """The last step's folder that verl has left in a run directory, where it has no folder `checkpoints`."""
    steps = {int(match[1]): path for path in run.glob("global_step_*") if (match := _NAME.fullmatch(path.name))}
    return next((steps[step] for step in sorted(steps, reverse=True) if _is_verls(steps[step])), None)


def _newest_good(folder: Path) -> Checkpoint | None:
    """The newest checkpoint in `folder` that can be used; those before it are named in a warning. None: there are none.

    Raises:
        CheckpointError: there are some, and none can be used: to start anew would be to lose the run unasked.
    """
    problems: list[str] = []
    for checkpoint, error in _sorted_folders(folder):
        if isinstance(error, NewerFormat):
            raise error
        try:
            if checkpoint is not None:
                checkpoint.verify()
                return checkpoint
        except CheckpointError as found:
            error = found
        if error is not None:
            problems.append(error.what)
            _LOG.warning("passed over: %s", error.what)
    if problems:
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be used: {'; '.join(problems)}",
            "restore one from a copy, or start anew with trainer.resume_mode=disable",
        )
    return None


def _sorted_folders(folder: Path) -> list[tuple[Checkpoint | None, CheckpointError | None]]:
    """Every `global_step_N` in `folder`: those whose manifest cannot be read first, the others from the newest on."""
    folders: list[tuple[Checkpoint | None, CheckpointError | None]] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if _NAME.fullmatch(path.name) and path.is_dir():
            try:
                folders.append((Checkpoint(path), None))
            except CheckpointError as error:
                folders.append((None, error))
    return sorted(folders, key=lambda pair: -pair[0].manifest.serial if pair[0] is not None else -float("inf"))
