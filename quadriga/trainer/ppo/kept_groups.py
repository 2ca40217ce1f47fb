"""Groups on disk: what a run generated, for another run to train on, or for the same step to be done again alone."""

from __future__ import annotations

from pathlib import Path

from quadriga.checkpoint.disk import readable_disk_errors
from quadriga.data.files import expand_path
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.trainer.ppo.groups import Group, as_table, from_table


class KeptGroups:
    """A folder with a file for every time that a step took groups: `step_00000012_0.dataproto`.

    Args:
        make: make the folder if it is not there.
    """

    def __init__(self, folder: str, make: bool) -> None:
        self._folder = expand_path(folder)
        self._taken: dict[int, int] = {}
        if make:
            with readable_disk_errors("make", self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
        elif not self._folder.is_dir():
            raise DataError(
                f"episodes.read_from={folder} is no folder", "give the folder that a run wrote with episodes.write_to"
            )

    def write(self, step: int, epoch: int, groups: list[Group]) -> None:
        """Keep the groups that a step has taken; complete ones only."""
        file = self._next_file(step)
        with readable_disk_errors("write", file):
            as_table(step, epoch, groups).save_to_disk(file)

    def read(self, step: int) -> tuple[list[Group], int]:
        """The groups that this step took next, and their epoch. DataError if it took no more."""
        file = self._next_file(step)
        if not file.is_file():
            kept = sorted(self._folder.glob("step_*.dataproto"))
            there = f"it has {len(kept)}, up to {kept[-1].name}" if kept else "it has none"
            raise DataError(
                f"step {step}: {file} is not there; {there}",
                "train for as many steps as were kept, with the same filter",
            )
        _, epoch, groups = from_table(DataProto.load_from_disk(file))
        return groups, epoch

    def _next_file(self, step: int) -> Path:
        number = self._taken[step] = self._taken.get(step, -1) + 1
        return self._folder / f"step_{step:08d}_{number}.dataproto"
