"""The scripts of ../shared/cases, if there are any: inputs that once failed. They exit with 0 if their case holds."""

import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[2] / "shared" / "cases"
SCRIPTS = sorted(path for path in CASES.glob("*.py") if path.stem != "a_common")
# What the scripts import, where it is now.
MOVED = {
    "from tokenmix.data": "from tokenmix.lab.data",
    "from tokenmix.train": "from tokenmix.lab.train",
    "from tokenmix.tasks": "from tokenmix.lab.tasks",
    "detection.output import image_numbers": "detection.task import image_numbers",
    "import AveragePrecision": "import matched_rows, object_metrics",
    'metric = AveragePrecision("bbox", num_classes=1)': "",
    "metric.update([": "rows = matched_rows(*[",
    '], [{**target, "iscrowd": target["iscrowd"].long()}])': '], target, 0, "boxes")',
    "metric.compute()": '{name: metric(rows) for name, metric in object_metrics("boxes", ["wire"]).items()}',
}


@pytest.mark.slow
@pytest.mark.skipif(not SCRIPTS, reason="no ../shared/cases here")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_case_that_once_failed_holds(script: Path, tmp_path: Path) -> None:
    for path in CASES.glob("*.py"):
        program = path.read_text()
        for old, new in MOVED.items():
            program = program.replace(old, new)
        (tmp_path / path.name).write_text(program)
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
