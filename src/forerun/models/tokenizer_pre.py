"""How each family splits a text before the merges: regular expressions by the name in `tokenizer.ggml.pre`.

The name is all a GGUF file says, and a near miss changes the ids without any error (F050). The expressions are those
of the families' own tokenizer.json files where these are known, else of llama.cpp's table (`src/llama-vocab.cpp` of
llama-cpp-python 0.3.36); both write the same rule in their own regex dialect. Here it is Oniguruma's. A long flat list
by nature.

That a text is composed first is in the tokenizer.json files alone: llama.cpp composes none, so for decomposed accents
its ids differ from the model's own in those families.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreRule:
    """How one family treats a text before the merges.

    Attributes:
        splits: regular expressions, applied one after another to every piece there is by then. Each match becomes a
            piece of its own, and so does what lies between matches.
        is_nfc: the text is composed (Unicode NFC) first.
        ignore_merges: a piece that is a whole token is that token, whatever the merges say.
        adds_bos: a begin token is added unless the file says otherwise.
    """

    splits: tuple[str, ...]
    is_nfc: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """Splits a text by this rule and spells the pieces in the byte alphabet."""
        splits = [pre_tokenizers.Split(tokenizers.Regex(regex), behavior="isolated") for regex in self.splits]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = f"{_CONTRACTION}|{_WORD}|{_THREE_DIGITS}|{_MARKS}|{_SPACES}"
_QWEN2 = f"{_CONTRACTION}|{_WORD}|{_DIGIT}|{_MARKS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|{_DIGIT}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_SEED_CODER = rf"{_CONTRACTION}|{_WORD}|{_DIGIT}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_BAILING = (
    rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|{_DIGIT}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)

# Words change where a capital follows a small letter.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_MARKS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = f"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|{_DIGIT}|{_MARKS_SLASH}|{_SPACES}"
_GPT4O = (
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    f"|{_THREE_DIGITS}|{_MARKS_SLASH}|{_SPACES}"
)

# Written out by the family: letters that have a case, in the Unicode version of its day.
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ"
    "-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ"
    "-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT)
_DEEPSEEK_V3 = (
    _THREE_DIGITS,
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _rules() -> dict[str, PreRule]:
    gpt2, gpt2_nfc = PreRule((_GPT2,)), PreRule((_GPT2,), is_nfc=True)
    digits = PreRule((_DIGIT, _GPT2))
    llama3 = PreRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
    qwen2, qwen2_plain = PreRule((_QWEN2,), is_nfc=True), PreRule((_QWEN2,))
    gpt4o = PreRule((_GPT4O,), ignore_merges=True)
    deepseek_v3 = PreRule(_DEEPSEEK_V3)
    bloom, bailing = PreRule((_BLOOM,)), PreRule((_BAILING,))
    return {
        **dict.fromkeys(("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "trillion", "exaone4"), gpt2),
        **dict.fromkeys(("mpt", "olmo"), gpt2_nfc),
        **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"), digits),
        "command-r": PreRule((_DIGIT, _GPT2), is_nfc=True),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), llama3),
        **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), PreRule((_LLAMA3,))),
        **dict.fromkeys(("glm4", "glm5"), PreRule((_LLAMA3,), ignore_merges=True)),
        "minicpm5": PreRule(
            (_THREE_DIGITS, rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"), ignore_merges=True
        ),
        **dict.fromkeys(("qwen2", "megrez"), qwen2),
        **dict.fromkeys(("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), qwen2_plain),
        # transformers composes here, too, but the ids in llama.cpp's conformance files are those of a text as it is.
        "qwen35": PreRule((_QWEN35,)),
        "seed-coder": PreRule((_SEED_CODER,)),
        **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), bailing),
        "tekken": PreRule((_TEKKEN,), ignore_merges=True, adds_bos=True),
        **dict.fromkeys(("gpt-4o", "llama4"), gpt4o),
        **dict.fromkeys(("kanana2", "minimax-m2"), PreRule((_GPT4O,))),
        "deepseek-llm": PreRule(_DEEPSEEK_LLM),
        "deepseek-coder": PreRule(_DEEPSEEK_CODER),
        **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), deepseek_v3),
        "falcon": PreRule(_FALCON),
        **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), bloom),
        "viking": PreRule((_BLOOM, _DIGIT)),
    }


PRE_RULES: dict[str, PreRule] = _rules()
