from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import EngineFault
from forerun.models.detokenizer import Detokenizer, StopMatcher, TextStream
from forerun.models.tokenizer import Tokenizer
from tests.helpers.toy_spm import spm, wordpiece
from tests.helpers.toy_vocab import TOY

IDS = st.lists(st.integers(0, TOY.vocab_size - 1), max_size=60)
SIZES = st.lists(st.integers(1, 8), min_size=60, max_size=60)
# Joiners, flags, Hangul syllables and jamo, combining accents, rare CJK, Arabic, and a byte order mark.
MIXED = st.text(alphabet=st.sampled_from("👩\u200d👧🏽🇩🇪한국ᄒ\u1161é\u0301𠜎漢مرحبا\ufeff \n<|im_end|>Z"), max_size=40)


def grouped(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for size in sizes:
        yield ids[start : start + size]
        start += size
    yield ids[start:]


@given(IDS, SIZES)
@settings(max_examples=200, deadline=None)
def test_pieces_of_any_ids_join_to_the_full_decode_f027(ids: list[int], sizes: list[int]) -> None:
    for skip_special in (True, False):
        detokenizer = Detokenizer(TOY, skip_special=skip_special)
        one_by_one = Detokenizer(TOY, skip_special=skip_special)
        pieces = [detokenizer.push(group) for group in grouped(ids, sizes)]
        assert pieces == ["".join(map(one_by_one.push_token, group)) for group in grouped(ids, sizes)]
        assert "".join(pieces) + detokenizer.finish() == TOY.decode(ids, skip_special)


@given(MIXED, SIZES)
@settings(max_examples=200, deadline=None)
def test_no_piece_ends_inside_a_character_f027(text: str, sizes: list[int]) -> None:
    ids = TOY.encode(text)
    detokenizer = Detokenizer(TOY)
    done, taken = "", 0
    for group in grouped(ids, sizes):
        done += detokenizer.push(group)
        taken += len(group)
        raw = b"".join(map(TOY.token_bytes, ids[:taken]))
        # All that is complete has come, and nothing else: the rest is less than one character.
        assert raw.startswith(done.encode())
        assert len(raw) - len(done.encode()) < 4
        assert text.startswith(done)
    assert done == text
    assert detokenizer.finish() == ""


def test_an_unfinished_character_is_one_replacement_mark_at_the_end() -> None:
    detokenizer = Detokenizer(TOY)
    assert detokenizer.push(TOY.encode("a👍")[:-1]) == "a"
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("text", [" a", "  a", "\n a", " ", "a  b "])
def test_spaces_are_those_of_the_full_decode_f028(text: str) -> None:
    detokenizer = Detokenizer(TOY)
    assert "".join(detokenizer.push([i]) for i in TOY.encode(text)) == text


@pytest.mark.parametrize("toy", [spm(), spm(add_space_prefix=False), spm(has_bytes=False), wordpiece()])
@given(data=st.data(), sizes=SIZES, skip_special=st.booleans(), continues=st.booleans())
@settings(max_examples=100, deadline=None)
def test_pieces_join_to_the_full_decode_in_every_family_f027_f028(
    toy: Tokenizer, data: st.DataObject, sizes: list[int], skip_special: bool, continues: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, toy.vocab_size - 1), max_size=60))
    detokenizer, one_by_one = (Detokenizer(toy, skip_special=skip_special, continues=continues) for _ in range(2))
    pieces = [detokenizer.push(group) for group in grouped(ids, sizes)] + [detokenizer.finish()]
    assert pieces[:-1] == ["".join(map(one_by_one.push_token, group)) for group in grouped(ids, sizes)]
    assert "".join(pieces) == toy.decode(ids, skip_special, continues=continues)


def test_byte_tokens_come_out_as_whole_characters_f027() -> None:
    toy = spm()
    detokenizer = Detokenizer(toy)
    pieces = [detokenizer.push([i]) for i in toy.encode("👍 ü", add_bos=False)]
    assert pieces == [" ", "", "", "", "👍", " ", "", "ü"]


@pytest.mark.parametrize("output", ["the rain", " the rain", "  the", "\n the", " "])
def test_what_continues_a_prompt_is_the_decode_of_both_less_that_of_the_prompt_f028(output: str) -> None:
    for toy in (spm(), spm(add_space_prefix=False), TOY):
        prompt = toy.encode("to the")
        ids = toy.encode("to the" + output)[len(prompt) :]
        if toy.decode(prompt) + output != toy.decode([*prompt, *ids]):
            continue  # the output's first letters make other tokens of the prompt's last
        detokenizer = Detokenizer(toy)
        pieces = [detokenizer.push([i]) for i in ids] + [detokenizer.finish()]
        assert toy.decode(prompt) + "".join(pieces) == toy.decode([*prompt, *ids])


def test_the_space_in_front_of_a_whole_text_is_dropped_once_f028() -> None:
    toy = spm()
    for text in ("the", " the", "  the", " ", "<s>"):
        detokenizer = Detokenizer(toy, continues=False)
        assert "".join(detokenizer.push([i]) for i in toy.encode(text)) == text


