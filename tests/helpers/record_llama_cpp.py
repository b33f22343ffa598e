"""Records what llama.cpp makes of the test texts, so that tests can compare with it where it is not installed.

    python -m tests.helpers.record_llama_cpp

writes tests/data/llama_cpp_pieces.json and tests/data/llama_cpp_ids.json. It needs the known models in the cache and
builds llama.cpp into the peers' folder on first use (8 minutes).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from rich.console import Console

from benchmarks.llama_cpp_env import VERSION, ensure_llama_cpp
from forerun.models.store import KNOWN_MODELS, path_of
from tests.helpers.gguf_files import byte_tokens
from tests.helpers.texts import MODEL_TEXTS, RULE_TEXTS, random_texts

DATA = Path(__file__).resolve().parents[1] / "data"
PIECES, IDS = DATA / "llama_cpp_pieces.json", DATA / "llama_cpp_ids.json"
COMMAND = "python -m tests.helpers.record_llama_cpp"
NUM_RANDOM_TEXTS = 30
RANDOM_SEED = 5

# All values of tokenizer.ggml.pre in src/llama-vocab.cpp of this version.
_NAMES = """
a.x-4.0 afmoe bailingmoe bailingmoe2 bloom chameleon chatglm-bpe codeshell cohere2moe command-r dbrx deepseek-coder
deepseek-llm deepseek-r1-qwen deepseek-v3 default exaone exaone-moe exaone4 f2llmv2 falcon falcon-h1 falcon3 gemma4
gigachat glm4 glm5 gpt-2 gpt-4o gpt3-finnish granite-docling granite-embed-multi-311m granite-embed-multi-97m grok-2
hunyuan hunyuan-dense hy_v4 jais jais-2 jina-de jina-es jina-v1-en jina-v2-code jina-v2-de jina-v2-es jina-v5-nano
joyai-llm kanana2 kimi-k2 kormo laguna lfm2 llada-moe llama-bpe llama-v3 llama3 llama4 megrez mellum mellum2 midm-2.0
minerva-7b minicpm5 minimax-m2 modern-bert mpt olmo phi-2 pixtral poro-chat qwen2 qwen35 refact roberta-bpe sarvam-moe
seed-coder smaug-bpe smollm solar-open spark2_5 stablelm2 starcoder superbpe talkie tekken tiny_aya trillion ufakzeka
viking whitespace youtu
"""
PRE_NAMES = tuple(_NAMES.split())
# Those that forerun refuses.
REFUSED_NAMES = ("default", "jina-v1-en", "jina-v2-code", "roberta-bpe", "whitespace")
RAW_NAMES = ("gemma4", "granite-embed-multi-311m", "sarvam-moe")
# Their own tokenizers compose a text (NFC) first, llama.cpp doesn't, so it gets composed ones.
COMPOSING_MODELS = ("qwen-coder-0.5b", "qwen-coder-1.5b")

_WORKER = """
import json, sys
from llama_cpp import Llama
job = json.load(sys.stdin)
overrides = {"tokenizer.ggml.pre": job["pre"]} if job["pre"] else None
llama = Llama(job["path"], vocab_only=True, verbose=False, kv_overrides=overrides)
encode = lambda text, special: llama.tokenize(text.encode(), add_bos=False, special=special)
json.dump([[encode(text, special) for text in job["texts"]] for special in (False, True)], sys.stdout)
"""


def model_texts() -> list[str]:
    """The texts whose ids are recorded."""
    return [*MODEL_TEXTS, *random_texts(NUM_RANDOM_TEXTS, RANDOM_SEED)]


def substrings(texts: Iterable[Sequence[str]]) -> tuple[list[str], list[str]]:
    """Tokens and merges by which every piece of every text becomes one token, so that the ids show the pieces."""
    tokens: dict[str, None] = {}
    merges: dict[str, None] = {}
    for text in texts:
        for start, end in itertools.combinations(range(len(text) + 1), 2):
            tokens["".join(text[start:end])] = None
            for middle in range(start + 1, end):
                merges[f"{''.join(text[start:middle])} {''.join(text[middle:end])}"] = None
    return list(tokens), list(merges)


def byte_vocabulary() -> tuple[list[str], list[str]]:
    """The substrings of RULE_TEXTS in the byte alphabet."""
    alphabet = byte_tokens()
    tokens, merges = substrings([[alphabet[byte] for byte in text.encode()] for text in RULE_TEXTS])
    return list(dict.fromkeys([*alphabet, *tokens])), merges


def raw_vocabulary() -> tuple[list[str], list[str]]:
    """The substrings of the lines in RULE_TEXTS, spelled with space marks, and the 256 bytes."""
    lines = [line for text in RULE_TEXTS for line in text.replace(" ", "\u2581").split("\n")]
    tokens, merges = substrings(lines)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    return list(dict.fromkeys([*names, *tokens, "\n", "\n\n"])), [*merges, "\n \n"]


def write_vocabulary(path: Path, tokens: Sequence[str], merges: Sequence[str]) -> None:
    """A GGUF file of a `gpt2` vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, "llama")
    for add in (writer.add_context_length, writer.add_embedding_length, writer.add_block_count):
        add(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges(list(merges))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def ids_of(python: Path, path: Path, texts: Sequence[str], pre: str | None = None) -> list[list[list[int]]]:
    """llama.cpp's ids of the texts, first with names of control tokens as text, then as those tokens."""
    job = json.dumps({"path": str(path), "texts": list(texts), "pre": pre})
    done = subprocess.run([str(python), "-c", _WORKER], input=job, capture_output=True, text=True, check=True)
    ids: list[list[list[int]]] = json.loads(done.stdout)
    return ids


def record_pieces(python: Path, folder: Path) -> dict[str, Any]:
    """How every name splits RULE_TEXTS: lengths in characters, once for all names that split alike."""
    names: dict[str, int | None] = dict.fromkeys(REFUSED_NAMES)
    rules: list[list[list[int]]] = []
    vocabularies = {False: byte_vocabulary(), True: raw_vocabulary()}
    for is_raw, (tokens, merges) in vocabularies.items():
        write_vocabulary(folder / f"{is_raw}.gguf", tokens, merges)
    alphabet = {char: byte for byte, char in enumerate(byte_tokens())}
    for name in [name for name in PRE_NAMES if name not in REFUSED_NAMES]:
        is_raw = name in RAW_NAMES
        tokens = vocabularies[is_raw][0]
        ids, _ = ids_of(python, folder / f"{is_raw}.gguf", RULE_TEXTS, name)
        if is_raw:
            lengths = [[len(tokens[token_id]) for token_id in text_ids] for text_ids in ids]
        else:
            texts = [
                [bytes(alphabet[char] for char in tokens[i]).decode("utf-8", "ignore") for i in row] for row in ids
            ]
            lengths = [list(map(len, pieces)) for pieces in texts]
        if lengths not in rules:
            rules.append(lengths)
        names[name] = rules.index(lengths)
        print(f"{name}: rule {names[name]}", file=sys.stderr)
    return {"names": names, "lengths": rules}


def record_ids(python: Path) -> dict[str, Any]:
    """The ids of `model_texts` in every known model, once for all models that agree."""
    models: dict[str, int] = {}
    vocabularies: list[dict[str, Any]] = []
    for name, model in KNOWN_MODELS.items():
        texts = model_texts()
        if name in COMPOSING_MODELS:
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        plain, special = ids_of(python, path_of(model), texts)
        # A text without control tokens' names has the same ids twice.
        found = {"plain": plain, "special": {str(i): ids for i, ids in enumerate(special) if ids != plain[i]}}
        if found not in vocabularies:
            vocabularies.append(found)
        models[name] = vocabularies.index(found)
    return {"models": models, "ids": vocabularies}


def fingerprint(texts: Iterable[str]) -> str:
    """Says whether a record is one of these texts."""
    return hashlib.sha256(json.dumps(list(texts)).encode()).hexdigest()


def save(path: Path, what: str, texts: Iterable[str], content: Mapping[str, Any]) -> None:
    """Writes a record with its provenance."""
    provenance = {"what": what, "command": COMMAND, "llama-cpp-python": VERSION, "texts_sha256": fingerprint(texts)}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance, **content}, separators=(",", ":")) + "\n", encoding="utf-8")


def load(path: Path, texts: Iterable[str]) -> dict[str, Any]:
    """A record of these texts; fails for one of others."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert content["provenance"]["texts_sha256"] == fingerprint(texts), f"the texts have changed; record: {COMMAND}"
    return content


def main() -> None:
    """Records both files."""
    python = ensure_llama_cpp(Console(stderr=True))
    with tempfile.TemporaryDirectory() as folder:
        pieces = record_pieces(python, Path(folder))
    save(PIECES, "lengths of the pieces of RULE_TEXTS, by the rule of each pre-tokenizer name", RULE_TEXTS, pieces)
    save(IDS, "token ids of model_texts() in the known models", model_texts(), record_ids(python))


if __name__ == "__main__":
    main()
