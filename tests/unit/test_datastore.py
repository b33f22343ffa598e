"""Datastores: files and their names, what a model writes, and that the one that comes with forerun is what it says."""

from __future__ import annotations

import io
import json
import random
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forerun import LLM
from forerun.drafters.datastore import (
    check_writable,
    datastore_name,
    find_datastore,
    own_path,
    read_datastore,
    write_datastore,
)
from forerun.engine.own_texts import MAX_TEXT_TOKENS, write_texts
from forerun.errors import ConfigError, LoadError, RequestError
from forerun.models.store import known_model, path_of
from forerun.types import SamplingParams

TEXTS = [[5, 6, 7], [9], [60_000, 5]]
ABOUT = {"model": "demo", "seed": 3}


@pytest.fixture(scope="module")
def demo() -> LLM:
    if not path_of(known_model("demo")).is_file():
        pytest.skip("the demo model is not in the cache; fetch it with: forerun pull demo")
    return LLM("demo", max_model_len=512)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.npz"
    write_datastore(path, TEXTS, ABOUT)
    store = read_datastore(path, 60_001)
    assert [text.tolist() for text in store.texts] == TEXTS
    assert all(text.dtype == np.int32 for text in store.texts)
    assert (store.about, store.num_tokens) == (ABOUT, 6)
    assert [file.name for file in path.parent.iterdir()] == ["store.npz"]
    write_datastore(path, [[70_000]], {})
    assert read_datastore(path, 70_001).texts[0].tolist() == [70_000]


def test_a_place_that_can_not_be_written_to_is_found_out_first(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    check_writable(tmp_path / "new" / "store.npz")
    assert list((tmp_path / "new").iterdir()) == []
    for path in (file / "store.npz", tmp_path):
        with pytest.raises(ConfigError, match="can't be written"):
            check_writable(path)
        with pytest.raises(ConfigError, match="can't be written"):
            write_datastore(path, TEXTS, ABOUT)


def arrays(**changes: Any) -> bytes:
    whole = {
        "token_ids": np.array([5, 6, 7], np.uint16), "lengths": np.array([2, 1], np.uint32), "about": json.dumps(ABOUT)
    }  # fmt: skip
    file = io.BytesIO()
    np.savez(file, **{key: value for key, value in {**whole, **changes}.items() if value is not None})
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "can't be read"),
        (b"no archive", "can't be read"),
        (arrays()[:-30], "can't be read"),
        (arrays(token_ids=None), "can't be read"),
        (arrays(token_ids=np.array([5.0, 6.0, 7.0])), "another kind"),
        (arrays(token_ids=np.array([[5, 6, 7]], np.uint16)), "another kind"),
        (arrays(token_ids=np.array([-5, 6, 7], np.int32)), "another kind"),
        (arrays(lengths=np.array([2, 2], np.uint32)), "don't add up"),
        (arrays(lengths=np.array([2, 1, 2**32 - 1], np.uint32)), "don't add up"),
        (arrays(token_ids=np.array([5, 6, 10], np.uint16)), "token 10, but the vocabulary has 10"),
        (arrays(about="{"), "can't be read"),
        (arrays(about=json.dumps([1])), "can't be read"),
        (arrays(token_ids=np.array([{}], object)), "can't be read"),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "store.npz"
    path.write_bytes(data)
    with pytest.raises(LoadError, match=message) as caught:
        read_datastore(path, 10)
    assert str(path) in str(caught.value)
    assert "forerun datastore" in str(caught.value)


def test_bytes_changed_at_random_never_end_in_another_error(tmp_path: Path) -> None:
    path = tmp_path / "store.npz"
    write_datastore(path, TEXTS, ABOUT)
    whole, rng, num_refused = path.read_bytes(), random.Random(1), 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data))
        try:
            read_datastore(path, 60_001)
        except LoadError:
            num_refused += 1
    assert num_refused > 100


