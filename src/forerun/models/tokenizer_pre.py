"""How each family splits a text before the merges: regular expressions by the name in `tokenizer.ggml.pre`.

The name is all a GGUF file says, and a near miss changes the ids without any error (F050). The expressions are those
of the families' own tokenizer.json files where these are known, else of llama.cpp's table (`src/llama-vocab.cpp` of
llama-cpp-python 0.3.36); both write the same rule in their own regex dialect. Here it is Oniguruma's. A long flat list
by nature.

That a text is composed first is in the tokenizer.json files alone: llama.cpp composes none, so for decomposed accents
its ids differ from the model's own in those families. It is near the families' own rules, but not equal, in a few more
points: rules that look at case see that of ASCII letters or none at all, combining marks end a word in some of them,
digits that are not ASCII or have a letter after them are grouped otherwise, and spaces that are not ASCII are in no
range of characters.

Names that llama.cpp knows and that are missing here: `default` says nothing about the rule; `jina-v1-en`,
`jina-v2-code`, `roberta-bpe` and `whitespace` belong to encoders.
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


# Values of the same key for vocabularies of characters instead of bytes, where merges run over whole lines.
RAW_NAMES = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})

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
_MINICPM5 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"
_UFAKZEKA = f"{_WORD}|{_DIGIT}|{_MARKS}|{_SPACES}"  # without contractions, which are suffixes in Turkish
_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_JAIS2 = rf"{_CONTRACTION}|{_WORD}|{_THREE_DIGITS}|{_MARKS}|\s*[\r\n]+|{_JAIS2_SPACES}|\s"
# Words run on across single spaces.
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|{_DIGIT}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
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
_CASED = f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
_GPT4O = f"{_CASED}|{_THREE_DIGITS}|{_MARKS_SLASH}|{_SPACES}"
_YOUTU = (
    r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    f"{_CASED}|{_DIGIT}|{_MARKS_SLASH}|{_SPACES}",
)
_KIMI_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_KIMI_K2 = (
    rf"\p{{Han}}+|{_BEFORE}{_KIMI_UPPER}*{_KIMI_LOWER}+{_CONTRACTION}?"
    rf"|{_BEFORE}{_KIMI_UPPER}+{_KIMI_LOWER}*{_CONTRACTION}?|{_THREE_DIGITS}|{_MARKS}|{_SPACES}"
)

# Digits in threes from the right. Whole runs come first, so that none is walked through once for every three digits.
_TINY_AYA = (r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)", _GPT4O)  # the last cuts the rest of a run in threes

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
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK_MAIN = rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}"
_DEEPSEEK_V3 = (_THREE_DIGITS, _HAN_KANA, _DEEPSEEK_MAIN)
_SPARK = (_THREE_DIGITS, _HAN_KANA, rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+", _DIGIT)
_AFMOE_SCRIPTS = r"[一-鿿㐀-䶿\x{8C48}-\x{FAFF}぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"
# Digits in threes from the right, the first of them together with the text before them.
_AFMOE_DIGITS = r"(?:\A|(?<=\p{N}))\P{N}*+(?:(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3})"
_AFMOE = (_AFMOE_DIGITS, _AFMOE_SCRIPTS, _DEEPSEEK_MAIN)
# Words run across spaces, and only numbers are cut: before every third digit from the right, so that other numerals
# (fractions, superscripts) stay with the digits before them.
_SUPERBPE_HEAD = r"(?<!\d)\d{1,2}(?=(?:\d{3})*(?!\d))"
_SUPERBPE = (r"\p{N}+", rf"(?:{_SUPERBPE_HEAD}|\d{{3}}|\D)(?:{_SUPERBPE_HEAD}|\D)*")
_CHAMELEON = (
    r"<sentinel:[0-9]+>",
    r"IMGIMG[A-I]{1,4}Z",
    r"[\t\n]|    |  ",
    _DIGIT,
    r"[\p{P}!-/:-@\[-`{-~]",
    _GPT2,
)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _rules() -> dict[str, PreRule]:
    gpt2, gpt2_nfc = PreRule((_GPT2,)), PreRule((_GPT2,), is_nfc=True)
    digits = PreRule((_DIGIT, _GPT2))
    llama3 = PreRule((_LLAMA3,), ignore_merges=True, adds_bos=True)
    qwen2, qwen2_plain = PreRule((_QWEN2,), is_nfc=True), PreRule((_QWEN2,))
    gpt4o, gpt4o_whole = PreRule((_GPT4O,)), PreRule((_GPT4O,), ignore_merges=True)
    bloom, bailing = PreRule((_BLOOM,)), PreRule((_BAILING,))
    groups: dict[PreRule, str] = {
        gpt2: "gpt-2 phi-2 gigachat a.x-4.0 mellum jais trillion exaone4 granite-docling jina-es jina-de jina-v2-es "
        "jina-v2-de modern-bert",
        gpt2_nfc: "mpt olmo",
        digits: "smollm starcoder refact codeshell exaone minerva-7b mellum2",
        PreRule((_DIGIT, _GPT2), is_nfc=True): "command-r",
        llama3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreRule((_LLAMA3,)): "dbrx smaug-bpe chatglm-bpe",
        PreRule((_LLAMA3,), ignore_merges=True): "glm4 glm5",
        PreRule((_JAIS2,)): "jais-2",
        PreRule((_THREE_DIGITS, _MINICPM5), ignore_merges=True): "minicpm5",
        qwen2: "qwen2 megrez",
        qwen2_plain: "deepseek-r1-qwen f2llmv2 stablelm2 hunyuan solar-open grok-2 kormo",
        # transformers composes here, too, but the ids in llama.cpp's conformance files are those of a text as it is.
        PreRule((_QWEN35,)): "qwen35",
        PreRule((r"[^\n]+|\n+", _QWEN2)): "laguna",
        PreRule((_UFAKZEKA,)): "ufakzeka",
        PreRule((_SEED_CODER,)): "seed-coder",
        PreRule((_EXAONE_MOE,)): "exaone-moe",
        bailing: "bailingmoe bailingmoe2 llada-moe",
        PreRule((_TEKKEN,), ignore_merges=True, adds_bos=True): "tekken",
        gpt4o_whole: "gpt-4o llama4 granite-embed-multi-97m",
        gpt4o: "kanana2 minimax-m2 talkie",
        PreRule(_TINY_AYA): "tiny_aya cohere2moe",
        PreRule(_YOUTU, ignore_merges=True): "youtu",
        PreRule((_KIMI_K2,), ignore_merges=True): "kimi-k2",
        PreRule(_DEEPSEEK_LLM): "deepseek-llm",
        PreRule(_DEEPSEEK_CODER): "deepseek-coder",
        PreRule(_DEEPSEEK_V3): "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",
        PreRule(_SPARK): "spark2_5",
        PreRule(_AFMOE): "afmoe",
        PreRule(_SUPERBPE): "superbpe",
        PreRule(_CHAMELEON, adds_bos=True): "chameleon",
        PreRule(_FALCON): "falcon",
        bloom: "bloom poro-chat gpt3-finnish",
        PreRule((_BLOOM, _DIGIT)): "viking",
    }
    return {name: rule for rule, names in groups.items() for name in names.split()}


PRE_RULES: dict[str, PreRule] = _rules()
