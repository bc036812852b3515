"""Folders and files that this user may not read; root may read all, whatever their mode."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def locked(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """Make the content of a folder, or of a file, unreadable as if it had mode 000."""
    is_folder = place.is_dir()

    def guarded(call: Callable[..., Any], *, opens: bool) -> Callable[..., Any]:
        def checked(path: Any = ".", *args: Any, **options: Any) -> Any:
            asked = Path(os.fsdecode(path)) if isinstance(path, str | bytes | os.PathLike) else Path()
            inside = place in asked.parents and is_folder
            if inside or (opens and asked == place):
                raise PermissionError(13, "Permission denied", str(asked))
            return call(path, *args, **options)

        return checked

    monkeypatch.setattr(os, "stat", guarded(os.stat, opens=False))
    monkeypatch.setattr(os, "scandir", guarded(os.scandir, opens=True))
    monkeypatch.setattr(os, "open", guarded(os.open, opens=True))
