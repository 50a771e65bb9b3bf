"""Wrong inputs from the terminal, from programs and from the form: each message says what, where, and what to do."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from tests.api.conftest import Plane
from tests.api.playing import Cluster

from share_compute.scopes import Scope
from share_compute_api import cli
from share_compute_api.client.client import Client
from share_compute_api.control.patience import Patience

LIBRARIES = re.compile(
    r"Input should|Value error|Field required|Extra inputs|pydantic|Traceback|Errno|_ssl\.c|NoneType|\bstr\b|\bdict\b|"
    r"Expecting|delimiter|JSON decode|Invalid value for|Got unexpected|No such|find expected|internal server error"
)
"""Sentences of libraries, which no message has."""
OF_HTTP = re.compile(r"\b(?:HTTP header|header|body|request|GET|POST|Content-Type|status 4\d\d|query)\b")
"""Words that only users of REST know."""
LAYERS = [{"type": "linear", "options": {"in_features": 64, "out_features": 10}}]
JOB: dict[str, Any] = {"model": {"layers": LAYERS}, "data": {"dataset": "digits"}}
NOWHERE = "http://127.0.0.1:1"
INVITE = "abcd-efgh-ijkl-mnop"


class World(NamedTuple):
    """Objects that wrong inputs name."""

    folder: Path
    url: str
    job: str
    """Id of a queued job with the name digits."""
    chat_key: str
    """Key with the scope chat alone; another one has the same name."""


class Answer(NamedTuple):
    text: str
    hint: str
    exit_code: int


Command = Callable[..., Answer]


@pytest.fixture
def world(plane: Plane, client: Client, digits: dict[str, Any], tmp_path: Path) -> World:
    Cluster(plane.store, tmp_path, Patience()).contributor("ada-desktop")
    (tmp_path / "text.txt").write_text("a line\n" * 100)
    (tmp_path / "table.csv").write_text("size,kind\n1,a\n2,b\n")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1" + b"\x01\xff" * 50 + b"PAR1")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{bad\n')
    (tmp_path / "bytes.yaml").write_bytes(bytes(range(128, 256)))
    (tmp_path / "zeros.yaml").write_bytes(bytes(8))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    (tmp_path / "program.exe").write_bytes(b"x")
    (tmp_path / "latin.txt").write_bytes("Köln\n".encode("latin-1") * 50)
    (tmp_path / "broken.yaml").write_text("model: {layers: [\n")
    (tmp_path / "wrong.yaml").write_text("name: a\ntraining:\n  steps: many\n")
    (tmp_path / "absent.yaml").write_text(
        f"model: {{config: {{model_type: llama, vocab_size: 300}}}}\ndata:\n  files: [{tmp_path}/none.txt]\n"
    )
    (tmp_path / "machines.yaml").write_text("machines: 3\n")
    plane.store.keys.create("chat", [Scope.read])
    client.create_invite("for Ada")
    return World(
        tmp_path, plane.url, client.submit(digits).id, plane.store.keys.create("chat", [Scope.chat])[1]
    )


@pytest.fixture
def command(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run a command in this process, and return its error and its exit code."""

    def run(*words: object, text: str = "", **environment: str) -> Answer:
        given = {
            "SHARE_COMPUTE_URL": plane.url,
            "SHARE_COMPUTE_API_KEY": plane.api_key,
            "SHARE_COMPUTE_DATA_FOLDER": str(tmp_path / "elsewhere"),
            **environment,
        }
        capsys.readouterr()
        with monkeypatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            patch.setattr(sys, "argv", ["share-compute", *map(str, words)])
            patch.setattr(sys, "stdin", io.StringIO(text))
            with pytest.raises(SystemExit) as ended:
                cli.main()
        *problems, hint = capsys.readouterr().err.splitlines()
        return Answer("\n".join(problems) or hint, hint.strip(), int(ended.value.code or 0))

    return run


def model(**config: Any) -> dict[str, Any]:
    return {"model": {"config": {"vocab_size": 300, **config}}, "data": {"files": ["text.txt"]}}


def table(file: str, **columns: Any) -> dict[str, Any]:
    return {**JOB, "task": "tabular_classification", "data": {"files": [file], "table": columns}}


