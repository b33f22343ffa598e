"""tokenizer.json files made on the spot, against the library that defines the format."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from forerun.errors import LoadError, RequestError
from forerun.models.detokenizer import Detokenizer
from forerun.models.tokenizer import Tokenizer

CORPUS = ["the rain in spain, and then <b> there were 12 of them!", "  a plain  inn\n\tin the rain é"] * 20
SPECIAL = ["<s>", "</s>", "<|im_end|>"]
TEXTS = [
    "",
    " ",
    "the rain  in\nspain 12é",
    "  lead and trail  ",
    "<b>bold</b> the<b> <b>",
    "é e\u0301 日本 👍🏽",
    "the▁rain",
]
NAMED = ["<s>the", "a<s>b </s>c", "the<|im_end|>\n<|im_end|>", "<|im_end|", "x <s>"]


def trained(kind: str) -> tokenizers.Tokenizer:
    """A small tokenizer of one family, with three control tokens and the user-defined `<b>` and `<tool>`."""
    options: dict[str, Any] = {"special_tokens": ["<unk>", *SPECIAL], "show_progress": False}
    if kind == "byte-level":
        made = tokenizers.Tokenizer(models.BPE())
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=330, **options)
    elif kind == "metaspace":
        made = tokenizers.Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        made.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.UnigramTrainer(vocab_size=60, unk_token="<unk>", **options)
    elif kind == "wordpiece":
        made = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer = normalizers.BertNormalizer()
        made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        made.decoder = decoders.WordPiece(cleanup=False)
        trainer = trainers.WordPieceTrainer(vocab_size=90, **options)
    else:
        return llama_like()
    made.train_from_iterator(CORPUS, trainer)
    made.add_tokens([AddedToken("<b>", normalized=False), AddedToken("<tool>", normalized=False, rstrip=True)])
    return made


def llama_like() -> tokenizers.Tokenizer:
    """Bytes for what is unknown, spaces spelled out and one in front, as Llama 2 has it."""
    letters = list("▁abcdehilnoprstwuy.,!0123456789<>/|_m")
    merged = ["▁t", "he", "▁the", "in", "<s", "<s>", "▁▁"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab = {
        token: i for i, token in enumerate(["<unk>", *SPECIAL, *bytes_, *letters, *[m for m in merged if m != "<s>"]])
    }
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("<", "s"), ("<s", ">"), ("▁", "▁")]
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", *SPECIAL)])
    made.add_tokens([AddedToken("<b>", normalized=False), AddedToken("<tool>", normalized=False, rstrip=True)])
    return made


KINDS = ["byte-level", "metaspace", "wordpiece", "llama"]


def ours(library: tokenizers.Tokenizer, **config: Any) -> Tokenizer:
    return Tokenizer.from_tokenizer_json(library.to_str(), config)


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest) -> tokenizers.Tokenizer:
    return trained(request.param)


def test_ids_equal_the_library_f050(library: tokenizers.Tokenizer) -> None:
    tokenizer = ours(library)
    assert tokenizer.vocab_size == library.get_vocab_size()
    rng = random.Random(3)
    noise = ["".join(rng.choices("the rain<b>12 \né日/", k=30)) for _ in range(100)]
    for text in TEXTS + noise + ["<tool>  the <tool>\n"]:
        assert tokenizer.encode(text) == library.encode(text).ids, text
    for text in NAMED:
        assert tokenizer.encode(text, allow_special=True) == library.encode(text).ids, text


def test_control_tokens_never_arise_from_text_f049(library: tokenizers.Tokenizer) -> None:
    tokenizer = ours(library)
    unknown = {library.token_to_id("<unk>")}
    assert tokenizer.special_ids == unknown | {library.token_to_id(name) for name in SPECIAL}
    for text in [*NAMED, *SPECIAL, " ".join(SPECIAL)]:
        assert not (tokenizer.special_ids - unknown).intersection(tokenizer.encode(text)), text
    if unknown.isdisjoint(tokenizer.encode("<s>the")):
        assert tokenizer.decode(tokenizer.encode("<s>the")) in ("<s>the", "< s > the")


def test_user_defined_tokens_are_part_of_the_text(library: tokenizers.Tokenizer) -> None:
    tokenizer = ours(library)
    assert library.token_to_id("<b>") in tokenizer.encode("the<b>the")
    assert tokenizer.decode(tokenizer.encode("<b>")) == "<b>"


def test_decoding_equals_the_library_f028(library: tokenizers.Tokenizer) -> None:
    tokenizer = ours(library)
    for text in TEXTS[:5]:
        ids = library.encode(text).ids
        assert tokenizer.decode(ids) == library.decode(ids), text


def test_pieces_join_to_the_full_decode_f027(library: tokenizers.Tokenizer) -> None:
    tokenizer = ours(library)
    rng = random.Random(11)
    for _ in range(100):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(20)]
        for continues in (True, False):
            detokenizer = Detokenizer(tokenizer, continues=continues)
            pieces = [detokenizer.push([i]) for i in ids] + [detokenizer.finish()]
            assert "".join(pieces) == tokenizer.decode(ids, continues=continues)


def test_only_the_beginning_of_a_prompt_gets_a_space_where_the_file_says_so() -> None:
    library = trained("metaspace")
    tokenizer = ours(library)
    the, marked = library.token_to_id("the"), library.encode("the").ids
    assert the is not None or marked
    assert tokenizer.encode("the") == marked
    assert tokenizer.encode("<s>the", allow_special=True) == library.encode("<s>the").ids
    joined = tokenizer.encode("<s>", allow_special=True) + tokenizer.encode("the", continues=True)
    assert joined == library.encode("<s>the").ids
    assert joined[1:] != marked


def with_template(library: tokenizers.Tokenizer, *names: str) -> tokenizers.Tokenizer:
    pairs = [(name, library.token_to_id(name)) for name in names]
    template = processors.TemplateProcessing(
        single=" ".join([*names, "$A", "</s>"]), special_tokens=[*pairs, ("</s>", 2)]
    )
    library.post_processor = processors.Sequence([template, processors.ByteLevel(trim_offsets=False)])
    return library


@pytest.mark.parametrize(
    ("config", "bos_id", "count"),
    [
        ({}, 1, 1),
        ({"bos_token": "<s>"}, 1, 1),
        ({"bos_token": {"content": "<s>", "lstrip": False}}, 1, 1),
        ({"bos_token_id": 1, "add_bos_token": False}, 1, 0),
        ({"bos_token": "<|im_end|>"}, 3, 0),
    ],
)
def test_exactly_one_begin_token_f048(config: dict[str, Any], bos_id: int, count: int) -> None:
    tokenizer = ours(with_template(trained("byte-level"), "<s>"), **config)
    assert (tokenizer.bos_id, tokenizer.encode("the").count(1)) == (bos_id, count)
    assert tokenizer.encode("<s>the", allow_special=True).count(1) == 1


def test_begin_tokens_of_other_templates_f048() -> None:
    library = trained("byte-level")
    assert ours(library).bos_id is None
    assert ours(library, bos_token="<s>").adds_bos is False
    assert ours(library, bos_token="<s>", add_bos_token=True).encode("the")[0] == 1
    assert ours(with_template(library, "<s>", "<|im_end|>")).bos_id is None
    library.post_processor = processors.BertProcessing(("</s>", 2), ("<s>", 1))
    assert ours(library).encode("the")[0] == 1
    with pytest.raises(RequestError, match="no begin token"):
        ours(trained("byte-level")).encode("the", add_bos=True)


def test_end_ids_are_the_configured_then_the_known_ones() -> None:
    library = trained("byte-level")
    assert ours(library).eos_ids == (3,)
    assert ours(library, eos_token="</s>").eos_ids == (2, 3)
    assert ours(library, eos_token={"content": "</s>"}, eos_token_id=[3, 2]).eos_ids == (2, 3)
    assert ours(library, eos_token_id=1).eos_ids == (1, 3)
    assert 5 in ours(library, eos_token_id=[5]).special_ids
    for config in ({"eos_token_id": [9999]}, {"bos_token_id": -1}):
        with pytest.raises(LoadError, match=r"a begin or end token is .*, but must be an id between 0 and"):
            ours(library, **config)


def test_tokens_with_a_role_are_control_tokens_f049() -> None:
    library = trained("byte-level")
    tool = library.token_to_id("<tool>")
    for config in (
        {"eos_token": "<tool>"},
        {"pad_token": "<tool>"},
        {"additional_special_tokens": ["<tool>", {"content": "<none>"}]},
    ):
        tokenizer = ours(library, **config)
        assert tool in tokenizer.special_ids
        assert tool not in tokenizer.encode("<tool>")
        assert tokenizer.encode("<tool> x", allow_special=True) == [tool, library.token_to_id("x")]


def test_a_control_token_among_the_words_of_the_vocabulary_is_no_word_f049() -> None:
    data = json.loads(trained("byte-level").to_str())
    data["model"]["ignore_merges"] = True
    data["added_tokens"].append({"id": data["model"]["vocab"]["the"], "content": "the", "special": True})
    for key in ("single_word", "lstrip", "rstrip", "normalized"):
        data["added_tokens"][-1][key] = False
    tokenizer = Tokenizer.from_tokenizer_json(json.dumps(data))
    assert data["model"]["vocab"]["the"] not in tokenizer.encode("the")
    assert tokenizer.decode(tokenizer.encode("the")) == "the"


def test_ids_beyond_the_tokens_mean_nothing_f056() -> None:
    library = trained("byte-level")
    tokenizer = Tokenizer.from_tokenizer_json(library.to_str(), vocab_size=500)
    assert tokenizer.vocab_size == 500
    assert tokenizer.decode([499]) == ""
    assert Tokenizer.from_tokenizer_json(library.to_str(), vocab_size=5).vocab_size == library.get_vocab_size()


def broken(**changes: Any) -> str:
    return json.dumps(json.loads(trained("byte-level").to_str()) | changes)


def test_an_id_of_two_tokens_is_refused() -> None:
    """Whoever writes the one would make the other, which may be a control token (F049)."""
    data = json.loads(trained("byte-level").to_str())
    taken = data["model"]["vocab"]["a"]
    data["added_tokens"].append(dict(data["added_tokens"][0], id=taken, content="<x>"))
    with pytest.raises(LoadError, match=f"gives the id {taken} to two tokens, 'a' and '<x>'"):
        Tokenizer.from_tokenizer_json(json.dumps(data))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "tokenizer.json is not valid JSON"),
        ("[]", "tokenizer.json has no model.vocab"),
        ('{"model": {"vocab": 3}}', "tokenizer.json has no model.vocab"),
        (broken(added_tokens=[{"content": "a"}]), "added_tokens[0] of tokenizer.json must have an id"),
        (broken(added_tokens=[{"content": "a", "id": 1 << 40, "special": True}]), "has the token id 1099511627776"),
        (broken(model={"type": "BPE", "vocab": {"a": "b"}, "merges": []}), "tokenizer.json or its config is malformed"),
        (broken(model={"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}, added_tokens=[]), "is malformed"),
        ("[" * 100_000, "tokenizer.json is not valid JSON"),
        (broken(decoder=None), "the decoder of tokenizer.json is missing"),
        (broken(decoder={"type": "CTC"}), "the decoder of tokenizer.json is CTC"),
        (broken(pre_tokenizer={"type": "Nonsense"}), "can't be read by the tokenizers library"),
    ],
)
def test_malformed_files_are_refused(text: str, words: str) -> None:
    with pytest.raises(LoadError) as caught:
        Tokenizer.from_tokenizer_json(text)
    assert words in str(caught.value)
