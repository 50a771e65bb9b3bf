"""Makes samples from images: PNG and JPEG files in folders of classes, or listed in a manifest.

Images are resized and stored as bytes in one file. `take` converts them to numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from share_compute.data.image_files import find_images, shown_path
from share_compute.data.reading import files_digest
from share_compute.data.row_file import RowFile, open_rows, require_space, write_record, write_rows
from share_compute.data.samples import SPLITS, Array, Split
from share_compute.data.splitting import (
    PreparedRows,
    Rows,
    file_of,
    rows_at,
    shown_classes,
    split_rows,
    unknown_class,
    with_classes,
)
from share_compute.errors import UserError
from share_compute.files.plain_files import open_unlinked
from share_compute.models.objective import objective_of
from share_compute.specification import ImagesSpec, TrainJob

NAME = "images"
"""Name of the row file."""
MOST_SIDE = 65_535
"""Maximum height and width of an image. Pillow takes memory for each row, besides that for the pixels."""
MOST_PIXELS = 1 << 26
"""Maximum number of pixels of an image, checked before it is decoded."""
MOST_DECODED_PIXELS = 24 << 20
"""Maximum number of pixels that are decoded, with 8 bytes for each: as they are in the file, and converted.

Pillow decodes JPEG files at 1/2, 1/4 or 1/8 of their size if the image is to be smaller than that. For progressive
files it nevertheless holds all coefficients, so their pixels count twice.
"""
MOST_CLASSES = 10_000
_FORMAT = 3
"""Version of the row file's content, part of every fingerprint. Increase it whenever the content changes."""
_BLOCK_IMAGES = 64
_GAP = 3.0
"""Factor by which Pillow resamples at least, after it reduced an image; results are nearly those without reducing."""
_ORIENTATION = 0x0112
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
"""Modes of Pillow with 8 bits for each channel."""


@dataclass(frozen=True, slots=True)
class ImageSamples:
    """Images as samples: float32 ``[n, channels, height, width]``, and classes int64 ``[n]``."""

    pixels: NDArray[Any] = field(repr=False)
    """Resized images, uint8 ``[images, channels, height, width]``."""
    classes: Rows = field(repr=False)
    """Class of each image."""
    rows: Mapping[Split, Rows] = field(repr=False)
    """Indices of the images of each split."""
    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    """Values of each channel, ``[channels, 1, 1]``, by which pixels in 0..1 are normalised: (pixel - mean) / scale."""

    def size(self, split: Split) -> int:
        """Return the number of samples in a split."""
        return len(self.rows[split])

    def take(self, split: Split, indices: Sequence[int] | Rows) -> tuple[Array, Array]:
        """Return inputs float32 ``[n, channels, height, width]`` and targets int64 ``[n]``; see `Samples.take`."""
        rows = rows_at(self.rows[split], split, indices)
        pixels = self.pixels[rows].astype(np.float32) / np.float32(255)
        return (pixels - self.mean) / self.scale, self.classes[rows]


def prepare_images(spec: TrainJob, folder: Path, progress: Callable[[str, float], None]) -> PreparedRows:
    """Read the images of a job into one file in ``folder``, and split them.

    A later call with the same images reuses the file.

    Args:
        spec: a job with ``data.images``.
        folder: folder for the file; created if it does not exist.
        progress: callback that takes the current activity and the share of it that is done, 0 to 1.

    Raises:
        UserError: the images cannot be used.
        Unavailable: a file in ``folder`` cannot be written.
    """
    images = spec.data.images
    assert images is not None
    file = _rows_of(spec.data.all_files, images, folder, progress)
    names, counts = file.facts["classes"], np.asarray(file.facts["counts"])  # [folders, classes]
    rows = split_rows(spec, counts.sum(1).tolist())
    classes = np.concatenate([np.repeat(np.arange(len(names)), of_folder) for of_folder in counts])
    trained = np.unique(classes[rows["train"]])
    for split in SPLITS[1:]:
        wrong = np.flatnonzero(~np.isin(classes[rows[split]], trained))
        if wrong.size:
            row = int(rows[split][wrong[0]])
            source = file_of(spec, counts.sum(1).tolist(), row)
            raise unknown_class(names[classes[row]], split, f"images of {source}")
    shape = (-1, 1, 1)
    samples = ImageSamples(
        file.rows,
        classes,
        rows,
        np.asarray(images.mean, dtype=np.float32).reshape(shape),
        np.asarray(images.deviation, dtype=np.float32).reshape(shape),
    )
    objective = with_classes(
        spec, objective_of(spec), np.bincount(classes[rows["train"]]), names, "data.files"
    )
    notes = [f"the images have {len(names)} classes: {shown_classes(names)}"]
    if file.facts["ignored"]:
        notes.append(
            f"{file.facts['ignored']} files are ignored: they are in no class, links, or no PNG or JPEG files"
        )
    description = {"images": images.model_dump(mode="json"), "classes": names}
    if spec.data.transforms is not None and spec.data.transforms.crop is not None:
        description["crop"] = spec.data.transforms.crop.model_dump(mode="json")
    return PreparedRows(samples, objective, description, tuple(notes))


