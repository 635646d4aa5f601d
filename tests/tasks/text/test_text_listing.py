"""`tokenmix info` and `tokenmix list models` know the text models."""

import json

import pytest

from tokenmix.lab.cli import main


def printed(capsys, *args):
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_info_has_the_papers_figures_beside_ours(capsys):
    summary = printed(capsys, "info", "amlp_text_base", "--model-kwargs", "max_position_embeddings=128")
    assert (summary["tokens"], summary["mixer"]) == (128, "gating-attention")
    assert summary["published parameters, millions"] == 109
    assert summary["preset's GFLOPs"] == pytest.approx(summary["published GFLOPs"], rel=0.01)
    assert summary["parameters"] == summary["parameters without embeddings"] + 32_000 * 513 + 2 * 512
    assert summary["macs"] == summary["macs without head"] + 128 * 512 * 32_000
    assert main(["info", "gmlp_text_nano"]) == 0
    assert "published" not in capsys.readouterr().out


def test_they_are_listed(capsys):
    rows = {row["name"]: row for row in printed(capsys, "list", "models")}
    assert "masked-lm" in rows["gmlp_text_nano"]["task"]
    assert "self-attention" in rows["bert_text_nano"]["about"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["gmlp_text_base", "--img-size", "64"], "max_position_embeddings=N"),
        (["gmlp_text_bas"], "did you mean gmlp_text_base"),
        (["gmlp_text_nano", "--model-kwargs", "depth=3"], "no field 'depth'"),
    ],
)
def test_mistakes_are_one_line(args, said, capsys):
    assert main(["info", *args]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
