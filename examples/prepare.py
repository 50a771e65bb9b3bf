"""Write the files that the examples read: text, rows, tables, images, and two small models with random weights.

    python examples/prepare.py

The text is Python's own documentation, and the tables and images are data sets of scikit-learn. Existing files stay as
they are: put your own in their places.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow as pa
import torch
from PIL import Image
from pyarrow import csv, parquet
from sklearn.datasets import dump_svmlight_file, load_diabetes, load_digits, load_wine
from sklearn.feature_extraction.text import HashingVectorizer
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from share_compute.data.tokenization import train_tokenizer
from share_compute_api.demonstration.corpus import gather_corpus

FOLDER = Path(__file__).parent
QUESTIONS = ("What is the sea?", "Where do rivers begin?", "Who was Ada Lovelace?", "Why is the sky blue?")
VOCABULARY = 2048
POSITIONS = 512
LINES = 500
MEDIUM = 40
STRONG_PERCENT = 13
WHITE = 255


def main(folder: Path = FOLDER) -> None:
    """Write what is missing below ``folder``, and print its paths."""
    disable_progress_bar()
    before = set(folder.iterdir())
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        gather_corpus(corpus)
    lines = [line for line in corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    write_rows(folder / "notes.jsonl", "body", lines[:2000])
    write_rows(folder / "questions.jsonl", "question", QUESTIONS)
    write_rows(folder / "texts.jsonl", "text", lines[:50])
    write_labelled(folder / "lines.csv", lines)
    write_pairs(folder / "pairs.jsonl", lines)
    write_sparse(folder, lines)
    write_tables(folder)
    write_pictures(folder / "pictures")
    write_models(folder, lines)
    written = sorted(set(folder.iterdir()) - before)
    told = [f"wrote {path}" for path in written] or [f"all files are in {folder} already"]
    sys.stdout.write("\n".join(told) + "\n")


def write_rows(file: Path, column: str, texts: list[str] | tuple[str, ...]) -> None:
    """Write one JSON object with this column for each text."""
    if not file.exists():
        rows = (json.dumps({column: text}, ensure_ascii=False) + "\n" for text in texts)
        file.write_text("".join(rows), encoding="utf-8")


def write_pairs(file: Path, lines: list[str]) -> None:
    """Write long lines of the text with the lines that follow them, which are about the same matter."""
    if not file.exists():
        pairs = [
            {"text": line.strip(), "next": follower.strip()}
            for line, follower in zip(lines[::2], lines[1::2], strict=False)
            if len(line) > MEDIUM < len(follower)
        ]
        file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs[:LINES]), encoding="utf-8")


def write_sparse(folder: Path, lines: list[str]) -> None:
    """Write the words of lines as sparse rows: whether a line is an example of code (1), or prose (-1)."""
    chosen = [line for line in lines if ">>>" in line or line[0].isalpha()]
    texts = [line.replace(">>>", " ") for line in chosen]
    classes = [1 if ">>>" in line else -1 for line in chosen]
    words = HashingVectorizer(n_features=2**20, alternate_sign=False, norm=None).transform(texts)
    for name, part in (("1", slice(0, None, 3)), ("2", slice(1, None, 3)), ("validation", slice(2, None, 3))):
        file = folder / f"words-{name}.libsvm"
        if not file.exists():
            dump_svmlight_file(words[part], classes[part], str(file))


def write_labelled(file: Path, lines: list[str]) -> None:
    """Write lines of the text with a label: whether they are an example of code, or prose."""
    kinds = {
        "code": [line for line in lines if ">>>" in line],
        "prose": [line for line in lines if line[0].isalpha()],
    }
    if not file.exists():
        rows = [(line.strip(), kind) for kind, found in kinds.items() for line in found[:LINES]]
        csv.write_csv(
            pa.table({name: [row[place] for row in rows] for place, name in enumerate(("text", "kind"))}),
            file,
        )


def write_tables(folder: Path) -> None:
    """Write the wines as two .csv files, with a category and an empty cell, and the diabetes patients as .parquet."""
    wine, patients = load_wine(), load_diabetes(scaled=False)
    columns = dict(zip(wine.feature_names, wine.data.T.tolist(), strict=True))
    alcohol = columns.pop("alcohol")
    columns["strength"] = ["strong" if percent > STRONG_PERCENT else "light" for percent in alcohol]
    columns["magnesium"][5] = None
    columns["grape"] = [("nebbiolo", "grignolino", "barbera")[number] for number in wine.target]
    table = pa.table(columns)
    # Every second wine, because those of a kind are neighbours.
    for number in (1, 2):
        file = folder / f"wine-{number}.csv"
        if not file.exists():
            csv.write_csv(table.take(list(range(number - 1, len(table), 2))), file)
    file = folder / "diabetes.parquet"
    if not file.exists():
        features = dict(zip(patients.feature_names, patients.data.T.tolist(), strict=True))
        parquet.write_table(pa.table({**features, "progression": patients.target}), file)


def write_pictures(folder: Path) -> None:
    """Write the handwritten digits as .png files, in one folder for each digit."""
    if folder.exists():
        return
    digits = load_digits()
    for number, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / str(digit)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * WHITE / pixels.max()).astype("uint8")).save(place / f"{number:04}.png")


def write_models(folder: Path, lines: list[str]) -> None:
    """Write a Llama to train further, or to serve, and an encoder."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS,
    }
    tokenizer = train_tokenizer(lines, VOCABULARY)
    models = {
        "base-model": lambda: LlamaForCausalLM(LlamaConfig(**shape, bos_token_id=None, eos_token_id=0)),
        "encoder": lambda: BertModel(BertConfig(**shape, pad_token_id=0)),
    }
    for name, make in models.items():
        if not (folder / name).exists():
            make().save_pretrained(folder / name)
            tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    main()
