"""Write the files that the examples read: text, rows, and two small models with random weights.

    python examples/prepare.py

The text is Python's own documentation. Existing files stay as they are: put your own in their places.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from share_compute.data.tokenization import train_tokenizer
from share_compute_api.demonstration.corpus import gather_corpus

FOLDER = Path(__file__).parent
QUESTIONS = ("What is the sea?", "Where do rivers begin?", "Who was Ada Lovelace?", "Why is the sky blue?")
VOCABULARY = 2048
POSITIONS = 512


def main(folder: Path = FOLDER) -> None:
    """Write what is missing below ``folder``."""
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        gather_corpus(corpus)
    lines = [line for line in corpus.read_text(encoding="utf-8").splitlines() if line.strip()]
    write_rows(folder / "notes.jsonl", "body", lines[:2000])
    write_rows(folder / "questions.jsonl", "question", QUESTIONS)
    write_rows(folder / "texts.jsonl", "text", lines[:50])
    write_models(folder, lines)


def write_rows(file: Path, column: str, texts: list[str] | tuple[str, ...]) -> None:
    """Write one JSON object with this column for each text."""
    if not file.exists():
        rows = (json.dumps({column: text}, ensure_ascii=False) + "\n" for text in texts)
        file.write_text("".join(rows), encoding="utf-8")


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
