"""Average precision of two processes is that of one, also where one of them has an image more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Five images: the first process has three of them, of which one shows nothing.
WORKER = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from tokenmix.lab.tasks.detection.metrics import matched_rows, object_metrics
from tokenmix.lab.train.metrics import collected

folder, rank = Path(sys.argv[1]), int(sys.argv[2])
generator = torch.Generator().manual_seed(5)
images = []
for count in (3, 2, 0, 4, 1):
    corner = torch.randint(0, 40, (count, 2), generator=generator).float()
    boxes = torch.cat([corner, corner + 20], 1)
    masks = torch.zeros(count, 64, 64, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes.long().tolist()):
        mask[top:bottom, left:right] = True
    there = {"boxes": boxes, "labels": torch.arange(count) % 3, "masks": masks, "area": torch.full((count,), 400.0)}
    there["iscrowd"] = torch.zeros(count)
    moved = {**there, "boxes": boxes + 2, "masks": masks.roll((2, 2), (1, 2))}
    images.append(({**moved, "scores": torch.rand(count, generator=generator)}, there))

def numbers(kind, part):
    rows = collected([matched_rows(found, there, index, kind) for index, (found, there) in part])
    return {name: metric(rows) for name, metric in object_metrics(kind, ["a", "b", "c"]).items()}

images = list(enumerate(images))
alone = {kind: numbers(kind, images) for kind in ("boxes", "masks")}
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
both = {kind: numbers(kind, images[rank::2]) for kind in ("boxes", "masks")}
dist.destroy_process_group()
(folder / f"{rank}.json").write_text(json.dumps([alone, both]))
"""


@pytest.mark.slow
def test_two_processes_count_what_one_counts(tmp_path: Path):
    told = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), str(rank)], env=told, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for process in started:
            errors = process.communicate(timeout=120)[1]
            assert process.returncode == 0, errors[-2000:]
    finally:
        for process in started:
            process.kill()
    for rank in range(2):
        alone, both = json.loads((tmp_path / f"{rank}.json").read_text())
        assert both == alone
        assert all(0 < alone[kind]["map"] < 1 for kind in ("boxes", "masks"))
