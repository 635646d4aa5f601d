"""Table of attention kinds known to a swap, and search for attention in a model."""

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tokenmix.errors import UserError, unknown_name
from tokenmix.swap.adapter import AttentionAdapter, AttentionLayout
from tokenmix.swap.coded_adapters import TokenmixAdapter, TorchAdapter
from tokenmix.swap.inserting import InsertedBlock


def _transformers(names: str) -> tuple[str, ...]:
    return tuple(f"transformers.models.*.modeling_*.{name}" for name in names.split())


def _timm(names: str) -> tuple[str, ...]:
    return tuple(f"timm.models.{name}" for name in names.split())


# transformers copies code between models: all classes of a row have the same forward pass.
VIT = AttentionLayout(
    about="transformers' encoders of images, text, sound and video (see the page on swaps)",
    classes=_transformers(
        "ViTAttention DeiTAttention ViTMAEAttention ViTMSNAttention IJepaAttention "
        "VivitAttention Dinov2Attention Dinov2WithRegistersAttention ASTAttention "
        "Tipsv2VisionAttention"
    ),
    query="q_proj",
    key="k_proj",
    value="v_proj",
    out="o_proj",
    num_heads="num_attention_heads",
    attention_dropout="attention_dropout",
    mask="attention_mask",
    extra_outputs=1,
)


def _like(layout: AttentionLayout, names: str, projections: str = "", **changes: Any) -> AttentionLayout:
    """The layout for other classes of transformers; `projections` names query, key, value and out where they differ."""
    parts: dict[str, Any] = dict(zip(("query", "key", "value", "out"), projections.split()))
    return replace(layout, classes=_transformers(names), **parts, **changes)


CLIP = _like(
    VIT,
    "CLIPAttention MetaClip2Attention CLIPSegAttention ChineseCLIPVisionAttention "
    "SiglipAttention Siglip2Attention Aimv2Attention Idefics2VisionAttention",
    "q_proj k_proj v_proj out_proj",
    num_heads="num_heads",
    attention_dropout="dropout",
)
ALBERT = _like(
    VIT,
    "AlbertAttention",
    "query key value dense",
    dropout="output_dropout",
    norm="LayerNorm",
    unused=("position_ids",),
)
BERT = _like(
    ALBERT,
    "BertAttention RobertaAttention XLMRobertaAttention CamembertAttention ElectraAttention "
    "ErnieAttention Data2VecTextAttention",
    "self.query self.key self.value output.dense",
    num_heads="self.num_attention_heads",
    dropout="output.dropout",
    attention_dropout="self.dropout",
    norm="output.LayerNorm",
    plain={"is_cross_attention": False},
    causal="self.is_causal",
    others=("encoder_hidden_states", "cache", "past_key_values"),
)
TRANSFORMERS = (
    VIT,
    # The layer passes relative positions as a mask.
    _like(VIT, "BeitAttention", mask="", positions=("attention_mask",)),
    _like(CLIP, "DINOv3ViTAttention", "q_proj k_proj v_proj o_proj", positions=("position_embeddings",)),
    CLIP,
    _like(
        CLIP,
        "Wav2Vec2Attention HubertAttention Data2VecAudioAttention UniSpeech*Attention SEWAttention PatchTSTAttention",
        causal="is_causal",
        others=("key_value_states",),
    ),
    BERT,
    _like(BERT, "SplinterAttention MarkupLMAttention LayoutLMAttention", extra_outputs=None),
    ALBERT,
    _like(
        VIT,
        "DistilBertSelfAttention",
        "q_lin k_lin v_lin out_lin",
        num_heads="n_heads",
        attention_dropout="dropout",
    ),
    _like(
        VIT,
        "MPNetSelfAttention",
        "q k v o",
        attention_dropout="dropout",
        positions=("position_bias",),
        extra_outputs=0,
    ),
    AttentionLayout(
        classes=_transformers("VideoMAEAttention YolosAttention DPTViTAttention VitPoseBackboneAttention"),
        query="attention.query",
        key="attention.key",
        value="attention.value",
        out="output.dense",
        num_heads="attention.num_attention_heads",
        dropout="output.dropout",
        attention_dropout="attention.dropout_prob",
    ),
)

