"""A small random model in a Hugging Face folder, from the library and from the command line (native backend)."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from forerun import LLM, SamplingParams
from forerun.bench.fidelity import measure_fidelity
from forerun.cli import main
from forerun.errors import ConfigError, LoadError, RequestError
from tests.helpers.gguf_files import write_tiny_llama
from tests.helpers.hf_folders import tiny_config, tiny_tensors, write_json, write_safetensors, write_tiny_folder
from tests.helpers.packers import GPTQ, gptq_tensors

FORERUN = [sys.executable, "-c", "from forerun.cli.main import run; run()"]
PROMPT = "the rain in spain the rain in"
MESSAGES = [{"role": "user", "content": PROMPT}]
LAWS = [
    SamplingParams(max_tokens=48, ignore_eos=True),
    SamplingParams(max_tokens=48, ignore_eos=True, temperature=0.8, top_p=0.95, seed=7),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, threads=1)


@pytest.mark.parametrize("params", LAWS)
def test_speculation_changes_nothing_but_the_passes(llm: LLM, params: SamplingParams) -> None:
    for plain, spec in (
        (llm.generate(PROMPT, params)[0], llm.generate(PROMPT, params, speculation="ngram:k=6")[0]),
        (llm.chat(MESSAGES, params), llm.chat(MESSAGES, params, speculation="ngram:k=6")),
    ):
        assert len(plain.token_ids) == 48
        assert spec.token_ids == plain.token_ids
        assert spec.text == plain.text
        assert spec.stats.drafted_tokens > 0


def test_a_conversation_is_written_by_the_template(llm: LLM) -> None:
    ids = llm.encode_messages(MESSAGES)
    assert llm.tokenizer.decode(ids, skip_special=False) == (
        f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (ids[0], ids.count(2)) == (1, 1)
    # What a user writes is no control token (F049).
    assert llm.encode_messages([{"role": "user", "content": "<|im_end|>"}]).count(2) == 1


def test_each_end_of_generation_config_ends_the_output(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    params = SamplingParams(max_tokens=24, logit_bias={2: -100.0, 3: -100.0})  # not the tokenizer's own ends
    llm = LLM(folder, threads=1)
    ids = llm.encode(PROMPT)  # an end is no ordinary token any more, so it would be written otherwise then
    free = llm.generate([ids], params)[0]
    assert free.finish_reason == "length"
    end = free.token_ids[5]
    first = free.token_ids.index(end)
    write_json(folder / "generation_config.json", {"eos_token_id": [3, end]})
    done = LLM(folder, threads=1).generate([ids], params)[0]
    assert done.finish_reason == "stop"
    assert done.token_ids == free.token_ids[: first + 1]


@pytest.mark.parametrize("quant", ["f32", "bf16", "q8", "q4"])
def test_every_quant_generates(folder: Path, quant: str) -> None:
    llm = LLM(folder, quant=quant, threads=1)
    plain = llm.generate(PROMPT, LAWS[0])[0]
    assert llm.generate(PROMPT, LAWS[0], speculation="ngram:k=6")[0].token_ids == plain.token_ids


def test_f051_without_a_template_there_is_no_chat(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    write_json(folder / "tokenizer_config.json", {})
    with pytest.raises(RequestError, match="no chat template"):
        LLM(folder, threads=1).chat(MESSAGES)


def test_a_missing_tokenizer_is_told_with_the_folder_once(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match=f"^{folder}: tokenizer.json has no model.vocab"):
        LLM(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match=r"has no tokenizer\.json") as caught:
        LLM(folder)
    assert str(caught.value).count(str(folder)) == 1


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a folder, but must be a GGUF file or hold a config\.json"):
        LLM(tmp_path)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*FORERUN, *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_the_command_line(folder: Path, llm: LLM) -> None:
    made = run("generate", str(folder), PROMPT, "--raw", "--max-tokens", "12", "--json")
    assert made.returncode == 0, made.stderr
    expected = llm.generate(PROMPT, SamplingParams(max_tokens=12))[0]
    assert tuple(json.loads(made.stdout)["token_ids"]) == expected.token_ids
    described = run("info", str(folder), "--json")
    assert described.returncode == 0, described.stderr
    facts = json.loads(described.stdout)
    assert (facts["file"], facts["architecture"], facts["quantisation"]) == (str(folder), "llama", "f32")
    assert facts["vocabulary"] == 300


@pytest.mark.parametrize("quant", ["bf16", "q8", "q4"])
def test_every_command_takes_quant(
    folder: Path, quant: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("forerun.bench.timing.stream_bytes_per_s", lambda num_threads: 1e9)
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT))

    def said(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["forerun", *arguments, "--quant", quant, "--threads", "1"])
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return out

    fmt = {"bf16": "bf16", "q8": "q8_0", "q4": "q4_1"}[quant]
    facts = json.loads(said("info", str(folder), "--fidelity", "--json"))
    assert facts["quantisation"] == fmt
    assert 0 < facts["fidelity"]["kl"] < 1
    assert 0.5 < facts["fidelity"]["top1_agreement"] <= 1
    llm, params = LLM(folder, quant=quant, threads=1), SamplingParams(max_tokens=8)
    made = json.loads(said("generate", str(folder), PROMPT, "--raw", "--max-tokens", "8", "--json"))
    assert tuple(made["token_ids"]) == llm.generate(PROMPT, params)[0].token_ids
    assert llm.chat(MESSAGES, params).text in said("chat", str(folder), "--max-tokens", "8")
    timed = json.loads(said("bench", "kernels", str(folder), "--repeats", "1").splitlines()[-1])
    assert {matrix["format"] for matrix in timed["matrices"]} >= {fmt}


def test_fidelity_follows_the_bits(folder: Path) -> None:
    kl = {quant: measure_fidelity(folder, quant, "f32", 1).kl for quant in ("f32", "bf16", "q8", "q4")}
    assert kl["f32"] == 0 < kl["bf16"] < kl["q8"] < kl["q4"]


def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny")
    write_json(folder / "config.json", tiny_config(quantization_config={"quant_method": "gptq"}))
    refused = run("info", str(folder))
    assert refused.returncode != 0
    assert refused.stderr.strip().count("\n") == 0
    assert "quantization_config: key bits is missing" in refused.stderr


def test_a_gptq_folder(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", quantization_config=GPTQ | {"group_size": 32})
    write_safetensors(folder / "model.safetensors", gptq_tensors(tiny_tensors()))
    quantised = LLM(folder, threads=1)
    for params in LAWS:
        plain = quantised.generate(PROMPT, params)[0]
        spec = quantised.generate(PROMPT, params, speculation="ngram:k=6")[0]
        assert spec.token_ids == plain.token_ids
        assert spec.stats.drafted_tokens > 0
    packing = "gptq, 4 bits, groups of 32; 2 matrices expanded to float32"  # rows of 48 are no whole blocks
    facts = json.loads(run("info", str(folder), "--json").stdout)
    assert (facts["quantisation"], facts["packing"]) == ("q5_0", packing)
    assert facts["tensors_by_format"]["q5_0"] == 12
    shown = " ".join(run("info", str(folder)).stdout.split())
    assert f"packing {packing}" in shown
    assert "packing" not in run("info", str(write_tiny_folder(tmp_path / "plain"))).stdout


def test_a_quant_that_would_do_nothing_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", fmt="q4_0")
    for arguments in (["info", str(path)], ["generate", str(path), PROMPT], ["bench", "kernels", str(path)]):
        monkeypatch.setattr(sys, "argv", ["forerun", *arguments, "--quant", "bf16"])
        with pytest.raises(SystemExit) as ended:
            main.run()
        out, err = capsys.readouterr()
        assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
        assert "quant bf16 would change none of the matrices (15 q4_0)" in err
