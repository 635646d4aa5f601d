"""`tokenmix probe`: what a mixer can do."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from tokenmix.errors import UserError
from tokenmix.lab.cli.checks import check_mixers
from tokenmix.lab.train.words import Names


@dataclass(frozen=True)
class Probe:
    """Train mixers on synthetic tasks with known answers, next to self-attention and to no mixing."""

    mixers: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="NAME ...", help_behavior_hint="(required)")
    ]
    """Mixers of `tokenmix list mixers`, or module:Class."""
    tasks: Annotated[Names | None, tyro.conf.arg(help_behavior_hint="(default: all)")] = None
    """Tasks, separated by commas: recall, copy, shift, count, majority, same, path."""
    full: bool = False
    """Five seeds with 95 % confidence intervals, instead of one seed."""
    threads: Annotated[int | None, tyro.conf.arg(help_behavior_hint="(default: PyTorch's own choice)")] = None
    """CPU threads of PyTorch."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to train."""
    out: Annotated[Path | None, tyro.conf.arg(help_behavior_hint="(default: none is written)")] = None
    """Folder for probe.json, probe.md and probe.png."""
    json: bool = False
    """Print JSON instead of a table."""

    def run(self) -> None:
        if not self.mixers:
            raise UserError("no mixer given; name one or more, for example: tokenmix probe external")
        check_mixers(self.mixers)
        if self.threads is not None and self.threads < 1:
            raise UserError(f"--threads must be at least 1, got {self.threads}; give 1 or more")
        import torch

        from tokenmix.files import make_folder, replace_file, replacing
        from tokenmix.testing.probe import probe

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        if self.out is not None:
            make_folder(self.out)
        report = probe(
            self.mixers,
            tasks=self.tasks,
            full=self.full,
            device=self.device,
            progress=lambda line: print(f"tokenmix: {line}", file=sys.stderr, flush=True),
        )
        print(report.to_json() if self.json else report)
        if self.out is not None:
            replace_file(self.out / "probe.json", report.to_json().encode())
            replace_file(self.out / "probe.md", f"{report.markdown()}\n".encode())
            with replacing(self.out / "probe.png") as path:
                report.plot().savefig(path, dpi=120)
            print(f"tokenmix: probe.json, probe.md and probe.png are in {self.out}", file=sys.stderr)
