"""Compare samples/s of the readers of texts, tables and image folders with those of `datasets` alone.

For each kind there are two figures: ``read`` from the files to the first sample, and ``take`` of shuffled batches. Both
sides take turns in one process, and give the same numbers of samples of the same shape. Speeds are samples per second
of CPU time of the process, so that other load of the machine does not count. ``memory`` is the peak of
anonymous memory over a data set of ten times the size, against that over the small one. Pages of mapped files are not
anonymous: the system can drop them. Rows of tables and images keep 8 bytes each in memory, their order.
With ``--quick``, the small data is less than the readers' buffers, so ``memory`` shows their filling.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _harness import corpus, print_figure

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads of the tokenizer would hide the readers

from share_compute.data import prepare
from share_compute.data.tokenization import load_tokenizer, train_tokenizer
from share_compute.specification import TrainJob, parse_job

KINDS = ("text", "table", "images")
BATCH = 32
LENGTH = 128
SIDE = 32
FEATURES = 12
VOCABULARY = 2048
PEER = "datasets, with the same tokenizer, scaling and resizing"
Take = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the generated data."""

    documents: int
    rows: int
    images: int
    """Number of images of each of four classes."""

    def times(self, factor: int) -> Size:
        """Return a larger size."""
        return Size(self.documents * factor, self.rows * factor, self.images * factor)


def write_data(kind: str, folder: Path, size: Size) -> Path:
    """Write one data set, and return its file or folder."""
    random = np.random.default_rng(0)
    if kind == "text":
        text = corpus(folder)
        words, target = text.read_text().splitlines(), folder / "text.jsonl"
        with target.open("w") as file:
            for number in range(size.documents):
                start = 37 * number % max(1, len(words) - 40)
                file.write(json.dumps({"text": "\n".join(words[start : start + 40])}) + "\n")
        return target
    if kind == "table":
        target = folder / "table.csv"
        names = [f"feature_{number}" for number in range(FEATURES)]
        with target.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*names, "target"])
            for _ in range(size.rows):
                writer.writerow([f"{value:.6f}" for value in random.normal(size=FEATURES + 1)])
        return target
    from PIL import Image

    target = folder / "images"
    for number in range(4):
        (target / f"class_{number}").mkdir(parents=True)
        for image in range(size.images):
            pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            picture = Image.fromarray(pixels).resize((96, 96))
            picture.save(target / f"class_{number}" / f"{image:06}.jpg", quality=90)
    return target


