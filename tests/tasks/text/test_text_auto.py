"""`import tokenmix.text` is what transformers' automatic classes need, in either order."""

import subprocess
import sys
from pathlib import Path

import pytest

from tokenmix.text import GMLPConfig, GMLPForSequenceClassification

SRC = Path(__file__).parents[3] / "src"
FIND = "print(type(AutoModelForSequenceClassification.from_pretrained(sys.argv[1])).__name__)"
AUTO = "from transformers import AutoModelForSequenceClassification"
# Nothing of ours is loaded for those who want another model.
OTHER = """
import tokenmix
from transformers import AutoConfig
AutoConfig.for_model('bert')
assert not {'tokenmix.layers', 'tokenmix.text.config'} & {*sys.modules}
assert not any('tokenmix' in str(type(finder)) for finder in sys.meta_path)
"""
ORDERS = {
    "theirs first": f"{OTHER}\n{AUTO}\nimport tokenmix.text",
    "registered": f"import tokenmix.register, timm\n{AUTO}\nassert timm.is_model('gmlp_nano')",
    "ours first": f"import tokenmix.text\nfrom transformers import BertModel\n{AUTO}",
}


def python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env={"PYTHONPATH": str(SRC), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = GMLPConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, intermediate_size=12, max_position_embeddings=10
    )
    GMLPForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.one_fast
@pytest.mark.parametrize("order", ORDERS)
def test_a_saved_model_is_found(order: str, saved: str) -> None:
    assert python(f"import sys\n{ORDERS[order]}\n{FIND}", saved) == "GMLPForSequenceClassification"
