"""Folders of images: reading, resizing, splitting, and images that cannot be used. Real PNG and JPEG files."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from sklearn.datasets import load_digits
from transformers.image_transforms import convert_to_rgb

from share_compute.data import PreparedData, prepare
from share_compute.data.images import read_image
from share_compute.data.samples import SPLITS
from share_compute.errors import UserError
from share_compute.specification import ImagesSpec, parse_job

GREY = ImagesSpec(height=8, width=8, channels=1, mean=(0.0,), deviation=(1.0,))
UNSPLIT: dict[str, Any] = {"validation_fraction": 0, "test_fraction": 0}


def save(file: Path, pixels: Any, **options: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels, dtype=np.uint8)).save(file, **options)
    return file


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """The first 100 digits of scikit-learn."""
    digits = load_digits()
    for number in range(100):
        file = tmp_path / "pictures" / str(digits.target[number]) / f"{number:03}.png"
        save(file, digits.images[number] * 15)
    return tmp_path / "pictures"


def prepared(folder: Path, images: Any = GREY, **data: Any) -> PreparedData:
    spec = parse_job(
        {
            "model": {"layers": [{"type": "flatten"}]},
            "data": {"files": [str(folder)], "images": images.model_dump(), **data},
        }
    )
    return prepare(spec, folder.parent / "prepared")


def test_images_are_classes_by_folder(pictures: Path) -> None:
    found = prepared(pictures, validation_fraction=0.2, test_fraction=0.1)
    assert [found.samples.size(split) for split in SPLITS] == [70, 20, 10]
    assert found.sample_shape == (1, 8, 8)
    assert found.objective is not None
    assert found.objective.classes == 10
    digits = load_digits()
    known = {
        (digits.images[number] * 15).astype(np.uint8).tobytes(): digits.target[number]
        for number in range(100)
    }
    seen = 0
    for split in SPLITS:
        inputs, targets = found.samples.take(split, range(found.samples.size(split)))
        assert inputs.dtype == np.float32
        for image, target in zip(inputs, targets, strict=True):
            assert known[np.rint(image * 255).astype(np.uint8).tobytes()] == target
            seen += 1
    assert seen == 100
    again = prepared(pictures, validation_fraction=0.2, test_fraction=0.1)
    assert np.array_equal(again.samples.take("test", range(10))[0], found.samples.take("test", range(10))[0])


def test_images_are_resized_converted_and_normalised(tmp_path: Path) -> None:
    save(tmp_path / "p" / "red" / "a.png", np.full((40, 20, 3), (255, 0, 0)))
    save(tmp_path / "p" / "grey" / "b.JPG", np.full((300, 200), 128), format="JPEG")
    save(tmp_path / "p" / "grey" / "c.png", np.full((5, 5, 4), (0, 0, 255, 0)))
    images = ImagesSpec(height=6, width=4, mean=(0.5, 0.0, 0.25), deviation=(0.5, 1.0, 0.5))
    found = prepared(tmp_path / "p", images, **UNSPLIT)
    inputs, targets = found.samples.take("train", range(3))
    assert inputs.shape == (3, 3, 6, 4)
    assert found.description is not None
    assert found.description["classes"] == ["grey", "red"]
    red = inputs[targets == 1][0]
    assert red[:, 0, 0].tolist() == [1.0, 0.0, -0.5]
    means = sorted(image[1].mean() for image in inputs)
    assert means == pytest.approx([0, 128 / 255, 1], abs=0.01)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "RGB", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_transparent_images_are_on_white(tmp_path: Path, mode: str, channels: int) -> None:
    random = np.random.default_rng(0)
    image = Image.fromarray(random.integers(0, 256, (30, 20, 4), dtype=np.uint8), "RGBA")
    options: dict[str, Any] = {}
    if mode in ("P", "L", "RGB", "1"):
        image = image.convert("RGB").quantize(16) if mode == "P" else image.convert(mode)
        options["transparency"] = image.getpixel((3, 3))
    elif mode != "RGBA":
        image = image.convert("LA").convert(mode)
    image.save(tmp_path / "a.png", **options)
    with Image.open(tmp_path / "a.png") as opened:
        coloured = convert_to_rgb(opened, return_numpy=True)
    wanted = "L" if channels == 1 else "RGB"
    expected = Image.fromarray(coloured).convert(wanted).resize((5, 10), Image.Resampling.BILINEAR)
    found = read_image(tmp_path / "a.png", ImagesSpec(height=10, width=5, channels=channels))
    theirs = np.atleast_3d(np.asarray(expected)).transpose(2, 0, 1)
    assert np.abs(found.astype(int) - theirs).max() <= 2


def test_images_are_turned_as_their_camera_says(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    file = save(tmp_path / "a.png", [[255] * 8] * 4 + [[0] * 8] * 4, exif=exif)
    assert read_image(file, GREY)[0, 0].tolist() == [0] * 8


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_after_they_are_resized(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    parts = np.random.default_rng(0).integers(0, 255, (6, 10))
    file = save(tmp_path / "a.png", np.kron(parts, np.ones((40, 30))), exif=exif)
    with Image.open(file) as opened:
        upright = ImageOps.exif_transpose(opened).resize((30, 24), Image.Resampling.BILINEAR)
    found = read_image(file, ImagesSpec(height=24, width=30, channels=1))[0]
    assert np.allclose(found.astype(int), np.asarray(upright).astype(int), atol=4)


def test_validation_may_have_a_folder_of_its_own(pictures: Path, tmp_path: Path) -> None:
    save(tmp_path / "more" / "3" / "x.png", np.full((8, 8), 9))
    found = prepared(pictures, validation_files=[str(tmp_path / "more")], test_fraction=0)
    inputs, targets = found.samples.take("validation", [0])
    assert (inputs * 255).round().max() == 9
    assert targets.tolist() == [3]
    save(tmp_path / "more" / "eleven" / "x.png", np.zeros((8, 8)))
    with pytest.raises(
        UserError,
        match=r"class 'eleven' is in the validation split, but not in the training split: images of .*more$",
    ):
        prepared(pictures, validation_files=[str(tmp_path / "more")], test_fraction=0)


def test_a_row_that_moves_to_another_manifest_changes_the_splits(pictures: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"path": f"pictures/{file.parent.name}/{file.name}", "label": int(file.parent.name)}
        for file in sorted(pictures.glob("*/*.png"))
    ]
    first, second = pictures.parent / "first.jsonl", pictures.parent / "second.jsonl"
    place = next(at for at, row in enumerate(rows) if row["label"] == 9)
    sizes = []
    for moves in (False, True):
        # The classes of both folders, and the order of all images, stay the same.
        held = [row for row in rows if row["label"] < 9]
        nines = rows[place:]
        manifest(first, held + nines[: 2 if moves else 3])
        manifest(second, nines[2 if moves else 3 :])
        found = prepared(first, validation_files=[str(second)], test_fraction=0)
        sizes.append([found.samples.size(split) for split in SPLITS])
    assert sizes[0] == [len(rows) - len(nines) + 3, len(nines) - 3, 0]
    assert sizes[1] == [len(rows) - len(nines) + 2, len(nines) - 2, 0]


def bomb(file: Path, width: int, height: int) -> Path:
    """Write a small PNG file that declares this size."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    file.parent.mkdir(parents=True, exist_ok=True)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    file.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return file