def job_of(kind: str, data: Path, tokenizer: Path) -> TrainJob:
    """Return the job that reads a data set."""
    linear = {"type": "linear", "options": {"in_features": FEATURES, "out_features": 1}}
    flat = [
        {"type": "flatten"},
        {"type": "linear", "options": {"in_features": 3 * SIDE * SIDE, "out_features": 4}},
    ]
    llama = {"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1}
    files: dict[str, Any] = {"files": [str(data)], "validation_fraction": 0, "test_fraction": 0}
    parts: dict[str, dict[str, Any]] = {
        "text": {"model": {"config": llama}, "data": files, "tokenizer": {"path": str(tokenizer)}},
        "table": {
            "model": {"layers": [linear]},
            "data": {**files, "table": {"target": "target"}},
            "task": "tabular_regression",
        },
        "images": {
            "model": {"layers": flat},
            "data": {**files, "images": {"height": SIDE, "width": SIDE, "channels": 3}},
        },
    }
    training = {"steps": 1, "batch_size": BATCH, "sequence_length": LENGTH}
    return parse_job({**parts[kind], "training": training})


def ours(spec: TrainJob, folder: Path) -> tuple[int, Take]:
    """Read a data set with share-compute; return the number of samples, and a function that takes some of them."""
    prepared = prepare(spec, folder)
    return prepared.samples.size("train"), lambda indices: prepared.take("train", indices)


def theirs(kind: str, data: Path, tokenizer: Any, folder: Path) -> tuple[int, Take]:
    """Read a data set with `datasets`, as `ours` does."""
    import datasets

    datasets.disable_progress_bars()
    files: dict[str, Any] = {"data_dir": str(data)} if kind == "images" else {"data_files": str(data)}
    builder = {"text": "json", "table": "csv", "images": "imagefolder"}[kind]
    found = datasets.load_dataset(builder, split="train", cache_dir=str(folder), **files)
    if kind == "text":
        return _their_texts(found, tokenizer)
    return _their_table(found) if kind == "table" else _their_images(found)


def _their_texts(found: Any, tokenizer: Any) -> tuple[int, Take]:
    def tokens(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        # The function of the language modeling examples of transformers: concatenate, then cut into blocks.
        encoded = tokenizer(rows["text"], add_special_tokens=False)["input_ids"]
        joined = np.concatenate([[*row, tokenizer.eos_token_id] for row in encoded])
        width = LENGTH + 1  # inputs and targets are shifted by one token
        count = len(joined) // width
        return {"input_ids": list(joined[: count * width].reshape(count, width))}

    packed = found.map(tokens, batched=True, remove_columns=found.column_names).with_format("numpy")

    def take(indices: Any) -> Any:
        rows = packed[indices]["input_ids"]
        return rows[:, :-1], rows[:, 1:]

    return len(packed), take


def _their_table(found: Any) -> tuple[int, Take]:
    names = [name for name in found.column_names if name != "target"]
    rows = found.with_format("numpy")
    columns = {name: np.asarray(rows[:][name], dtype=np.float64) for name in found.column_names}
    means = {name: column.mean() for name, column in columns.items()}
    scales = {name: column.std() for name, column in columns.items()}
    del columns

    def take(indices: Any) -> Any:
        batch = rows[indices]
        scaled = {name: (batch[name] - means[name]) / scales[name] for name in batch}
        inputs = np.stack([scaled[name] for name in names], axis=1).astype(np.float32)
        return inputs, scaled["target"].astype(np.float32)

    return len(rows), take


def _their_images(found: Any) -> tuple[int, Take]:
    import datasets

    shape = (3, SIDE, SIDE)
    features = datasets.Features(
        {"pixels": datasets.Array3D(shape, "uint8"), "label": found.features["label"]}
    )

    def resized(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {
            "pixels": [
                np.asarray(image.convert("RGB").resize((SIDE, SIDE))).transpose(2, 0, 1)
                for image in rows["image"]
            ],
            "label": rows["label"],
        }

    mapped = found.map(resized, batched=True, batch_size=64, remove_columns=["image"], features=features)
    rows = mapped.with_format("numpy")

    def take(indices: Any) -> Any:
        batch = rows[indices]
        return (batch["pixels"].astype(np.float32) / 255 - 0.5) / 0.5, batch["label"]

    return len(rows), take


def compare(kind: str, place: Path, size: Size, rounds: int) -> None:
    """Measure one kind of data, and print its figures of speed."""
    data, tokenizer = write_data(kind, place, size), place / "tokenizer"
    if kind == "text":
        train_tokenizer([(place / "corpus.txt").read_text()], VOCABULARY).save_pretrained(tokenizer)
    loaded = load_tokenizer(tokenizer) if kind == "text" else None
    spec = job_of(kind, data, tokenizer)
    rates: dict[str, list[tuple[float, float]]] = {"read": [], "take": []}
    sides: tuple[Callable[[Path], tuple[int, Take]], ...] = (
        lambda folder: ours(spec, folder),
        lambda folder: theirs(kind, data, loaded, folder),
    )
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory(dir=place) as scratch:
            reading, found = [], []
            for number, side in enumerate(sides):
                start_s = time.process_time()
                count, take = side(Path(scratch) / str(number))
                take(list(range(BATCH)))
                reading.append(count / (time.process_time() - start_s))
                found.append((count, take))
            least = min(count for count, _ in found)
            assert abs(found[0][0] - found[1][0]) <= 0.01 * least + BATCH, (
                "the sides give other numbers of samples"
            )
            taking = _take_rates([take for _, take in found], least, turn)
        if turn:  # the first turn is warm-up
            rates["read"].append((reading[0], reading[1]))
            rates["take"].append(taking)
    for name, pairs in rates.items():
        own, peer = zip(*pairs, strict=True)
        print_figure(
            f"data_{kind}_{name}",
            ours=statistics.median(own),
            peer=statistics.median(peer),
            peer_name=PEER,
            ratio=statistics.median(a / b for a, b in pairs),
            unit="samples/s of CPU time",
            goal=0.9,
            ours_range=[round(min(own)), round(max(own))],
            peer_range=[round(min(peer)), round(max(peer))],
            samples=least,
            rounds=rounds,
        )


def _take_rates(takes: list[Take], count: int, seed: int) -> tuple[float, float]:
    """Return the samples/s of both sides, which take the same shuffled batches in turn, ten at a time."""
    order = np.random.default_rng(seed).permutation(count)
    batches = [order[start : start + BATCH].tolist() for start in range(0, count - BATCH + 1, BATCH)][:400]
    seconds = [0.0, 0.0]
    for first in range(0, len(batches), 10):
        for number, take in enumerate(takes):
            start_s = time.process_time()
            for batch in batches[first : first + 10]:
                take(batch)
            seconds[number] += time.process_time() - start_s
    samples = len(batches) * BATCH
    return samples / seconds[0], samples / seconds[1]


def compare_memory(kind: str, place: Path, size: Size) -> None:
    """Print the peak memory over data of ten times the size, beside that over the small data."""
    peaks = []
    for factor in (1, 10):
        folder = place / str(factor)
        folder.mkdir()
        data, tokenizer = write_data(kind, folder, size.times(factor)), folder / "tokenizer"
        if kind == "text":
            train_tokenizer([(folder / "corpus.txt").read_text()], VOCABULARY).save_pretrained(tokenizer)
        command = [sys.executable, __file__, "--peak", kind, str(data), str(tokenizer), str(folder / "out")]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peaks.append(json.loads(done.stdout.splitlines()[-1]))
    print_figure(
        f"data_{kind}_memory",
        ours=peaks[1],
        peer=peaks[0],
        peer_name="the same reader over a tenth of the data",
        ratio=peaks[0] / peaks[1],
        unit="MiB",
        goal=0.9,
    )


def peak_mib(spec: TrainJob, folder: Path) -> float:
    """Read a data set, take a thousand batches, and return the peak of anonymous memory in MiB."""
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.01):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("RssAnon"):
                    peak = max(peak, int(line.split()[1]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    count, take = ours(spec, folder)
    for seed in range(1000):
        take(np.random.default_rng(seed).integers(0, count, BATCH).tolist())
    ended.set()
    watcher.join()
    return peak / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smoke run: one round over little data")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--only", choices=KINDS, help="only this kind of data")
    parser.add_argument(
        "--peak", nargs=4, metavar=("KIND", "DATA", "TOKENIZER", "FOLDER"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.peak:
        kind, data, tokenizer, folder = options.peak
        print(peak_mib(job_of(kind, Path(data), Path(tokenizer)), Path(folder)))
        return
    size = Size(400, 4_000, 60) if options.quick else Size(4_000, 100_000, 750)
    for kind in KINDS if options.only is None else (options.only,):
        with tempfile.TemporaryDirectory(prefix="sc-data-") as name:
            compare(kind, Path(name), size, 1 if options.quick else options.rounds)
        with tempfile.TemporaryDirectory(prefix="sc-data-") as name:
            compare_memory(
                kind, Path(name), Size(400, 10_000, 60) if options.quick else Size(2_000, 100_000, 200)
            )


if __name__ == "__main__":
    main()
