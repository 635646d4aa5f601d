"""One folder per domain: data, models, tasks, metrics and output files. Importing registers tasks and layouts."""

from functools import partial

from tokenmix.lab.registry import TASKS, TaskEntry, register_dataset

HERE = "tokenmix.lab.tasks"


def _register(name: str, about: str, task: str, options: str, model: str, data: str | None = None, **more: str) -> None:
    defaults = {"model": model} | ({} if data is None else {"data": data})
    place = {"task": f"{HERE}.{task}", "options": f"{HERE}.{options}", "defaults": defaults}
    TASKS.register(TaskEntry(name=name, about=about, **place, **more))


_register(
    "image-classification",
    "one label for each image; accuracy",
    "classification.task:ImageClassification",
    "classification:ClassificationOptions",
    model="vit_nano",
    data="fashion-mnist",
    skeleton="mixer_nano",
    other_models="tokenmix.registry:may_classify_images",
)
_register(
    "semantic-segmentation",
    "a class for each pixel; mean intersection over union",
    "segmentation.task:SemanticSegmentation",
    "segmentation:SegmentationOptions",
    model="eanet_seg_nano",
    other_models="tokenmix.registry:is_elsewhere",
)
_register(
    "detection",
    "boxes with a class; COCO's average precision of boxes",
    "detection.task:Detection",
    "detection:ObjectOptions",
    model="faster_rcnn_nano",
    other_models="tokenmix.registry:is_foreign",
)
_register(
    "instance-segmentation",
    "a mask for each object; COCO's average precision of masks",
    "detection.task:InstanceSegmentation",
    "detection:ObjectOptions",
    model="mask_rcnn_nano",
    other_models="tokenmix.registry:is_foreign",
)
_register(
    "image-generation",
    "images of a class from noise, by a GAN; Fréchet distance",
    "generation.task:ImageGeneration",
    "generation:GenerationOptions",
    model="eagan_nano",
    data="fashion-mnist",
    optim=f"{HERE}.generation:AdversarialOptim",
)
_register(
    "point-classification",
    "one class for each point cloud; overall and balanced accuracy",
    "points.task:PointClassification",
    "points:CloudClassificationOptions",
    model="eapct_cls_nano",
    other_models="tokenmix.registry:is_foreign",
)
_register(
    "point-segmentation",
    "a part for each point of a cloud; mean intersection over union",
    "points.task:PointSegmentation",
    "points:CloudOptions",
    model="eapct_part_nano",
    other_models="tokenmix.registry:is_foreign",
)
_text = partial(
    _register, model="gmlp_text_nano", skeleton="bert_text_nano", other_models="tokenmix.registry:is_transformers"
)
_text(
    "masked-lm",
    "masked words of running text; perplexity at masked positions",
    "text.masked_lm:MaskedLM",
    "text:MaskingOptions",
)
_text(
    "text-classification",
    "one label for each text or pair of texts; accuracy, macro F1",
    "text.classification:TextClassification",
    "text:LabelOptions",
)
_text(
    "question-answering",
    "the answer's span in a context, or none; exact match, F1",
    "text.question_answering:QuestionAnswering",
    "text:QuestionOptions",
)

_SHAPENET = "shapenetcore_partanno_segmentation_benchmark_v0_normal"
for _name, _kinds, _about, _load in (
    ("text", ("corpus",), ", a file or a folder of text files", "text.corpus:load_text_files"),
    ("jsonl", ("corpus", "labelled-text"), "#column, or #text,label", "text.labelled:load_table"),
    ("csv", ("corpus", "labelled-text"), "#column, or #text,label", "text.labelled:load_table"),
    ("parquet", ("corpus", "labelled-text"), "#column, or #text,label", "text.labelled:load_table"),
    ("glue", ("labelled-text",), "/SST-2, in GLUE's layout", "text.labelled:load_glue"),
    ("squad", ("questions",), ", in SQuAD's layout", "text.questions:load_squad"),
    ("clouds", ("clouds", "parts"), "/train/CLASS/*.ply, also OFF, OBJ, NPZ, XYZ", "points.layouts:load_clouds"),
    ("modelnet", ("clouds",), ", OFF meshes or modelnet40_normal_resampled", "points.layouts:load_modelnet"),
    ("shapenet-part", ("clouds", "parts"), f", {_SHAPENET}", "points.layouts:load_shapenet_part"),
):
    _licence = "its authors'" if _name in ("modelnet", "shapenet-part") else "yours"
    _about = f"{_name}:PATH{_about}"
    register_dataset(_name, f"{HERE}.{_load}", kinds=_kinds, about=_about, licence=_licence, variant="path")
register_dataset(
    "hf",
    f"{HERE}.text.questions:load_hub",
    kinds=("corpus", "labelled-text", "questions"),
    about="hf:NAME[:CONFIG] of the Hugging Face hub; #column, or #text,label",
    licence="its author's",
    origin="huggingface.co, by datasets",
    variant="name",
)
