"""Checks the content of an upload (data, model or tokenizer) before jobs can use it."""

from __future__ import annotations

from pathlib import Path

from share_compute.data.tokenization import has_tokenizer
from share_compute.files.field_errors import refused
from share_compute_api.schemas.bodies import UploadView
from share_compute_api.submission.model_folders import check_model_folder, check_weights, checking


def examine(upload: UploadView) -> None:
    """Raise UserError if a data file is empty, a model is incomplete or damaged, or a tokenizer is missing."""
    folder = Path(upload.folder)
    with checking("files"):
        if upload.kind == "data":
            empty = next((file.path for file in upload.files if not file.size_bytes), None)
            if empty is not None:
                raise refused("files", f"{empty} is empty", "leave it out, or fill it")
        if upload.kind == "model":
            check_model_folder(folder, "files")
            check_weights(folder, "files")
        if upload.kind == "tokenizer" and not has_tokenizer(folder):
            raise refused("files", "there is no tokenizer", "send what save_pretrained wrote: tokenizer.json")
