"""Progress on stderr: a bar on a terminal, one line elsewhere. Imports rich when there is something to show."""

from __future__ import annotations

import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from forerun.cli.display import note

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ProgressBar:
    """One bar that appears with its first update and goes when the block ends.

    Args:
        label: what goes on.
        is_bytes: whether amounts are bytes.
    """

    def __init__(self, label: str, *, is_bytes: bool = False) -> None:
        self._label = label
        self._is_bytes = is_bytes
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._is_announced = False

    def update(self, done: int, total: int | None) -> None:
        """Says how much of the total is done."""
        if not sys.stderr.isatty():
            if not self._is_announced:
                self._is_announced = True
                note(f"forerun: {self._label}")
            return
        progress, task = self._started()
        progress.update(task, completed=done, total=total)

    def _started(self) -> tuple[Progress, TaskID]:
        if self._progress is None or self._task is None:
            from rich import progress as rich_progress
            from rich.console import Console

            amount = rich_progress.DownloadColumn() if self._is_bytes else rich_progress.MofNCompleteColumn()
            self._progress = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(),
                amount,
                rich_progress.TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
            self._task = self._progress.add_task(self._label, total=None)
        return self._progress, self._task

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._progress:
            self._progress.stop()


def resolve(model: str) -> Path:
    """The file of a MODEL; the demo model is fetched on its first use, with a progress bar.

    Raises:
        ConfigError: there is no such file or name, or it has not been pulled.
        LoadError: a known model's file is damaged.
    """
    from forerun.models.pull import resolve_model

    with ProgressBar(f"fetching {model}", is_bytes=True) as bar:
        return resolve_model(model, bar.update)
