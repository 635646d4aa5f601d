"""Options of `tokenmix.train` and `tokenmix.compare` besides their arguments, for editors and type checkers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class Options(TypedDict, total=False):
    """Options of both; see `tokenmix train TASK --help`. A task takes its own only."""

    validation: int | None
    workers: int
    opt: str
    opt_eps: float | None
    min_lr: float
    schedule: Literal["cosine", "linear", "poly", "step", "constant"]
    warmup_steps: int | None
    warmup_epochs: float | None
    cooldown_epochs: float
    weight_decay: float
    clip_grad: float | None
    accumulate: int
    ema: float | None
    monitor: str | None
    precision: Literal["32", "bf16-mixed", "16-mixed", "bf16"]
    grad_checkpointing: bool
    log_every: int
    checkpoint_every: int
    logger: Literal["tensorboard", "wandb", "mlflow"] | None
    class_weights: Literal["none", "balanced"]
    sampler: Literal["shuffle", "balanced"]
    teacher: str | None
    distill: float
    temperature: float
    distill_from: Literal["logits", "layers"]
    in_chans: Literal[1, 3] | None
    crop_pct: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    augment: str
    color_jitter: float
    reprob: float
    mixup: float
    cutmix: float
    smoothing: float
    diagonality: float
    diagonality_form: Literal["hinge", "printed"]
    way: Literal["auto", "whole", "sliding"]
    window: int | Sequence[int] | None
    stride: int | Sequence[int] | None
    scales: float | Sequence[float]
    mirror: Literal["no", "yes"]
    chunk_size: int
    test_batch: int
    crop: int | Sequence[int] | None
    crops: int
    train_scales: float | Sequence[float]
    iou_loss: float
    bias_lr: float
    min_size: int | Sequence[int] | None
    max_size: int | None
    score: float
    nms: float
    detections: int
    overlap: float
    shown: float
    flip: float
    lr_g: float
    lr_d: float
    beta1: float
    beta2: float
    d_steps: int
    features: str | None
    classes: str | Sequence[str] | None
    columns: int
    votes: int
    vote_scale: float
    num_points: int
    choice: Literal["first", "random", "farthest"]
    scale: float
    shift: float
    point_dropout: float
    tokenizer: str | Path | None
    vocab_size: int
    seq_len: int
    masking: Literal["token", "whole-word"]
    mask_prob: float
    doc_stride: int
    swap_drop: Literal["positions"] | None
    train_only: Literal["all", "mixers"]


class TrainOptions(Options, total=False):
    """Options of `tokenmix.train`."""

    img_size: int | None
    swap_where: str
    swap_kwargs: dict[str, Any]
    insert_kwargs: dict[str, Any]
    devices: int | None
    num_nodes: int | None
    strategy: Literal["auto", "ddp", "fsdp"]
    token_parallel: int


class CompareOptions(Options, total=False):
    """Options of `tokenmix.compare`; see `tokenmix compare TASK --help`."""

    engine: Literal["local", "ray", "slurm"]
    address: str | None
    run_cpus: int | None
    run_gpus: float | None
    slurm: dict[str, Any]
    img_size: int | Sequence[int] | None
    sizes: str | Sequence[str]
    patch: int | Sequence[int]
    tune: str | None
    budget: Literal["images", "macs", "seconds"]
    only: str | Sequence[str]
    merge: str | Path | Sequence[str | Path] | None
    variants: dict[str, Any]
    pretrained: bool
