"""Finds the images of a job: in folders of classes, or through manifests, which list paths and labels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from share_compute.errors import UserError
from share_compute.files.strict import nearest
from share_compute.quantities import clipped
from share_compute.specification import IMAGE_SUFFIXES, MANIFEST_SUFFIXES

PATH, LABEL = "path", "label"
"""Columns of a manifest."""
FOLDERS_HINT = "put the .png and .jpg files of each class into a folder named like the class"
Classes: TypeAlias = dict[str, list[Path]]
"""Images by the name of their class."""


def find_images(sources: Sequence[Path]) -> list[tuple[Classes, int]]:
    """Return the images of each source, a folder or a manifest, and the number of files that it ignores.

    Raises:
        UserError: a source cannot be used, or a manifest names an image that another source has, too.
    """
    known = dict[str, Path]()
    found = []
    for source in sources:
        classes, ignored = (
            _in_folder(source) if source.suffix not in MANIFEST_SUFFIXES else _in_manifest(source)
        )
        for file in (file for files in classes.values() for file in files):
            path = os.path.normpath(file.absolute())
            if path in known:
                raise UserError(
                    f"image {shown_path(file)} is named twice: in {known[path]} and in {source}",
                    hint="name each image once in data.files, data.validation_files and data.test_files",
                )
            known[path] = source
        found.append((classes, ignored))
    return found


def check_manifest(manifest: Path) -> None:
    """Raise UserError, naming the file, unless a manifest has the columns path and label."""
    from share_compute.data.labelled_rows import names_in  # noqa: PLC0415 - imports pyarrow

    names = names_in(manifest)
    for column in (PATH, LABEL):
        if column not in names:
            guess = nearest(column, names)
            raise UserError(
                f"manifest {manifest} has no column {column!r}"
                + (f"; did you mean {clipped(guess)!r}?" if guess else ""),
                hint="a manifest has the columns path and label",
            )


def _in_manifest(manifest: Path) -> tuple[Classes, int]:
    """Return the images that a manifest lists; their paths are relative to its folder."""
    import pyarrow as pa  # noqa: PLC0415 - heavy

    from share_compute.data.labelled_rows import column_blocks, label_of  # noqa: PLC0415 - imports pyarrow
    from share_compute.data.table_reading import unreadable  # noqa: PLC0415 - imports pyarrow

    check_manifest(manifest)
    classes: Classes = {}
    rows = dict[Path, int]()
    number = 0
    try:
        for block in column_blocks(manifest, (PATH, LABEL)):
            for number, (path, label) in enumerate(block, start=number + 1):  # noqa: B020 - continues counting
                file = _listed(manifest, number, path)
                if file in rows:
                    raise UserError(
                        f"row {number} of manifest {manifest} names {clipped(path)!r}, as row {rows[file]} does",
                        hint="name each image once",
                    )
                rows[file] = number
                classes.setdefault(label_of(manifest, LABEL, number, label), []).append(file)
    except (ValueError, OSError, pa.ArrowException) as failure:
        raise unreadable(manifest, failure) from failure
    if not number:
        raise UserError(f"manifest {manifest} has no rows", hint="leave it out, or list images in it")
    return classes, 0


def _listed(manifest: Path, number: int, path: Any) -> Path:
    """Return the file that a row of a manifest names.

    Raises:
        UserError: the path leads out of the manifest's folder, the file does not exist, or it is neither PNG nor JPEG.
    """
    where = f"row {number} of manifest {manifest}"
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise UserError(f"{where} has no path", hint="remove the row, or name an image in it")
    inside = PurePosixPath(path.strip())
    if inside.is_absolute() or ".." in inside.parts:
        raise UserError(
            f"{where} names {clipped(path)!r}, which is not inside the manifest's folder",
            hint="give paths relative to the folder of the manifest, without ..",
        )
    if inside.suffix.lower() not in IMAGE_SUFFIXES:
        raise UserError(
            f"{where} names {clipped(path)!r}, which is no PNG or JPEG file",
            hint=f"name files that end with {', '.join(IMAGE_SUFFIXES)}",
        )
    file = manifest.parent / inside
    if file.is_symlink() or not file.is_file():
        raise UserError(
            f"{where} names {clipped(path)!r}, but there is no such file in {manifest.parent}",
            hint="correct the path, or put the image there; links are not read",
        )
    return file


def _in_folder(folder: Path) -> tuple[Classes, int]:
    """Return the images of each class in a folder, and the number of other files and links.

    Hidden files and folders, whose names begin with a dot, are left out.

    Raises:
        UserError: the folder cannot be read or has no classes, or a class has no images or an unprintable name.
    """
    try:
        entries = _visible(folder)
        classes: Classes = {}
        folders = [entry for entry in entries if entry.is_dir() and not entry.is_symlink()]
        ignored = len(entries) - len(folders)
        for entry in folders:
            if not entry.name.isprintable():
                raise UserError(
                    f"the folder {clipped(entry.name)!r} in {folder} has a name that cannot be shown",
                    hint="rename it: the name of a class is UTF-8 without control characters",
                )
            files = _visible(entry)
            classes[entry.name] = [file for file in files if _is_image(file)]
            ignored += len(files) - len(classes[entry.name])
    except OSError as failure:
        raise UserError(
            f"the folder of images {folder} cannot be read: {failure.strerror or failure}",
            hint="give the path of a folder that the server can read",
        ) from failure
    empty = [name for name, files in classes.items() if not files]
    if not classes or empty:
        what = (
            f"the folder {folder / empty[0]} has no images"
            if empty
            else f"{folder} has no folders of classes"
        )
        raise UserError(what, hint=FOLDERS_HINT)
    return classes, ignored


def has_folders(folder: Path) -> bool:
    """Return whether a folder contains a folder that can be a class. Stop at the first one.

    Raises:
        OSError: the folder cannot be read.
    """
    with os.scandir(folder) as entries:
        return any(
            entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") for entry in entries
        )


def _visible(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_SUFFIXES and not file.is_symlink()


def shown_path(file: Path) -> str:
    """Return a path as text that can be printed: with escapes if its name is not UTF-8, or has control characters."""
    return str(file) if str(file).isprintable() else repr(str(file))