JOBS: dict[str, tuple[Any, str]] = {
    "a field in the wrong place": (
        {**JOB, "training": {"learning_rate": 0.1}},
        r"training\.learning_rate: .*did you mean 'training\.optimizer\.learning_rate'",
    ),
    "a field with a typing error, deep": (
        {**JOB, "training": {"optimizer": {"learning_rte": 0.1}}},
        r"training\.optimizer\.learning_rte: unknown key .*'learning_rate'",
    ),
    "a field of another program": ({**JOB, "training": {"precision": "fp16"}}, r"precision: .*'float16'\?"),
    "several problems, one on each line": (
        {**JOB, "training": {"steps": "many", "batchsize": 2}, "epochs": 3},
        r"steps: must be a whole number, not 'many'\n +training\.batchsize: .*'batch_size'\?\n +epochs: unknown",
    ),
    "half a step": ({**JOB, "training": {"steps": 2.5}}, r"training\.steps: must be a whole number"),
    "text for a list": ({**JOB, "tags": "a"}, r"tags: must be a list"),
    "a negative number": ({**JOB, "training": {"steps": -3}}, r"training\.steps: must be at least 1"),
    "a huge number": ({**JOB, "training": {"steps": 10**30}}, r"training\.steps: must be at most"),
    "NaN": (
        {**JOB, "training": {"optimizer": {"learning_rate": float("nan")}}},
        r"training\.optimizer\.learning_rate: must be a finite number",
    ),
    "a bad label": ({**JOB, "parallelism": {"only": ["gpu="]}}, r"parallelism\.only: .*gpu"),
    "a machine that is wanted and avoided": (
        {**JOB, "parallelism": {"only": ["ada"], "avoid": ["ada"]}},
        r"parallelism: only and avoid both name 'ada'",
    ),
    "an unknown strategy": (
        {**JOB, "parallelism": {"strategy": "unifrom"}},
        r"parallelism\.strategy: .*'uniform'",
    ),
    "a name with other characters": (
        {**JOB, "name": "a/b"},
        r"name: must begin with a letter, a digit or _, and have only",
    ),
    "full-width digits": (
        {**JOB, "training": {"steps": "\uff11\uff10\uff10"}},
        r"steps: must be a whole number, .*; write 100",
    ),
    "a time with a unit": (
        {
            **JOB,
            "training": {
                "synchronization": {"kind": "local", "branches": 2, "quorum": 1, "grace_s": "5 minutes"}
            },
        },
        r"grace_s: must be a number of seconds, not '5 minutes'; write 300",
    ),
    "a decimal comma": (
        {**JOB, "training": {"optimizer": {"learning_rate": "0,001"}}},
        r"learning_rate: must be a number, not '0,001'; write 0\.001",
    ),
    "a word that YAML reads as another type": (
        {**JOB, "name": True},
        r"name: must be text, not true; put it in quotes",
    ),
    "a name for a mapping": (
        {**JOB, "training": {"optimizer": "adam"}},
        r"training\.optimizer: must be a mapping of keys to values, not 'adam'",
    ),
    "an optimizer with capitals": (
        {**JOB, "training": {"optimizer": {"name": "AdamW"}}},
        r"optimizer\.name: .*; did you mean 'adamw'\?",
    ),
    "a target in percent": (
        {**JOB, "training": {"validate_every": 1, "target": {"metric": "accuracy", "value": 95}}},
        r"training\.target\.value: accuracy is at most 1, and the target is 95",
    ),
    "text that is not UTF-8": (
        {**model(model_type="llama"), "data": {"files": ["latin.txt"]}},
        r"data\.files: \S+latin\.txt is not UTF-8 text: byte 2 begins no character",
    ),
    "a file that is no text": (
        {**model(model_type="llama"), "data": {"files": ["paper.pdf"]}},
        r"data: cannot read paper\.pdf; known",
    ),
    "a tokenizer that is none": (
        {**model(model_type="llama"), "tokenizer": {"path": "/FOLDER"}},
        r"tokenizer\.path: \S+ has no tokenizer",
    ),
    "an unknown kind": ({**JOB, "kind": "trian"}, r"unknown kind 'trian'; did you mean 'train'"),
    "no model": ({"data": {"dataset": "digits"}}, r"model: is missing"),
    "an unknown layer": (
        {**JOB, "model": {"layers": [{"type": "linaer"}]}},
        r"model\.layers\.0\.type: .*'linear'",
    ),
    "an unknown option of a layer": (
        {**JOB, "model": {"layers": [{"type": "linear", "options": {"in_feature": 4}}]}},
        r"model\.layers\.0: linear has no option 'in_feature'; did you mean 'in_features'",
    ),
    "an unknown architecture": (
        model(model_type="lama"),
        r"model\.config: unknown model_type 'lama'; .*'llama'",
    ),
    "an unknown key of a configuration": (
        model(model_type="llama", hidden_sise=64),
        r"model\.config: unknown key 'hidden_sise'; did you mean 'hidden_size'",
    ),
    "heads that do not divide the hidden size": (
        model(model_type="qwen3", hidden_size=100, num_attention_heads=3, num_key_value_heads=3),
        r"model\.config: hidden_size 100 is not a multiple of num_attention_heads 3",
    ),
    "text for a size of a model": (
        model(model_type="llama", hidden_size="big"),
        r"model\.config: hidden_size must be a whole number, not 'big'",
    ),
    "a model that cannot be trained": (
        model(model_type="t5"),
        r"model\.config: architecture 't5' is no causal language model",
    ),
    "layers for text": (
        {**JOB, "data": {"files": ["text.txt"]}},
        r"model and data do not fit: declared layers train on a dataset",
    ),
    "a column that the data lacks": (
        table("table.csv", target="knid"),
        r"data\.table: .*table\.csv has no column 'knid'; did you mean 'kind'",
    ),
    "a damaged file": (
        table("damaged.parquet", target="kind"),
        r"data\.table: .*damaged\.parquet cannot be read as \.parquet: it is no \.parquet file, or it is damaged",
    ),
    "a file that does not exist": (
        {**model(model_type="llama"), "data": {"files": ["corpus.txt"]}},
        r"data\.files: \S+corpus\.txt does not exist",
    ),
    "a file that jobs may not read": (
        {**model(model_type="llama"), "data": {"files": ["/etc/secret.txt"]}},
        r"data\.files: /etc/secret\.txt is not below a folder that jobs may read",
    ),
    "machines for the batch of a deployment": (
        {
            **model(model_type="llama"),
            "then": {
                "serve": {"name": "a"},
                "generate": {
                    "data": {"files": ["rows.jsonl"], "prompt": "text"},
                    "parallelism": {"only": ["ada"]},
                },
            },
        },
        r"then: generate\.parallelism: the deployment of serve answers the rows",
    ),
}
"""Case -> job, and a pattern of the message."""
TEXTS: dict[str, tuple[str, str]] = {
    "an empty file": ("", r"the job file is empty"),
    "a comment alone": ("# nothing\n", r"the job file is empty"),
    "a list": ("- a\n", r"a job is a mapping of keys to values, not a list"),
    "a word": ("hello\n", r"a job is a mapping of keys to values, not text"),
    "a bracket that is not closed": (
        "model: {layers: [\ndata: x\n",
        r"at line 2, column 1: a list that begins with \[",
    ),
    "a tab": ("model:\n\tlayers: []\n", r"at line 2, column 1: .*indent with spaces, not tabs"),
    "two colons": ("name: a: b\n", r"at line 1, column 8: a second colon"),
    "a quote that is not closed": ("name: 'a\n", r"at line 1, .*: a text has no closing quote"),
    "a full-width colon": (
        "name\uff1aa\nmodel:\n  layers: []\n",
        r"line 1 has the full-width mark \uff1a; write : instead",
    ),
    "a full-width colon alone": ("name\uff1aa\n", r"line 1 has the full-width mark \uff1a"),
    "two documents": ("name: a\n---\nname: b\n", r"at line 2, .*: a second document begins with ---"),
    "an at sign": ("name: @home\n", r"at line 1, column 7: no value begins with @; put the text in quotes"),
    "a fence of Markdown": ("```yaml\nname: a\n```\n", r"at line 1, .*: a line with ``` is no YAML"),
    "a number that begins with a zero": (
        "training: {steps: 0100}\n",
        r"at line 1, column 19: 0100 begins with a zero; write it without, or",
    ),
    "a number in base 60": (
        "model: {path: /x}\ndata: {files: [a.txt]}\ntraining: {steps: 1:30}\n",
        r"training\.steps: must be a whole number, not '1:30'",
    ),
    "a key twice": ("name: a\nname: b\n", r"at line 2, column 1: 'name' is given twice"),
}
COMMANDS: dict[str, tuple[Callable[[World], tuple[object, ...]], int, str]] = {
    "a file that is not YAML": (
        lambda at: ("submit", at.folder / "broken.yaml"), 2, r"broken\.yaml: the job file is not valid YAML at line 1",
    ),
    "a file with a wrong field": (
        lambda at: ("submit", at.folder / "wrong.yaml"), 2, r"wrong\.yaml:3: training\.steps: must be a whole number",
    ),
    "a file with a field that the server refuses": (
        lambda at: ("submit", at.folder / "absent.yaml"), 2, r"absent\.yaml:3: data\.files: \S+none\.txt does not",
    ),
    "a topology without a kind": (
        lambda at: ("plan", at.folder / "job.yaml", "--topology", at.folder / "machines.yaml"), 2, r"machines\.yaml: ",
    ),
    "an empty tag": (lambda at: ("tag", at.job, "--add", ""), 2, r"--add '': must have at least 1 character"),
    "an empty group": (lambda at: ("tag", at.job, "--group", ""), 2, r"--group '': must have at least 1 character"),
    "a negative number of replicas": (lambda _: ("scale", "lama", "-1"), 2, r"no option '-1'; no number is negative"),
    "an address without a scheme": (
        lambda _: ("join", "192.168.1.5:8700", "--invite", INVITE), 2, r"did you mean 'https://192\.168\.1\.5:8700'\?",
    ),
    "an address of this machine without a scheme": (
        lambda _: ("join", "localhost:8700", "--invite", INVITE), 2, r"did you mean 'http://localhost:8700'\?",
    ),
    "an address without a scheme of a server with TLS": (
        lambda _: ("join", "localhost:8700", "--invite", f"{INVITE}.{64 * 'a'}"), 2,
        r"did you mean 'https://localhost:8700'\?",
    ),
    "the word of the documentation": (
        lambda at: ("join", at.url, "--invite", "CODE"), 2, r"the invite is cut off or mistyped: .* four groups",
    ),
    "an invite that is cut at its dot": (
        lambda at: ("join", at.url, "--invite", f"{INVITE}."), 2, r"the invite is cut off or mistyped: .* 0 characters",
    ),
    "an invite that is cut": (
        lambda at: ("join", at.url, "--invite", f"{INVITE}.ab"), 2, r"the invite is cut off or mistyped: 'ab' is not",
    ),
    "a name with a space": (
        lambda at: ("join", at.url, "--invite", INVITE, "--name", "my box"), 2, r"--name: 'my box': must begin with",
    ),
    "a long name": (lambda at: ("join", at.url, "--name", 64 * "a"), 2, r"--name: 'a+': must have at most 63"),
    "bytes": (lambda at: ("submit", at.folder / "bytes.yaml"), 2, r"bytes\.yaml is not UTF-8 text"),
    "zeros": (lambda at: ("submit", at.folder / "zeros.yaml"), 2, r"the job file is not text"),
    "a folder": (lambda at: ("submit", at.folder), 2, r"is a folder, not a file"),
    "a missing file": (
        lambda at: ("submit", at.folder / "jbo.yaml"), 2, r"jbo\.yaml does not exist; did you mean 'job\.yaml'",
    ),
    "the name of a job": (
        lambda _: ("show", "digits"), 3, r"there is no job digits; did you mean 'job-\w+', whose name is digits",
    ),
    "an id with a typing error": (
        lambda at: ("logs", f"{at.job[:-1]}0"), 3, r"there is no job \S+; did you mean 'job-\w+'",
    ),
    "a missing argument": (lambda _: ("show",), 2, r"JOB is missing"),
    "an unknown machine": (
        lambda _: ("remove", "ada-desktp", "--yes"), 3, r"no machine ada-desktp; did you mean 'ada-desktop'",
    ),
    "an unknown key": (
        lambda _: ("keys", "revoke", "chatt"), 3, r"there is no API key chatt; did you mean 'chat'",
    ),
    "a name of two keys": (
        lambda _: ("keys", "revoke", "chat"), 2, r"2 keys are named chat: key-\w+ and key-\w+",
    ),
    "the label of an invite": (
        lambda _: ("invite", "revoke", "for Ada"), 3, r"did you mean 'inv-\w+', whose name is for Ada",
    ),
    "a machine to clear": (lambda _: ("clear", "ada-desktp"), 3, r"no machine ada-desktp; did you mean"),
    "an unknown deployment": (lambda _: ("scale", "lama", "2"), 3, r"there is no deployment lama"),
    "a wrong number of replicas": (lambda _: ("scale", "lama", "many"), 2, r"replicas: 'many' is neither"),
    "a name of a deployment with a space": (
        lambda at: ("serve", at.folder, "--name", "my model"), 2, r"--name: must begin with a letter or a digit",
    ),
    "compiled code in several ranks": (
        lambda at: ("serve", at.folder, "--compile", "on", "--tensor", "3"), 2,
        r"^error\S* compile on needs parallelism\.tensor 1",
    ),
    "the label of an invite of up": (
        lambda _: ("invite", "--label", "this machine"), 2, r"label: must be another text than 'this machine'",
    ),
    "replicas in the wrong order": (
        lambda at: ("serve", at.folder, "--replicas", "4..1"), 2, r"--replicas: max \(1\) must not be less than min",
    ),
    "an unknown model": (lambda _: ("chat", "lama"), 3, r"there is no model lama"),
    "a model that does not exist": (
        lambda at: ("serve", at.folder / "llama"), 2, r"model\.path: \S+llama does not exist on the server",
    ),
    "an unknown artifact": (lambda at: ("artifacts", "get", at.job, "modle"), 3, r"has no artifact modle"),
    "a wrong time": (lambda at: ("logs", at.job, "--since", "soon"), 2, r"--since: 'soon' is not a time"),
    "a negative number of events": (lambda at: ("logs", at.job, "--tail", "-1"), 2, r"--tail: must be at least 0"),
    "an unknown state": (
        lambda _: ("jobs", "--state", "runing"), 2, r"--state: 'runing' is not one of .*did you mean 'running'",
    ),
    "an unknown command": (lambda _: ("sumbit", "x"), 2, r"no command 'sumbit'; did you mean submit"),
    "a command with two near ones": (lambda _: ("sweve",), 2, r"no command 'sweve'; did you mean serve or \w+\?"),
    "how a machine leaves": (lambda _: ("leave",), 2, r"no command 'leave'$"),
    "an unknown option": (lambda _: ("jobs", "--stat", "x"), 2, r"no option '--stat'; did you mean --state"),
    "one argument too many": (lambda at: ("show", at.job, "b"), 2, r"unexpected argument 'b'"),
    "an invite of no time": (lambda _: ("invite", "--expires", "0s"), 2, r"--expires: '0s' is out of range"),
    "an invite for ever": (lambda _: ("invite", "--expires", "99999999d"), 2, r"--expires: .* is out of range"),
    "failures without a pause": (
        lambda at: ("chaos", "--job", at.job, "--mtbf", "0s"), 2, r"--mtbf: '0s' is out of range",
    ),
    "memory without a unit": (lambda _: ("invite", "--memory", "8"), 2, r"--memory: '8' is not a size of memory"),
    "negative memory": (
        lambda at: ("join", at.url, "--invite", INVITE, "--memory", "-8GiB"), 2, r"--memory: '-8GiB' is not a size",
    ),
    "a label without a value": (
        lambda at: ("join", at.url, "--invite", INVITE, "--label", "gpu"), 2, r"--label: 'gpu' is no label",
    ),
    "a wrong rate": (
        lambda at: ("join", at.url, "--invite", INVITE, "--upload-limit", "10"), 2, r"--upload-limit: '10' is not",
    ),
    "no URL": (lambda _: ("join", "hallo", "--invite", INVITE), 2, r"'hallo' is not the URL of a server"),
    "an unknown scope": (
        lambda _: ("keys", "create", "x", "--scope", "reed"), 2, r"--scope: 'reed' is not one of .*'read'\?",
    ),
    "an unknown invite": (lambda _: ("invite", "revoke", "inv-none"), 3, r"there is no invite inv-none"),
    "a wrong strategy": (
        lambda at: ("plan", at.folder / "job.yaml", "--strategy", "unifrom"), 2, r"strategy 'unifrom'; .*'uniform'",
    ),
    "a file of no known kind": (lambda at: ("upload", at.folder / "program.exe"), 2, r"program\.exe is no file of"),
    "nothing to upload": (lambda at: ("upload", at.folder / "none"), 2, r"none does not exist"),
    "an unknown setting": (lambda _: ("config", "prot"), 3, r"no setting is called prot; did you mean 'port'"),
    "an unknown format": (lambda at: ("metrics", at.job, "-o", at.folder / "a.xls"), 2, r"a\.xls does not end in"),
}  # fmt: skip
"""Case -> command, exit code, and a pattern of the message."""
CONNECTIONS: dict[str, tuple[Callable[[World], dict[str, str]], int, str, str]] = {
    "a wrong port": (
        lambda _: {"SHARE_COMPUTE_URL": NOWHERE},
        8,
        r"answers at http://127\.0\.0\.1:1: nothing listens at this port",
        r"check the port",
    ),
    "an unknown host": (
        lambda _: {"SHARE_COMPUTE_URL": "http://nowhere.invalid:8700"},
        8,
        r"no computer with the name nowhere\.invalid is known",
        r"check the name",
    ),
    "TLS to a server without": (
        lambda at: {"SHARE_COMPUTE_URL": at.url.replace("http:", "https:")},
        8,
        r"what listens there does not use TLS",
        r"http://",
    ),
    "a port that is none": (
        lambda _: {"SHARE_COMPUTE_URL": "http://127.0.0.1:port"},
        2,
        r"is not the URL of a server",
        r"https://192\.0\.2\.1:8700",
    ),
    "a fingerprint that is none": (
        lambda _: {"SHARE_COMPUTE_FINGERPRINT": "abc"},
        2,
        r"'abc' is not a fingerprint",
        r"copy",
    ),
    "a wrong key": (
        lambda _: {"SHARE_COMPUTE_API_KEY": "sck_wrong"},
        5,
        r"this API key is not valid",
        r"SHARE_COMPUTE_API_KEY",
    ),
    "a key with other letters": (
        lambda _: {"SHARE_COMPUTE_API_KEY": "密钥"},
        5,
        r"the API key has characters that no key has",
        r"SHARE_COMPUTE_API_KEY",
    ),
    "a language that is none": (
        lambda _: {"SHARE_COMPUTE_LANGUAGE": "klingon"},
        2,
        r"SHARE_COMPUTE_LANGUAGE: must be 'en' or 'zh'",
        r"environment variable",
    ),
    "a URL with a path": (
        lambda at: {"SHARE_COMPUTE_URL": f"{at.url}/dashboard"},
        2,
        r"http://127\.0\.0\.1:\d+/ is no share-compute server",
        r"the URL of a server has no path",
    ),
    "a missing scope": (
        lambda at: {"SHARE_COMPUTE_API_KEY": at.chat_key},
        5,
        r"needs the scope read; this key has chat",
        r"ask an operator for a key with this scope",
    ),
}
REQUESTS: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "a body that is not JSON": ("POST", "/jobs", {"content": b"{"}, 422, r"not valid JSON at line 1, column 2: a key"),
    "an empty body": ("POST", "/jobs", {"content": b""}, 422, r"the body is empty"),
    "a body that FastAPI reads": ("POST", "/invites", {"content": b"{"}, 422, r"not valid JSON at character 2: a key"),
    "two wrong fields": (
        "POST", "/invites", {"json": {"expires_in_s": -1, "uses": "x"}}, 422,
        r"expires_in_s: must be more than 0; uses: must be a whole number",
    ),
    "an unknown scope": ("POST", "/keys", {"json": {"name": "x", "scopes": ["reed"]}}, 422, r"scopes\.0: .*'read'\?"),
    "a wrong query": ("GET", "/jobs?limit=many", {}, 422, r"query\.limit: must be a whole number"),
    "an unknown state": ("GET", "/jobs?state=runing", {}, 422, r"query\.state\.0: .*'running'\?"),
    "a wrong cursor": ("GET", "/jobs?cursor=xyz", {}, 422, r"the cursor is invalid"),
    "an unknown machine": ("GET", "/contributors/con-none", {}, 404, r"there is no machine con-none"),
    "an unknown route": ("GET", "/jbos", {}, 404, r"there is nothing at /api/v1/jbos"),
    "a list for a mapping": ("PATCH", "/jobs/job-none", {"json": ["a"]}, 422, r"the body: must be a mapping of keys"),
    "a wrong label": ("PATCH", "/jobs/job-none", {"json": {"tag": ["a"]}}, 422, r"tag: unknown key .*'tags'\?"),
    "an unknown strategy": (
        "POST", "/plans", {"json": {"job": JOB, "strategy": "unifrom"}}, 422, r"'unifrom'; did you mean 'uniform'",
    ),
}  # fmt: skip