def test_the_users_own_comes_before_the_one_that_is_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("forerun.drafters.datastore.resources.files", lambda package: tmp_path / package)
    assert find_datastore("name") is None
    shipped = tmp_path / "forerun.drafters" / "datastores" / "name.npz"
    write_datastore(shipped, TEXTS, {})
    assert find_datastore("name") == shipped
    write_datastore(own_path("name"), TEXTS, {})
    assert find_datastore("name") == own_path("name") == tmp_path / "cache" / "datastores" / "name.npz"


def test_names_tell_models_and_vocabularies_apart() -> None:
    config: Any = SimpleNamespace(
        architecture="llama", num_layers=30, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3,
        vocab_size=300,
    )  # fmt: skip

    def tokenizer(**changes: Any) -> Any:
        fields = {"vocab_size": 300, "eos_ids": (2,), "token_bytes": lambda i: b"%d" % i}
        return SimpleNamespace(**{**fields, **changes})

    name = datastore_name(config, tokenizer(), is_chat=True)
    assert name.startswith("llama-30x576-")
    assert name == datastore_name(config, tokenizer(), is_chat=True)
    others = {
        datastore_name(config, tokenizer(), is_chat=False),
        datastore_name(config, tokenizer(eos_ids=(3,)), is_chat=True),
        datastore_name(config, tokenizer(token_bytes=lambda i: b"%d!" % i), is_chat=True),
        datastore_name(SimpleNamespace(**{**vars(config), "num_kv_heads": 9}), tokenizer(), is_chat=True),  # type: ignore[arg-type]
    }
    assert len(others | {name}) == 5


@pytest.mark.real_model
def test_the_shipped_datastore_is_what_the_demo_model_writes(demo: LLM) -> None:
    path = find_datastore(demo.datastore_name)
    assert path is not None
    store = read_datastore(path, demo.config.vocab_size)
    assert store.num_tokens == store.about["num_tokens"] > 100_000
    assert path.stat().st_size < 2 << 20
    again = list(islice(write_texts(demo, store.about["seed"]), 2))
    assert again == [tuple(text.tolist()) for text in store.texts[:2]]


@pytest.mark.real_model
def test_questions_are_answered_in_turn_and_differently_each_time(demo: LLM) -> None:
    texts = list(islice(write_texts(demo, 5, ["Name a colour.", "Name an animal."]), 3))
    assert len(set(texts)) == 3
    assert all(0 < len(text) <= MAX_TEXT_TOKENS for text in texts)
    assert texts == list(islice(write_texts(demo, 5, ["Name a colour.", "Name an animal."]), 3))
    assert texts[0] != next(write_texts(demo, 6, ["Name a colour."]))


class _Silent:
    """A chat model that never ends a question, or whose template is odd."""

    has_chat_template = True

    def __init__(self, *conversations: list[int]) -> None:
        self._conversations = dict(zip(("A", "7"), conversations, strict=True))
        self.asked: list[tuple[list[int], SamplingParams]] = []

    def encode_messages(self, messages: Any) -> list[int]:
        return self._conversations[messages[0]["content"]]

    def generate(self, prompts: Any, params: SamplingParams, **_: Any) -> list[Any]:
        self.asked.append((prompts[0], params))
        return [SimpleNamespace(token_ids=(1,) * 128, text="and so on", finish_reason="length")]


def test_a_model_that_asks_nothing_is_given_up() -> None:
    model: Any = _Silent([1, 2, 50, 3, 4], [1, 2, 51, 3, 4])
    with pytest.raises(RequestError, match="no question in 64 tries"):
        next(write_texts(model, 0))
    assert {(tuple(prompt), params.stop_token_ids) for prompt, params in model.asked} == {((1, 2), (3,))}
    assert len({params.seed for _, params in model.asked}) == 64


@pytest.mark.parametrize("conversations", [([50, 3], [51, 3]), ([1, 50], [1, 51])])
def test_templates_without_a_place_for_the_user_are_refused(conversations: tuple[list[int], list[int]]) -> None:
    model: Any = _Silent(*conversations)
    with pytest.raises(RequestError, match="no room to speak"):
        next(write_texts(model, 0))
