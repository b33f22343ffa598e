"""`forerun drafters` knows every drafter, and what each costs on a model."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun import LLM
from forerun.bench.drafters import measure_drafter
from forerun.cli.main import app
from forerun.drafters.ngram import NgramOptions
from forerun.drafters.spec import REGISTRY
from forerun.errors import ConfigError
from tests.helpers.gguf_files import write_tiny_llama


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("drafters") / "tiny.gguf")


def test_lists_every_drafter_with_its_settings() -> None:
    table = CliRunner().invoke(app, ["drafters"])
    assert table.exit_code == 0
    rows = json.loads(CliRunner().invoke(app, ["drafters", "--json"]).stdout)
    assert [row["name"] for row in rows] == list(REGISTRY)
    for row in rows:
        assert row["name"] in table.stdout
        assert row["summary"]
        assert row["needs"]
    assert rows[0]["settings"] == {"k": 8, "min": 1, "max": 4, "policy": "adaptive"}


def test_measures_those_that_run_with_defaults(path: Path) -> None:
    result = CliRunner().invoke(app, ["drafters", str(path), "--json"])
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout):
        if None not in row["settings"].values():
            assert row["cost"]["propose_s"] > 0
            assert row["cost"]["memory_bytes"] >= 0


def test_costs_are_of_the_text_the_model_has_room_for(path: Path) -> None:
    llm = LLM(path, threads=1)
    cost = measure_drafter(llm, NgramOptions())
    assert cost.prompt_len == llm.limits.max_model_len - 9 - 64
    with pytest.raises(ConfigError, match="switched off"):
        measure_drafter(llm, NgramOptions(k=0))