@pytest.mark.parametrize(
    ("width", "height", "most"),
    [
        (20_000, 20_000, "67108864"),
        (10_000, 10_000, "67108864"),
        (9_000, 9_000, "67108864"),
        (5_100, 5_000, "25165824 of such a file"),
        (1, 65_536, "65535 on a side"),
        (1 << 26, 1, "65535 on a side"),
    ],
)
def test_a_very_large_image_is_not_decoded(tmp_path: Path, width: int, height: int, most: str) -> None:
    with pytest.raises(UserError, match=rf"image .*a\.png has .*pixels; at most {most} are read"):
        read_image(bomb(tmp_path / "a.png", width, height), GREY)


def test_a_large_jpeg_is_decoded_at_a_fraction_of_its_size(tmp_path: Path) -> None:
    pixels = np.full((6000, 5000), 77)
    assert np.unique(read_image(save(tmp_path / "a.jpg", pixels), GREY)).tolist() == [77]
    with pytest.raises(UserError, match="at most 25165824 of such a file are read"):
        read_image(save(tmp_path / "b.jpg", pixels, progressive=True), GREY)


@pytest.mark.parametrize("content", [b"", b"no image", b"GIF89a\1\0\1\0\0\0\0;"])
def test_a_file_that_is_no_image_is_named(pictures: Path, content: bytes) -> None:
    (pictures / "3" / "wrong.png").write_bytes(content)
    with pytest.raises(UserError, match=r"3/wrong\.png cannot be read as an image: it is no PNG or JPEG$"):
        prepared(pictures)


def test_damaged_images_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a\.png cannot be read as an image: it is cut off or damaged$"):
        read_image(bomb(tmp_path / "a.png", 800, 800), GREY)  # its data ends early
    Image.fromarray(np.zeros((4, 4), dtype=np.uint16)).save(tmp_path / "b.png")
    with pytest.raises(UserError, match=r"b\.png has more than 8 bits for each channel"):
        read_image(tmp_path / "b.png", GREY)


@pytest.mark.parametrize(("width", "height"), [(0, 8), (8, 0), (0, 0)])
def test_images_without_pixels_are_named(tmp_path: Path, width: int, height: int) -> None:
    with pytest.raises(
        UserError, match=r"a\.png cannot be read as an image: it is damaged, or has no pixels$"
    ) as caught:
        read_image(bomb(tmp_path / "a.png", width, height), GREY)
    assert caught.value.hint