TIMM_VIT = AttentionLayout(
    about="timm's attention of ViT, DeiT, EVA, DINOv3, BEiT, Hiera and what has their blocks",
    classes=("timm.layers.attention.Attention",),
    qkv="qkv",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    out="proj",
    dropout="proj_drop",
    attention_dropout="attn_drop",
    around_map=("q_norm", "k_norm"),
    around_out=("norm", "gate"),
    mask="attn_mask",
    pairs=True,
)
TIMM = (
    TIMM_VIT,
    replace(
        TIMM_VIT,
        classes=("timm.models.eva.EvaAttention", "timm.layers.attention.AttentionRope"),
        biases=("q_bias", "k_bias", "v_bias"),
        positions=("rope",),
    ),
    replace(
        TIMM_VIT,
        classes=_timm("beit.Attention"),
        biases=("q_bias", "k_bias", "v_bias"),
        positions=("relative_position_bias_table", "shared_rel_pos_bias"),
        mask="",
    ),
    replace(
        TIMM_VIT,
        classes=_timm("vision_transformer_relpos.RelPosAttention"),
        positions=("rel_pos", "shared_rel_pos"),
        mask="",
    ),
    AttentionLayout(
        classes=_timm("hiera.MaskUnitAttention"),
        qkv="qkv",
        out="proj",
        num_heads="heads",
        plain={"use_mask_unit_attn": False, "q_stride": 1},
    ),
)

OTHERS = (
    AttentionLayout(
        about="MONAI's SABlock",
        classes=("monai.networks.blocks.selfattention.SABlock",),
        qkv="qkv",
        query="to_q",
        key="to_k",
        value="to_v",
        out="out_proj",
        dropout="drop_output",
        attention_dropout="drop_weights",
        plain={"include_fc": True, "attention_dtype": None, "save_attn": False},
        causal="causal",
        positions=("rel_positional_embedding",),
        mask="attn_mask",
    ),
    AttentionLayout(
        about="diffusers' Attention on its own tokens",
        classes=("diffusers.models.attention_processor.Attention",),
        query="to_q",
        key="to_k",
        value="to_v",
        out="to_out.0",
        num_heads="heads",
        dropout="to_out.1",
        around_map=("norm_q", "norm_k"),
        plain={
            "is_cross_attention": False,
            "group_norm": None,
            "spatial_norm": None,
            "added_kv_proj_dim": None,
            "residual_connection": False,
            "rescale_output_factor": 1.0,
            "scale_qk": True,
        },
        causal="is_causal",
        mask="attention_mask",
        others=("encoder_hidden_states", "temb", "image_rotary_emb"),
    ),
)

REFUSED = tuple(
    AttentionLayout(classes=classes, refusal=refusal)
    for refusal, classes in {
        "talking heads: its maps are mixed across heads by learned matrices": _timm("cait.TalkingHeadAttn"),
        "only a few tokens of their own ask: its queries are not its tokens": (
            *_timm("cait.ClassAttn xcit.ClassAttn volo.ClassAttention crossvit.CrossAttention"),
            "timm.layers.attention_pool*",
        ),
        "windows: it attends inside windows, shifted ones by masks of pairs, which a mixer has no place for": (
            *_timm("swin_transformer*.Window*Attention davit.WindowAttention gcvit.Window* maxxvit.AttentionCl"),
            *_transformers("*SwinSelfAttention Swin*Attention ClapAudioSelfAttention"),
        ),
        "it is not one map over all tokens (B, N, D): it works on grids, strides, channels or neighbours": (
            *_timm("vision_transformer_sam.Attention maxxvit.Attention2d mvitv2.MultiScaleAttention* levit.Attention*"),
            *_timm("xcit.XCA davit.ChannelAttention* pvt_v2.Attention twins.*Attn volo.*Attention tiny_vit.Attention"),
            *_timm("hieradet_sam2.MultiScaleAttention efficientformer.Attention"),
            *_transformers("SamVision*Attention SegformerAttention"),
        ),
        "its scores have learned relative positions and no scale, or it is a decoder's": _transformers(
            "T5Attention MT5Attention"
        ),
        "it is a decoder's: causal, or on other tokens, with a cache": _transformers(
            "GPT2Attention BartAttention MBartAttention OPTAttention LlamaAttention "
            "GPTNeoXAttention Qwen2Attention MistralAttention"
        ),
        "disentangled: its scores have terms of content and position of their own": _transformers(
            "Disentangled*Attention DebertaSelfAttention DebertaV2SelfAttention"
        ),
        "it packs sequences, with rotary positions and local windows": _transformers("ModernBertAttention"),
        "positions are added to query and key, not to value": _transformers("*DetrSelfAttention *DetrCrossAttention"),
    }.items()
)

UNKNOWN = AttentionLayout(classes=(), refusal="its class is unknown; describe it to tokenmix.swap.register_adapter")

ADAPTERS: list[AttentionAdapter] = [*TIMM, TorchAdapter(), *TRANSFORMERS, TokenmixAdapter(), *OTHERS, *REFUSED]
"""All known adapters, in lookup order."""