def in_folder(job: Any, folder: Path) -> str:
    """Return a job file whose relative paths are below the folder."""
    text = yaml.safe_dump(job)
    text = text.replace("/FOLDER", str(folder))
    return re.sub(r"^(\s*- )(\w+\.(?:txt|csv|parquet|jsonl))$", rf"\g<1>{folder}/\2", text, flags=re.M)


def faults(answer: Answer, exit_code: int, pattern: str) -> Iterator[str]:
    """Yield what an answer of a command lacks."""
    if answer.exit_code != exit_code:
        yield f"exit code {answer.exit_code}"
    if not answer.text.startswith("error:") or not re.search(pattern, answer.text):
        yield "the message does not say what and where"
    if not answer.hint:
        yield "no hint"
    whole = f"{answer.text} {answer.hint}"
    for words in (LIBRARIES, OF_HTTP):
        if found := words.search(whole):
            yield f"the words {found[0]!r}"


def test_wrong_jobs_from_the_terminal(world: World, command: Command) -> None:
    wrong = []
    given = {case: (in_folder(job, world.folder), pattern) for case, (job, pattern) in JOBS.items()}
    for case, (text, pattern) in {**given, **TEXTS}.items():
        answer = command("submit", "-", text=text)
        wrong += [(case, fault, answer) for fault in faults(answer, 2, pattern)]
    assert wrong == []


