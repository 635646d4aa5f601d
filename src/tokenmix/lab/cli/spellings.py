"""Options and verbs of other libraries, and ours for them."""

from collections.abc import Sequence

from tokenmix.errors import UserError

PRETRAINED = "--init-from RUN_OR_FILE.safetensors"
_OURS: dict[str, tuple[str, ...]] = {
    "--accumulate N": ("accum", "accum-steps", "gradient-accumulation-steps", "grad-accum-steps"),
    "--augment NAME": ("aa", "auto-augment", "aug"),
    "--batch-size N": ("b", "bs", "batch", "per-device-train-batch-size", "train-batch-size"),
    "--clip-grad NORM": ("max-grad-norm", "gradient-clip-val", "grad-clip"),
    "--data DATA": ("data-dir", "data-path", "dataset", "dataset-name", "train-file"),
    "--device cuda --devices N": ("gpus", "gpu", "num-gpus", "n-gpus", "nproc-per-node", "accelerator"),
    "--ema DECAY": ("model-ema", "ema-decay"),
    "--epochs N": ("e", "num-epochs", "n-epochs", "max-epochs", "num-train-epochs"),
    "--grad-checkpointing": ("gradient-checkpointing",),
    "--img-size N": ("image-size", "input-size", "imgsz", "size", "resolution"),
    "--log-every N": ("log-interval", "logging-steps", "log-every-n-steps"),
    "--lr RATE": ("learning-rate", "base-lr", "max-lr"),
    "--model NAME": ("m", "a", "arch", "architecture", "backbone", "model-name", "model-name-or-path"),
    "--num-nodes N": ("nnodes", "nodes"),
    "--opt NAME": ("optimizer", "optimiser", "optim"),
    "--out FOLDER": ("o", "output", "output-dir", "save-dir", "work-dir", "logdir"),
    "--precision bf16-mixed": ("amp", "bf16", "fp16", "mixed-precision"),
    "--reprob P": ("random-erasing", "random-erase"),
    "--resume RUN": ("checkpoint", "ckpt", "ckpt-path", "resume-from-checkpoint"),
    "--schedule NAME": ("sched", "scheduler", "lr-scheduler", "lr-scheduler-type"),
    "--seq-len N": ("max-length", "max-seq-length", "block-size"),
    "--smoothing S": ("label-smoothing",),
    "--validation N": ("val-split", "validation-split"),
    "--warmup-steps N": ("warmup", "num-warmup-steps"),
    "--weight-decay W": ("wd",),
    "--workers N": ("j", "num-workers", "dataloader-num-workers"),
    "--model-kwargs depth=N": ("depth", "num-layers", "layers"),
    "--model-kwargs drop_path_rate=P": ("drop-path", "drop-path-rate", "stochastic-depth"),
    "--model-kwargs drop_rate=P": ("dropout", "drop", "drop-rate"),
    "--model-kwargs embed_dim=N": ("dim", "embed-dim", "hidden-size", "width"),
    "--model-kwargs num_heads=N": ("heads", "num-heads"),
    "--model-kwargs patch_size=N": ("patch-size", "patch"),
    f"{PRETRAINED}, or --model-kwargs pretrained=True for weights of timm": ("pretrained", "pretrained-weights"),
    PRETRAINED: ("finetune", "weights", "load", "initial-checkpoint"),
    "--mixers A,B,C": ("mixer", "attention"),
    "--seeds 0,1,2": ("seed",),
    "--swap MIXER, or --model mixer_nano --model-kwargs mixer=MIXER": ("mixer", "mixers", "attention"),
    "--to MIXER": ("mixer", "attention", "swap"),
    "--format FORMAT": ("f", "onnx"),
    "--num N": ("n", "num-images", "num-samples"),
    "--num-tokens N": ("tokens", "seq-len"),
    "--tokens 196,1024": ("num-tokens", "seq-len"),
}
"""What to type with us, and other libraries' names for it; of several rows, the first whose option the verb has."""

_VERBS = {
    "bench": "cost",
    "benchmark": "cost",
    "profile": "cost",
    "flops": "cost",
    "convert": "export",
    "evaluate": "eval",
    "finetune": "train",
    "fit": "train",
    "help": "--help",
    "infer": "predict",
    "sample": "generate",
    "summary": "info",
    "test": "eval",
    "tune": "train",
    "validate": "eval",
    "visualize": "inspect",
    "-h": "--help",
    "version": "--version",
}


def our_option(word: str, known: Sequence[str]) -> UserError | None:
    """The error for an option of another library, if the verb has an option for it."""
    plain = word.lstrip("-")
    for ours, theirs in _OURS.items():
        if plain in theirs and ours.split()[0] in known:
            return UserError(f"there is no option {word}; give {ours}")
    return None


def our_verb(word: str) -> UserError | None:
    """The error for a verb of another library, if there is one of ours for it."""
    ours = _VERBS.get(word)
    return None if ours is None else UserError(f"unknown verb {word!r}; give tokenmix {ours}")