OURS = frozenset(map(id, ADAPTERS))


def register_adapter(adapter: AttentionAdapter) -> AttentionAdapter:
    """Register a kind of attention for `swap_attention`.

    Later registrations take precedence, also over tokenmix's own adapters. A swap notes if the projections that the
    adapter names give other outputs than the module. Call this in the model's own file, so that a command finds it too.

    Args:
        adapter: usually an `AttentionLayout`; a subclass of `AttentionAdapter` if names are not enough.

    Returns:
        The adapter.
    """
    if not isinstance(adapter, AttentionAdapter):
        raise UserError(f"register_adapter takes an object of AttentionAdapter, got {adapter!r}; call its class first")
    ADAPTERS.insert(0, adapter)
    return adapter


Where = str | Sequence[str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class AttentionSite:
    """An attention module with all its names in the model, and the parent for the first name."""

    names: tuple[str, ...]
    module: nn.Module
    holder: nn.Module
    adapter: AttentionAdapter

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    @property
    def known(self) -> bool:
        """Whether an adapter describes its class."""
        return self.adapter is not UNKNOWN


def find_sites(model: nn.Module) -> list[AttentionSite]:
    """All attention, outermost of nested modules, without inserted blocks; `UserError` if none can be swapped.

    Modules of unknown classes count if the class says attention.
    """
    found: dict[int, AttentionSite] = {}
    inside: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if any(name.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(module, InsertedBlock):
            inside.append(name)
            continue
        adapter = next((adapter for adapter in ADAPTERS if adapter.matches(module)), None)
        if adapter is None:
            continue
        if not name:
            raise UserError(f"the model is itself a {type(module).__name__}; swap in the module that holds it")
        inside.append(name)
        names = found[id(module)].names if id(module) in found else ()
        holder = model.get_submodule((*names, name)[0].rpartition(".")[0])
        found[id(module)] = AttentionSite((*names, name), module, holder, adapter)
    others: list[AttentionSite] = []
    for name, module in model.named_modules():
        said = any(word in type(module).__name__.lower() for word in ("attention", "attn"))
        if found:  # Parts of ours, such as stems, are no attention of their own.
            said = said and not type(module).__module__.startswith("tokenmix.")
        elif name.rpartition(".")[2] in ("attn", "attention", "self_attn"):
            # Not where others are found: timm calls squeeze-and-excitation so too.
            said = said or next(module.parameters(), None) is not None
        if name and said and not any(f"{name}.".startswith(f"{one}.") or one.startswith(f"{name}.") for one in inside):
            inside.append(name)
            others.append(AttentionSite((name,), module, model.get_submodule(name.rpartition(".")[0]), UNKNOWN))
    if not found:
        # With their modules, because several libraries have a class Attention.
        listed = [f"{site.name} ({type(site.module).__module__}.{site.kind})" for site in others]
        seen = f"what it has is {_listed(listed)}" if others else "it has nothing called attention"
        kinds = "; ".join(dict.fromkeys(adapter.about for adapter in ADAPTERS if adapter.about))
        remedy = (
            "describe a class of your own to tokenmix.swap.register_adapter"
            if others
            else "tokenmix.insert adds a block to such a model"
        )
        raise UserError(
            f"{type(model).__name__} has no attention that can be swapped: {seen}; looked for: {kinds}; {remedy}"
        )
    return [*found.values(), *others]


def select_sites(sites: Sequence[AttentionSite], where: Where) -> list[AttentionSite]:
    """The sites selected by `where`; `UserError` if there are none, or a listed name is unknown."""
    names = [name for site in sites for name in site.names]
    if isinstance(where, str) and re.search(r"\[!?(\d\d+-\d+|\d+-\d\d+)\]", where):
        raise UserError(
            f"where={where!r}: a bracket of a glob holds single characters, not a range of numbers above 9; give "
            "a glob such as '*.[6-9].*' or '*.1[01].*', in Python also a list of names"
        )
    if not isinstance(where, str) and not callable(where):
        for name in where:
            if name not in names:
                raise unknown_name("attention of the model", name, names)

    def meant(name: str, site: AttentionSite) -> bool:
        if isinstance(where, str):
            return fnmatch.fnmatchcase(name, where)
        return where(name, site.module) if callable(where) else name in where

    chosen = [site for site in sites if any(meant(name, site) for name in site.names)]
    if not chosen:
        reason = "the function" if callable(where) else repr(where)
        raise UserError(f"where={reason} matches no attention; there are {_listed(names)}")
    return chosen


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} in all)"