def test_folders_without_images_are_named(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere cannot be read"):
        prepared(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no folders of classes"):
        prepared(tmp_path / "empty")
    (pictures / "eleven").mkdir()
    with pytest.raises(UserError, match=r"the folder .*eleven has no images"):
        prepared(pictures)


def test_other_files_are_ignored_and_counted(pictures: Path) -> None:
    (pictures / "README").write_text("digits")
    (pictures / "3" / "Thumbs.db").write_text("x")
    (pictures / "3" / "link.png").symlink_to(pictures / "3" / "003.png")
    (pictures / "link").symlink_to(pictures / "3")
    (pictures / ".cache").mkdir()
    (pictures / "3" / "._003.png").write_text("x")
    found = prepared(pictures)
    assert "4 files are ignored: they are in no class, links, or no PNG or JPEG files" in found.notes
    assert found.samples.size("train") == prepared(pictures).samples.size("train") == 90


@pytest.mark.parametrize("name", [b"a\x1b[31m", b"a\xff"])
def test_names_of_classes_can_be_shown(pictures: Path, name: bytes) -> None:
    save(Path(os.fsdecode(bytes(pictures) + b"/" + name)) / "a.png", np.zeros((8, 8)))
    with pytest.raises(UserError, match="has a name that cannot be shown") as caught:
        prepared(pictures)
    assert caught.value.message.isprintable()


def test_names_of_files_are_escaped_in_errors(pictures: Path) -> None:
    Path(os.fsdecode(bytes(pictures) + b"/3/a\xff.png")).write_text("no image")
    with pytest.raises(UserError, match=r"3/a\\udcff\.png' cannot be read as an image"):
        prepared(pictures)


def manifest(file: Path, rows: list[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        [json.dumps(row) for row in rows]
        if file.suffix == ".jsonl"
        else [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    )
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_a_manifest_gives_the_same_samples_as_folders(pictures: Path, suffix: str) -> None:
    rows = [
        {"path": f"pictures/{file.parent.name}/{file.name}", "label": int(file.parent.name)}
        for file in sorted(pictures.glob("*/*.png"))
    ]
    listed = prepared(manifest(pictures.parent / f"labels{suffix}", rows), validation_fraction=0.2)
    whole = prepared(pictures, validation_fraction=0.2)
    for split in SPLITS:
        for ours, theirs in zip(
            *(each.samples.take(split, range(each.samples.size(split))) for each in (listed, whole)),
            strict=True,
        ):
            assert np.array_equal(ours, theirs)
    assert listed.description == whole.description


def test_manifests_and_folders_may_be_mixed(pictures: Path, tmp_path: Path) -> None:
    save(tmp_path / "more" / "x.png", np.full((8, 8), 9))
    more = manifest(tmp_path / "more" / "labels.csv", [{"path": "./x.png", "label": " 3"}])
    found = prepared(pictures, validation_files=[str(more)], test_fraction=0)
    inputs, targets = found.samples.take("validation", [0])
    assert (inputs * 255).round().max() == 9
    assert targets.tolist() == [3]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"file": "a.png", "label": "x"}], "manifest .*labels.csv has no column 'path'"),
        ([{"path": "a.png", "labels": "x"}], "has no column 'label'; did you mean 'labels'?"),
        (
            [{"path": "../b.png", "label": "x"}],
            r"row 1 of manifest .*labels.csv names '../b.png', which is not inside",
        ),
        (
            [{"path": "/etc/b.png", "label": "x"}],
            "names '/etc/b.png', which is not inside the manifest's folder",
        ),
        ([{"path": "a/../../b.png", "label": "x"}], "names 'a/../../b.png', which is not inside"),
        (
            [{"path": "a.png", "label": "x"}, {"path": "./a.png", "label": "y"}],
            "row 2 .* names './a.png', as row 1",
        ),
        ([{"path": "no.png", "label": "x"}], "names 'no.png', but there is no such file in"),
        ([{"path": "link.png", "label": "x"}], "names 'link.png', but there is no such file in"),
        ([{"path": "a.gif", "label": "x"}], "names 'a.gif', which is no PNG or JPEG file"),
        ([{"path": "", "label": "x"}], "row 1 of manifest .* has no path"),
        ([{"path": "a.png", "label": ""}], "column 'label' of data file .*labels.csv has no label in row 1"),
    ],
)
def test_manifests_that_cannot_be_used(tmp_path: Path, rows: list[dict[str, Any]], message: str) -> None:
    place = tmp_path / "pictures"
    save(place / "a.png", np.zeros((8, 8)))
    save(tmp_path / "b.png", np.zeros((8, 8)))
    (place / "link.png").symlink_to(tmp_path / "b.png")
    with pytest.raises(UserError, match=message):
        prepared(manifest(place / "labels.csv", rows), **UNSPLIT)


def test_a_manifest_with_two_columns_of_one_name_is_refused(pictures: Path) -> None:
    listed = pictures / "labels.csv"
    listed.write_text("path,label,label\n3/003.png,3,4\n")
    with pytest.raises(UserError, match=r"labels\.csv has two columns 'label'"):
        prepared(listed)


def test_an_image_in_two_splits_is_refused(pictures: Path) -> None:
    listed = manifest(pictures / "labels.csv", [{"path": "3/003.png", "label": 3}])
    with pytest.raises(
        UserError, match=r"image .*3/003\.png is named twice: in .*pictures and in .*labels\.csv"
    ):
        prepared(pictures, validation_files=[str(listed)])
    empty = pictures / "none.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match="has no column 'path'"):
        prepared(empty)
