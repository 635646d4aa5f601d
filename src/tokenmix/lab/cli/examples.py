"""Three commands for each verb, shown by its help."""

EXAMPLES: dict[str, tuple[str, str, str]] = {
    "list": ("tokenmix list mixers", "tokenmix list models", "tokenmix list data --json"),
    "info": (
        "tokenmix info gmlp_small",
        "tokenmix info eamlp_7 --img-size 384",
        "tokenmix info mixer_nano --model-kwargs mixer=external depth=6",
    ),
    "train": (
        "tokenmix train image-classification --model gmlp_nano --data fashion-mnist --epochs 5 --out runs/first",
        "tokenmix train semantic-segmentation --model eanet_seg_nano --data masks:PATH --crop 112",
        "tokenmix train --resume runs/first",
    ),
    "eval": (
        "tokenmix eval runs/first",
        "tokenmix eval runs/first --data folder:photos --json",
        "tokenmix eval runs/first --optimize int8",
    ),
    "predict": (
        "tokenmix predict runs/first shirt.png boot.png",
        "tokenmix predict runs/first shirt.png --json",
        "tokenmix predict runs/segmenter photograph.jpg --out masks",
    ),
    "generate": (
        "tokenmix generate runs/gan --out images",
        "tokenmix generate runs/gan --classes Sneaker,Bag --num 16 --seed 1 --out images",
        "tokenmix generate runs/gan --interpolate 8 --out images",
    ),
    "compare": (
        "tokenmix compare --mixers self,external,gating --data fashion-mnist --epochs 5 --seeds 0,1,2",
        "tokenmix compare text-classification --mixers external,my_layers:MyMixer --data csv:reviews.csv#text,label",
        "tokenmix compare --model resnet18 --insert-after layer3 --mixers self,external --data folder:photos",
    ),
    "cost": (
        "tokenmix cost external multihead-external --tokens 196,1024,4096",
        "tokenmix cost gmlp_small vit_small_patch16_224 --img-size 224,384 --out cost",
        "tokenmix cost external --tokens 4096,65536 --device cuda --dtype bf16",
    ),
    "inspect": (
        "tokenmix inspect runs/first shirt.png --out maps",
        "tokenmix inspect gmlp_small photograph.jpg",
        "tokenmix inspect runs/pretrained 'a sentence' --out gates",
    ),
    "export": (
        "tokenmix export runs/first",
        "tokenmix export runs/first --format torch-export",
        "tokenmix export runs/first --format onnx --out model.onnx",
    ),
    "swap": (
        "tokenmix swap deit_tiny_patch16_224 --to external",
        "tokenmix swap torchvision:vit_b_16 --to gating --where '*layer_1[01].*'",
        "tokenmix swap runs/first --to multihead-external --mixer-kwargs expansion=1",
    ),
    "distill": (
        "tokenmix distill all-MiniLM-L6-v2 --to external --layers 3-5 --text sentences.txt --out converted",
        "tokenmix distill my_encoder --to em --text sentences.txt --output cls --steps 2000 --out converted",
        "tokenmix distill my_encoder --to gating --max-length 64 --text sentences.txt --precision bf16 --out converted",
    ),
    "probe": (
        "tokenmix probe external",
        "tokenmix probe gating my_layers:MyMixer --tasks recall,shift",
        "tokenmix probe external multihead-external --full --out probe",
    ),
    "doctor": (
        "tokenmix doctor my_layers:MyAttention",
        "tokenmix doctor my_layers:MyAttention --dim 64 --num-tokens 50",
        "tokenmix doctor my_layers:build_layer --json",
    ),
    "data": ("tokenmix data list", "tokenmix data get fashion-mnist", "tokenmix data list --json"),
    "train-tokenizer": (
        "tokenmix train-tokenizer --data text:PATH --out tokenizer",
        "tokenmix train-tokenizer --data jsonl:PATH#text --vocab-size 32000 --out tokenizer",
        "tokenmix train-tokenizer --data text:PATH --kind wordpiece --lowercase yes --out tokenizer",
    ),
}
