"""Random changes of training samples: the same for a seed, a step and a sample, whichever other samples there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.platform.data.test_images import save
from tests.platform.data.test_labelled_texts import TEXTS, rows_of, write
from transformers import AutoImageProcessor, AutoTokenizer

from share_compute.data import PreparedData, prepare
from share_compute.data.tokenization import train_tokenizer
from share_compute.data.transforms import transforms_of
from share_compute.errors import UserError
from share_compute.models.blueprint import blueprint_of
from share_compute.models.image_types import image_processor
from share_compute.specification import parse_job
from share_compute.specification.transforms import CropSpec

FIRST = [-0.4825592041015625, -0.731719970703125, 0.1634674072265625, -0.0566558837890625]
IMAGES = {"height": 12, "width": 10, "channels": 3, "mean": [0.0], "deviation": [1.0]}


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    for number in range(40):
        save(tmp_path / "p" / "ab"[number % 2] / f"{number}.png", random.integers(0, 255, (12, 10, 3)))
    return tmp_path / "p"


def job(files: Path, transforms: Any, **changes: Any) -> dict[str, Any]:
    return {
        "model": {"layers": [{"type": "flatten"}]},
        "data": {"files": [str(files)], "images": IMAGES, "transforms": transforms, **changes},
        "training": {"seed": 7},
    }


def prepared(files: Path, transforms: Any, **changes: Any) -> PreparedData:
    return prepare(parse_job(job(files, transforms, **changes)), files.parent / "prepared")


def test_a_change_depends_only_on_seed_step_and_sample(pictures: Path) -> None:
    found = prepared(pictures, {"crop": {"height": 8, "width": 10, "padding": 1}, "flip": 0.5, "noise": 0.1})
    assert found.sample_shape == (3, 8, 10)
    together, _ = found.take("train", [3, 1, 2], 5)
    assert together.dtype == np.float32
    alone = [found.take("train", [index], 5)[0][0] for index in (3, 1, 2)]
    assert all(np.array_equal(one, other) for one, other in zip(together, alone, strict=True))
    assert not np.array_equal(together, found.take("train", [3, 1, 2], 6)[0])
    for split in ("validation", "test"):
        plain = found.samples.take(split, [0])[0]
        shown = found.take(split, [0], 5)[0]
        padded = np.pad(plain, [(0, 0), (0, 0), (1, 1), (1, 1)])
        assert np.array_equal(shown, padded[:, :, 3:11, 1:11])
    spec = parse_job(job(pictures, {"crop": {"height": 8, "width": 10, "padding": 1}}))
    assert blueprint_of(spec, None).sample_shape == (3, 8, 10)


def test_crops_are_parts_of_the_image(pictures: Path) -> None:
    found = prepared(pictures, {"crop": {"height": 9, "width": 9}})
    (whole,) = found.samples.take("train", [0])[0]
    places = set()
    for step in range(1, 200):
        (part,) = found.take("train", [0], step)[0]
        (place,) = (
            (top, left)
            for top in range(4)
            for left in range(2)
            if np.array_equal(part, whole[:, top : top + 9, left : left + 9])
        )
        places.add(place)
    assert len(places) == 8


NORMALISED: dict[str, Any] = {**IMAGES, "mean": [0.5, 0.25, 0.0], "deviation": [0.5, 1.0, 0.1]}


def test_padding_is_black_whatever_the_scale_of_the_images(pictures: Path) -> None:
    found = prepared(pictures, {"crop": {"height": 14, "width": 11, "padding": 2}}, images=NORMALISED)
    black = np.asarray([-1.0, -0.25, 0.0], np.float32).reshape(3, 1, 1)
    (whole,) = found.samples.take("train", [0])[0]
    padded = np.zeros((3, 16, 14), np.float32) + black
    padded[:, 2:14, 2:12] = whole
    places = set()
    for step in range(1, 100):
        (part,) = found.take("train", [0], step)[0]
        places |= {
            (top, left)
            for top in range(3)
            for left in range(4)
            if np.array_equal(part, padded[:, top : top + 14, left : left + 11])
        }
    assert len(places) == 12
    (plain,), (shown,) = found.samples.take("test", [0])[0], found.take("test", [0], 5)[0]
    assert np.array_equal(shown[:, 1:13, 1:], plain)
    assert (shown[:, [0, 13]] == black).all()
    assert (shown[:, :, :1] == black).all()


@pytest.mark.parametrize(("height", "width"), [(14, 8), (16, 12), (9, 14), (7, 7), (12, 10)])
def test_transformers_crops_the_middle_as_the_job_did(
    pictures: Path, tmp_path: Path, height: int, width: int
) -> None:
    crop = {"height": height, "width": width, "padding": 2}
    spec = parse_job(job(pictures, {"crop": crop}, images=NORMALISED))
    assert spec.data.images is not None
    content = image_processor(spec.data.images, CropSpec(**crop))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    pixels = np.random.default_rng(1).integers(0, 256, (12, 10, 3), dtype=np.uint8)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(pixels), return_tensors="np")
    transforms = transforms_of(spec, None)
    assert transforms is not None
    scaled = pixels.transpose(2, 0, 1)[None] / np.float32(255)
    mean, deviation = (
        np.asarray(NORMALISED[name], np.float32).reshape(3, 1, 1) for name in ("mean", "deviation")
    )
    ours = transforms.apply((scaled - mean) / deviation, "test", 0, [0])
    assert np.allclose(ours, theirs["pixel_values"], atol=1e-5)


def test_flips_and_noise_have_the_probability_and_the_deviation(pictures: Path) -> None:
    flipped = prepared(pictures, {"flip": 0.25})
    (whole,) = flipped.samples.take("train", [0])[0]
    count = 0
    for step in range(1, 401):
        (image,) = flipped.take("train", [0], step)[0]
        is_flipped = np.array_equal(image, whole[:, :, ::-1])
        assert is_flipped or np.array_equal(image, whole)
        count += is_flipped
    assert 70 < count < 130
    noisy = prepared(pictures, {"noise": 2.0})
    plain = noisy.samples.take("train", range(30))[0]
    noise = (noisy.take("train", range(30), 1)[0] - plain).ravel()
    assert noise.mean() == pytest.approx(0, abs=0.05)
    assert noise.std() == pytest.approx(2, abs=0.05)
    assert np.mean(np.abs(noise) < 2) == pytest.approx(0.6827, abs=0.02)  # as of a normal distribution


def test_the_first_numbers_never_change(pictures: Path) -> None:
    noisy = prepared(pictures, {"noise": 1.0})
    assert noisy.transforms is not None
    found = noisy.transforms.apply(np.zeros((1, 1, 1, 4), np.float32), "train", 3, [5])
    bits = np.random.Philox(np.random.SeedSequence((0x7472616E, 7, 3, 5)))
    words = [int(word) for word in bits.random_raw(15)][3:]
    sums = [
        sum(word >> shift & 0xFFFF for word in words[start : start + 3] for shift in (0, 16, 32, 48))
        for start in range(0, 12, 3)
    ]
    assert found.ravel().tolist() == [(2 * total - 12 * 65535) / 2**17 for total in sums]
    assert found.ravel().tolist() == FIRST


@pytest.mark.parametrize("has_labels", [True, False])
def test_tokens_are_masked_in_training_only(tmp_path: Path, has_labels: bool) -> None:
    file = write(tmp_path / "texts.jsonl", rows_of(TEXTS * 10))
    tokenizer = train_tokenizer((text for text, _ in TEXTS), 300, pads=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    spec = parse_job(
        {
            "model": {"config": {"model_type": "llama", "vocab_size": 300}},
            "tokenizer": {"path": str(tmp_path / "tokenizer")},
            "data": {
                "files": [str(file)],
                "labels": {} if has_labels else None,
                "transforms": {"mask": 0.25},
                "validation_fraction": 0.1,
            },
            "training": {"sequence_length": 16},
        }
    )
    found = prepare(spec, tmp_path / "prepared")
    indices = range(found.samples.size("train"))
    plain, targets = found.samples.take("train", indices)
    inputs, same = found.take("train", indices, 4)
    assert np.array_equal(targets, same)
    special = np.isin(plain, tokenizer.all_special_ids)
    changed = inputs != plain
    assert not (changed & special).any()
    assert (inputs[changed] == tokenizer.mask_token_id).all()
    assert changed.sum() / (~special).sum() == pytest.approx(0.25, abs=0.05)
    assert np.array_equal(inputs[7], found.take("train", [7], 4)[0][0])
    assert np.array_equal(found.take("validation", [0], 4)[0], found.samples.take("validation", [0])[0])


def test_a_tokenizer_without_a_mask_token_is_refused(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some words " * 400)
    document = {
        "model": {"config": {"model_type": "llama", "vocab_size": 300}},
        "data": {"files": [str(corpus)], "transforms": {"mask": 0.1}},
    }
    with pytest.raises(
        UserError, match=r"data.transforms.mask: the tokenizer .* has no mask token"
    ) as caught:
        prepare(parse_job(document), tmp_path / "prepared")
    assert "tokenizer.path" in (caught.value.hint or "")
    assert AutoTokenizer.from_pretrained(tmp_path / "prepared" / "tokenizer").mask_token_id is None


@pytest.mark.parametrize(
    ("transforms", "changes", "message"),
    [
        (
            {"crop": {"height": 13, "width": 8}},
            {},
            "transforms.crop.height 13 is larger than the image with padding: 12",
        ),
        (
            {"crop": {"height": 8, "width": 13, "padding": 1}},
            {},
            "transforms.crop.width 13 is larger .*: 12 pixels",
        ),
        (
            {"crop": {"height": 8, "width": 7, "padding": 7}},
            {},
            r"data\.transforms\.crop: padding 7 must be less than height 8 and width 7",
        ),
        ({"crop": {"height": 8, "width": 8, "padding": 1024}}, {}, r"crop\.padding: .*less than 1024"),
        ({"mask": 0.1}, {}, "transforms.mask replaces tokens of text, and the data is not text"),
        ({"flip": 0.5}, {"images": None}, "flip and noise change images"),
        ({"flip": 1.5}, {}, "data.transforms.flip"),
    ],
)
def test_transforms_that_do_not_fit(transforms: Any, changes: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_job(job(Path("a.txt"), transforms, **changes))