def test_wrong_commands(world: World, command: Command) -> None:
    wrong = []
    for case, (words, exit_code, pattern) in COMMANDS.items():
        answer = command(*words(world))
        wrong += [(case, fault, answer) for fault in faults(answer, exit_code, pattern)]
    assert wrong == []
    assert "did you mean 8GiB?" in command("invite", "--memory", "8").hint


def test_wrong_connections(world: World, command: Command) -> None:
    wrong = []
    for case, (environment, exit_code, pattern, hint) in CONNECTIONS.items():
        answer = command("jobs", **environment(world))
        wrong += [(case, fault, answer) for fault in faults(answer, exit_code, pattern)]
        if not re.search(hint, answer.hint):
            wrong.append((case, "the hint", answer))
    assert wrong == []


def test_usage_errors_are_json_for_scripts(command: Command) -> None:
    answer = command("jobs", "--limit", "0", "--json")
    assert json.loads(answer.text)["error"]["code"] == "invalid-request"


def test_wrong_jobs_in_the_form(world: World, http: httpx.Client) -> None:
    """The form shows the problems of the route that checks a job, each beside its field."""
    wrong = []
    for case, (job, pattern) in JOBS.items():
        if case == "NaN":  # JSON has no NaN
            continue
        checked = http.post("/jobs/check", json=yaml.safe_load(in_folder(job, world.folder))).json()
        problems = checked.get("problems") or []
        text = "\n       ".join(": ".join(filter(None, (one["field"], one["problem"]))) for one in problems)
        if not re.search(pattern, text) or LIBRARIES.search(text) or not checked.get("hint"):
            wrong.append((case, checked))
    assert wrong == []


def test_wrong_requests(http: httpx.Client) -> None:
    wrong = []
    for case, (method, path, options, status, pattern) in REQUESTS.items():
        headers = {"Content-Type": "application/json"}
        answer = http.request(method, path, **options, headers=headers)
        problem = answer.json()
        is_clear = re.search(pattern, problem["detail"]) and problem["hint"]
        if answer.status_code != status or not is_clear or LIBRARIES.search(answer.text):
            wrong.append((case, problem))
    assert wrong == []
