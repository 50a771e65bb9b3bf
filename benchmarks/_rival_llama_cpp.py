"""Process of llama.cpp, alone or with two RPC servers; see `_rival_loop`."""

from __future__ import annotations

import atexit
import ctypes
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _rival_loop import Prepare, Settings, answer_requests

_STEP_TOKENS = 512
"""Number of positions that are computed at a time."""
_PADDED_TOKENS = 256
"""llama.cpp pads the length of each sequence's cache to a multiple of this."""
_CPU = 0
"""`GGML_BACKEND_DEVICE_TYPE_CPU`."""


def convert(folder: Path) -> Path:
    """Write a Llama as GGUF in float32 without a vocabulary; return the file. Do nothing if the file exists.

    The rows of the projections of queries and keys are permuted as by llama.cpp's `convert_hf_to_gguf.py`, because
    llama.cpp rotates pairs of adjacent components.
    """
    target = folder / "model.gguf"
    if target.exists():
        return target
    import gguf  # type: ignore[import-not-found]
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    permuted = {"q_proj": heads, "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        count = permuted.get(name.split(".")[-2])
        pairs = tensor if count is None else tensor.reshape(count, 2, -1, tensor.shape[1]).swapaxes(1, 2)
        rows = np.ascontiguousarray(pairs).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), rows)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


class Decoder:
    """Decodes a batch of equally long sequences greedily, with llama.cpp's C interface.

    Args:
        settings: settings of the process.
    """

    def __init__(self, settings: Settings) -> None:
        import llama_cpp  # type: ignore[import-not-found]

        self._llama = llama_cpp
        self._threads = settings.threads
        llama_cpp.llama_backend_init()
        for endpoint in start_servers(settings.servers, settings.threads):
            add_server(endpoint)
        options = llama_cpp.llama_model_default_params()
        options.n_gpu_layers = 999 if settings.servers else 0
        file = str(convert(Path(settings.folder))).encode()
        self._model = llama_cpp.llama_model_load_from_file(file, options)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape = (0, 0, 0)
        """Number of sequences of the context, and numbers of tokens of each prompt and answer."""

    def prepare(self, prompts: list[list[int]], new: int) -> Callable[[], list[list[int]]]:
        """Make an empty context for these prompts; return the function that generates the tokens."""
        llama, shape = self._llama, (len(prompts), len(prompts[0]), new)
        if shape != self._shape:
            if self._context is not None:
                llama.llama_free(self._context)
            padded = -(-(len(prompts[0]) + new) // _PADDED_TOKENS) * _PADDED_TOKENS
            options = llama.llama_context_default_params()
            options.n_seq_max, options.n_ctx = len(prompts), len(prompts) * padded
            options.n_batch, options.n_ubatch = len(prompts) * len(prompts[0]), _STEP_TOKENS
            options.n_threads = options.n_threads_batch = self._threads
            options.type_k = options.type_v = llama.GGML_TYPE_F32
            # The faster choices, as measured: a unified cache computes attention between sequences, too, and flash
            # attention is faster for prompts, but slower for decoding.
            options.kv_unified = False
            options.flash_attn_type = int(new == 1)
            self._context, self._shape = llama.llama_init_from_model(self._model, options), shape
        llama.llama_memory_clear(llama.llama_get_memory(self._context), 0)
        return partial(self._generate, prompts, new)

    def _generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        count, length = len(prompts), len(prompts[0])
        sequences = np.arange(count, dtype=np.int32)
        samples = np.arange(length) == length - 1
        drawn = [
            self._decode(
                np.array(prompts, np.int32).reshape(-1),
                np.tile(np.arange(length, dtype=np.int32), count),
                np.repeat(sequences, length),
                np.tile(samples, count),
            )
        ]
        for position in range(length, length + new - 1):
            positions = np.full(count, position, np.int32)
            drawn.append(self._decode(drawn[-1], positions, sequences, np.ones(count, bool)))
        texts: list[list[int]] = np.stack(drawn, axis=1).tolist()
        return texts

    def _decode(self, tokens: Any, positions: Any, sequences: Any, samples: Any) -> Any:
        """Compute ``[tokens]`` positions; return the most probable next tokens of those in ``samples``."""
        llama = self._llama
        counts = np.ones(len(tokens), np.int32)
        outputs = samples.astype(np.int8)
        places = sequences.ctypes.data + sequences.itemsize * np.arange(len(tokens), dtype=np.uintp)
        fields = {
            "token": tokens,
            "pos": positions,
            "n_seq_id": counts,
            "seq_id": places,
            "logits": outputs,
        }
        batch = llama.llama_batch(n_tokens=len(tokens))
        for name, kind in llama.llama_batch._fields_:
            if name in fields:
                setattr(batch, name, ctypes.cast(fields[name].ctypes.data, kind))
        if code := llama.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode failed with code {code}")
        logits = np.ctypeslib.as_array(
            llama.llama_get_logits(self._context), (int(outputs.sum()), self._vocabulary)
        )
        return logits.argmax(1).astype(np.int32)


# -- RPC -------------------------------------------------------------------------------------------------------------


def start_servers(count: int, threads: int) -> list[str]:
    """Start RPC servers that end with this process; return their endpoints."""
    endpoints = []
    for _ in range(count):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen([sys.executable, "-E", __file__, "serve", str(port), str(threads)])
        atexit.register(server.kill)
        endpoints.append(f"127.0.0.1:{port}")
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except ConnectionRefusedError:
                if server.poll() is not None:
                    raise RuntimeError("an RPC server ended") from None
                time.sleep(0.1)
            else:
                break
    return endpoints


def serve(port: int, threads: int) -> None:
    """Run an RPC server, which computes on the CPU."""
    ggml = library()
    ggml.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    devices = (ctypes.c_void_p * 1)(ggml.ggml_backend_dev_by_type(_CPU))
    size = ctypes.c_size_t
    ggml.ggml_backend_rpc_start_server(f"127.0.0.1:{port}".encode(), None, size(threads), size(1), devices)


def add_server(endpoint: str) -> None:
    """Make an RPC server a device of this process."""
    ggml = library()
    ggml.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
    ggml.ggml_backend_register(ctypes.c_void_p(ggml.ggml_backend_rpc_add_server(endpoint.encode())))


def library() -> ctypes.CDLL:
    """Return ggml.

    Raises:
        RuntimeError: it was built without RPC.
    """
    from llama_cpp._ggml import libggml  # type: ignore[import-not-found]

    if not hasattr(libggml, "ggml_backend_rpc_add_server"):
        raise RuntimeError("llama-cpp-python was built without RPC: install it with CMAKE_ARGS=-DGGML_RPC=ON")
    found: ctypes.CDLL = libggml
    return found


def start(settings: Settings) -> Prepare:
    """Load the model; return the function that prepares a call."""
    return Decoder(settings).prepare


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*map(int, sys.argv[2:]))
    else:
        answer_requests(start)