def _rows_of(
    folders: Sequence[Path], spec: ImagesSpec, folder: Path, progress: Callable[[str, float], None]
) -> RowFile:
    """Return the row file of all images; its metadata holds the number of images of each folder and class."""
    found = find_images(folders)
    names = sorted(set().union(*(classes for classes, _ in found)))
    if len(names) > MOST_CLASSES:
        raise UserError(
            f"the images have {len(names)} classes; at most {MOST_CLASSES} are possible",
            hint="put the images of one class into one folder, or give them one label",
        )
    files = [file for classes, _ in found for name in names for file in classes.get(name, ())]
    paths = [
        f"{name}/{file.name}" for classes, _ in found for name in names for file in classes.get(name, ())
    ]
    counts = [[len(classes.get(name, ())) for name in names] for classes, _ in found]
    size = [_FORMAT, spec.height, spec.width, spec.channels]
    digest = hashlib.sha256(
        json.dumps([size, names, counts, paths, files_digest(files)]).encode()
    ).hexdigest()
    known = open_rows(folder, NAME, digest)
    if known is not None:
        return known

    require_space(folder, len(files) * spec.channels * spec.height * spec.width)

    def blocks() -> Iterator[NDArray[np.uint8]]:
        for start in range(0, len(files), _BLOCK_IMAGES):
            progress("reading images", start / len(files))
            yield np.stack([read_image(file, spec) for file in files[start : start + _BLOCK_IMAGES]])

    shape = write_rows(folder, NAME, blocks())
    facts = {
        "classes": names,
        "counts": counts,
        "ignored": sum(ignored for _, ignored in found),
    }
    return write_record(folder, NAME, digest, "uint8", shape, facts)


def read_image(file: Path, spec: ImagesSpec) -> NDArray[np.uint8]:
    """Return an image, resized, as ``[channels, height, width]``.

    Raises:
        UserError: the file is not an image, or the image is too large or damaged.
    """
    from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - images only

    try:
        with warnings.catch_warnings(), open_unlinked(file) as opened:
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image: Any = Image.open(opened, formats=("PNG", "JPEG"))
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise _too_large(file, f"{width} x {height} pixels", MOST_PIXELS)
            if max(width, height) > MOST_SIDE:
                raise _too_large(file, f"{width} x {height} pixels", MOST_SIDE, "on a side")
            if image.mode not in _MODES:
                raise UserError(
                    f"image {shown_path(file)} has more than 8 bits for each channel",
                    hint="save it with 8 bits",
                )
            mode = "L" if spec.channels == 1 else "RGB"
            image.draft(mode, (spec.width, spec.height))  # JPEG files are decoded at a fraction of their size
            coefficients = width * height if "progressive" in image.info else 0
            blended = image.width * image.height // 2 if _is_transparent(image) else 0  # takes 4 bytes more
            if image.width * image.height + coefficients + blended > MOST_DECODED_PIXELS:
                raise _too_large(file, f"{width} x {height} pixels", MOST_DECODED_PIXELS, "of such a file")
            pixels = np.asarray(_small(image, mode, spec), dtype=np.uint8)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as failure:
        pixels_of = re.search(r"\((\d+) pixels\)", str(failure))
        size = "far more pixels" if pixels_of is None else f"{pixels_of[1]} pixels"
        raise _too_large(file, size, MOST_PIXELS) from failure
    except UnidentifiedImageError as failure:
        reason = "it is damaged, or has no pixels" if _begins_as_image(file) else "it is no PNG or JPEG"
        raise UserError(
            f"{shown_path(file)} cannot be read as an image: {reason}",
            hint="replace it, or take it out of its folder",
        ) from failure
    except (OSError, ValueError, SyntaxError, EOFError) as failure:
        told = failure.strerror if isinstance(failure, OSError) else None
        raise UserError(
            f"{shown_path(file)} cannot be read as an image: {told or 'it is cut off or damaged'}",
            hint="replace it, or take it out of its folder",
        ) from failure
    return pixels[None] if spec.channels == 1 else pixels.transpose(2, 0, 1)


def _begins_as_image(file: Path) -> bool:
    with open_unlinked(file) as opened:
        return opened.read(8).startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"))


def _small(image: Any, mode: str, spec: ImagesSpec) -> Any:
    """Return an image, resized and turned as its EXIF data says; transparent parts become white."""
    from PIL import Image, ImageOps  # noqa: PLC0415 - images only

    # Images are turned after resizing, because Pillow copies to turn. Orientations from 5 on exchange height and width.
    lies = image.getexif().get(_ORIENTATION, 1) >= 5
    size = (spec.height, spec.width) if lies else (spec.width, spec.height)
    wanted = "RGBA" if _is_transparent(image) else mode
    converted = image if image.mode == wanted else image.convert(wanted)
    if wanted != mode:
        # Colours are multiplied by opacity, so that invisible colours do not count.
        converted = converted.convert("RGBa")
    # With ``reducing_gap``, Pillow first reduces by whole factors, so that no intermediate image is larger than the
    # first.
    small = converted.resize(size, Image.Resampling.BILINEAR, reducing_gap=_GAP)
    if wanted != mode:
        parts = np.asarray(small, dtype=np.uint16)
        white = np.minimum(parts[..., :3] + (255 - parts[..., 3:]), 255)
        small = Image.fromarray(white.astype(np.uint8)).convert(mode)
    small.info["exif"] = image.info.get("exif", b"")
    return ImageOps.exif_transpose(small)


def _is_transparent(image: Any) -> bool:
    """Return whether an image has an alpha channel or transparency, by the rule of transformers."""
    return "A" in image.getbands() or image.info.get("transparency") is not None


def _too_large(file: Path, size: str, most: int, what: str = "") -> UserError:
    limit = " ".join(filter(None, ("at most", str(most), what, "are read")))
    return UserError(f"image {shown_path(file)} has {size}; {limit}", hint="make it smaller")