def stream(text: str, stop: Sequence[str], cuts: Sequence[int] = ()) -> tuple[list[str], bool]:
    """Pushes a text in pieces that end at the cuts (every character by default); says whether it was stopped."""
    matcher = StopMatcher(stop)
    out = []
    bounds = [0, *cuts, len(text)] if cuts else list(range(len(text) + 1))
    for start, end in itertools.pairwise(bounds):
        piece = matcher.push(text[start:end])
        out.append(piece.text)
        if piece.is_stopped:
            return out, True
    return [*out, matcher.finish()], False


def test_a_stop_string_is_never_shown_in_part_f029() -> None:
    shown, is_stopped = stream("JKLMNOPQRST", ["MNOPQR"])
    assert is_stopped
    assert shown == ["J", "K", "L", *[""] * 6]


def test_held_text_comes_as_soon_as_it_can_not_match_f029() -> None:
    assert stream("LMNOPQ", ["MNOPZ"]) == (["L", "", "", "", "", "MNOPQ", ""], False)
    assert stream("aab", ["aac"]) == (["", "", "aab", ""], False)
    assert stream("aaac", ["aac"]) == (["", "", "a", ""], True)
    assert stream("ab", ["abc"]) == (["", "", "ab"], False)


def test_one_character_and_several_stop_strings_f029() -> None:
    assert stream("ab.c", ["."]) == (["a", "b", ""], True)
    assert "".join(stream("one, two; three", ["; ", ", ", "three", "xyz"])[0]) == "one"


def test_the_match_that_starts_first_wins_f020() -> None:
    assert stream("xabcdy", ["bc", "abcd"], [6]) == (["x"], True)
    assert stream("xabcdy", ["d", "ab"], [6]) == (["x"], True)
    # A match that is complete ends the text, even though a longer one may have been on its way.
    assert stream("xabcdy", ["bc", "abcd"]) == (["x", "", "", "a"], True)


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    st.lists(st.integers(1, 8), min_size=30, max_size=30),
)
@settings(max_examples=500, deadline=None)
def test_stop_matching_is_a_search_of_the_whole_text_after_each_piece_f020(
    text: str, stop: list[str], sizes: list[int]
) -> None:
    matcher = StopMatcher(stop)
    shown = seen = ""
    for size in sizes:
        piece, seen = matcher.push(text[len(seen) : len(seen) + size]), text[: len(seen) + size]
        shown += piece.text
        found = [at for at in map(seen.find, stop) if at >= 0]
        assert piece.is_stopped == bool(found)
        if found:
            assert shown == seen[: min(found)]
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        assert not held or any(word.startswith(held) for word in stop)
        # Exactly the longest possible beginning of a stop string is held back.
        longer = [seen[at:] for at in range(len(shown))]
        assert not any(word.startswith(tail) for tail in longer for word in stop)
    assert shown + matcher.finish() == text


def test_the_token_that_completes_a_stop_string_is_the_last_f020() -> None:
    ids = TOY.encode("on the END of it")
    text_stream = TextStream(TOY, ["ND of"])
    pieces: list[str] = []
    for token_id in ids:
        pieces.append(text_stream.push(token_id))
        if text_stream.is_stopped:
            break
    assert "".join(pieces) == "on the E"
    assert TOY.decode(ids[: len(pieces)]) == "on the END of"
    assert text_stream.finish() == ""
    with pytest.raises(EngineFault, match="follows a completed stop string"):
        text_stream.push(ids[-1])


def test_stop_strings_across_split_characters_f027_f029() -> None:
    text_stream = TextStream(TOY, ["👍!"])
    shown = [text_stream.push(i) for i in TOY.encode("a👍?👍")]
    assert "".join(shown) == "a👍?"
    assert text_stream.finish() == "👍"


def test_what_is_cut_off_may_end_in_a_replacement_mark() -> None:
    text_stream = TextStream(TOY, ["zz"])
    assert [text_stream.push(i) for i in TOY.encode("z👍")[:2]] == ["", ""]
    assert text_stream.finish() == "z\ufffd"


def test_a_stream_without_stop_strings_shows_every_character_at_once() -> None:
    rng = random.Random(3)
    ids = [rng.randrange(TOY.vocab_size) for _ in range(300)]
    text_stream, detokenizer = TextStream(TOY), Detokenizer(TOY)
    assert [text_stream.push(i) for i in ids] == [detokenizer.push([i]) for i in ids]
    assert text_stream.finish() == detokenizer.finish()


def test_control_tokens_that_are_asked_for_keep_their_names() -> None:
    """Such as the mark of a tool call, without which nobody finds the call in the text."""
    text = TOY.encode("a", add_bos=False)
    for shown_ids, want in ((frozenset[int](), "aa"), (frozenset({1}), f"a{TOY.token_text(1)}a")):
        stream = TextStream(TOY, shown_ids=shown_ids)
        assert "".join(map(stream.push, (*text, 1, 2, *text))) + stream.finish() == want
