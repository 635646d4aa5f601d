"""Point clouds: classification and part segmentation."""

from tokenmix.lab.registry import DATA_SETS, TASKS, DataEntry, TaskEntry

TASKS.register(
    TaskEntry(
        name="point-classification",
        about="one class for each point cloud; overall and balanced accuracy",
        task="tokenmix.lab.tasks.points.classification:PointClassification",
        options="tokenmix.lab.tasks.points.options:CloudClassificationOptions",
        defaults={"model": "eapct_cls_nano"},
    ),
    TaskEntry(
        name="point-segmentation",
        about="a part for each point of a cloud; mean intersection over union",
        task="tokenmix.lab.tasks.points.segmentation:PointSegmentation",
        options="tokenmix.lab.tasks.points.options:CloudOptions",
        defaults={"model": "eapct_part_nano"},
    ),
)

DATA_SETS.register(
    DataEntry(
        name="clouds",
        kinds=("clouds", "parts"),
        about="clouds:PATH/train/CLASS/*.ply, also OFF, OBJ, NPZ, XYZ",
        load="tokenmix.lab.tasks.points.data.layouts:load_clouds",
        variant="path",
    ),
    DataEntry(
        name="modelnet",
        kinds=("clouds",),
        about="modelnet:PATH, OFF meshes or modelnet40_normal_resampled",
        licence="its authors'",
        load="tokenmix.lab.tasks.points.data.layouts:load_modelnet",
        variant="path",
    ),
    DataEntry(
        name="shapenet-part",
        kinds=("clouds", "parts"),
        about="shapenet-part:PATH, shapenetcore_partanno_segmentation_benchmark_v0_normal",
        licence="its authors'",
        load="tokenmix.lab.tasks.points.data.layouts:load_shapenet_part",
        variant="path",
    ),
)
