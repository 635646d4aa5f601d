"""A comparison over data sets, sizes and numbers of tokens: one per combination, and a common table."""

import dataclasses
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path

from tokenmix.errors import UserError, unknown_name
from tokenmix.files import Values, copy_folder, inside, new_folder, replace_file
from tokenmix.lab.compare.report import write_page
from tokenmix.lab.compare.results import Heading, Results, Row, Table, TableCell, Variant
from tokenmix.lab.compare.variants import FREE
from tokenmix.lab.data.lookup import data_sets, short_name, with_absolute_paths
from tokenmix.lab.grid import Cell
from tokenmix.lab.train.config import CompareConfig, EngineConfig, TrainConfig, comparison_config
from tokenmix.lab.train.folder import read_part
from tokenmix.lab.train.run import finish_run
from tokenmix.profiling.units import count, spread
from tokenmix.registry import list_models
from tokenmix.trust import from_file

FILES = ("grid.json", "compare.json")
"""Files that identify the grid, or the comparison, of a folder."""
AXES = ("patch", "img_sizes")
MERGING = ("merge", "out", "device", "threads")
"""Settings allowed with `--merge`; all others come from the folders."""


def split_grid(config: CompareConfig) -> tuple[Path, dict[str, tuple[CompareConfig, Path]]]:
    """The folder, and by name each comparison of one data set, size, patch and image size, with its own folder.

    A single comparison has the name "" and the folder itself. Engine settings are removed from the comparisons because
    they do not change results. `UserError` for an unknown size, or two data sets of one name.
    """
    config = dataclasses.replace(config, only=(), merge=None, engine=EngineConfig())
    pairs, inputs = list(product(data_sets(config.data.data), _models(config))), _inputs(config)
    sets = list(dict.fromkeys(short_name(data) for data, _ in pairs))
    if len(pairs) == 1:
        sets = [pairs[0][0].replace(":", "-").replace("/", "-")]
    out, found = config.out or Path("runs") / f"compare-{'-'.join(sets)}", {}
    for (data, model), (label, changes) in product(pairs, inputs.items()):
        own = f"{short_name(data)}-{model.rpartition('_')[2]}" if len(pairs) > 1 else ""
        name = f"{own}{'-' * bool(own and label)}{label}"
        if name in found:
            raise UserError(f"two data sets are called {short_name(data)}; compare on them one after the other")
        folder = inside(out, name) if name else out
        spec = with_absolute_paths(data)  # as runs have it
        one = config.replace(data=spec, model=model, sizes=(), patch=(), img_sizes=(), **changes)
        found[name] = one.replace(out=folder) if name else one, folder
    return out, found


def _inputs(config: CompareConfig) -> dict[str, Values]:
    """Options of each patch and image size, by a label that names the sizes that vary."""
    patches, sides = (tuple(dict.fromkeys(axis)) for axis in (config.patch, config.img_sizes))
    found: dict[str, Values] = {}
    for patch, side in product(patches or (None,), sides or (None,)):
        words = [f"patch{patch}"] * (len(patches) > 1) + [f"{side}px"] * (len(sides) > 1)
        kwargs = {} if patch is None else {"model_kwargs": {**config.model.model_kwargs, "patch_size": patch}}
        found["-".join(words)] = kwargs | ({} if side is None else {"img_size": side})
    return found


def _models(config: CompareConfig) -> list[str]:
    """The model of each size: the model's name with another size after the last underscore."""
    if not config.sizes:
        return [config.model.model]
    family = config.model.model.rpartition("_")[0]
    known = {name.rpartition("_")[2]: name for name in list_models(f"{family}_*")}
    for size in config.sizes:
        if size not in known:
            raise unknown_name(f"size of {family}", size, known)
    return [known[size] for size in dict.fromkeys(config.sizes)]


def choose_cells(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """The cells that `--only` selects, all if it is empty; `UserError` for a name or pattern without a cell.

    A name without its seed, which no run has, selects all seeds.
    """
    names, chosen = [cell.name for cell in cells], set[str]()
    for pattern in only:
        found = [name for name in names if fnmatchcase(name, pattern)]
        found = found or [name for name in names if fnmatchcase(name.rpartition("-seed")[0], pattern)]
        if not found:
            raise unknown_name("run", pattern, names)
        chosen.update(found)
    return [cell for cell in cells if not only or cell.name in chosen]


def merge_settings(config: CompareConfig, folders: Sequence[Path]) -> CompareConfig:
    """Settings of the folders to merge, with all their mixers, seeds, data and sizes; `UserError` if others differ."""
    defaults = comparison_config(config.task).flat()
    given = [name for name, value in config.flat().items() if value != defaults[name] and name not in MERGING]
    if given:
        raise UserError(f"--merge takes the settings of the folders; leave --{given[0].replace('_', '-')} out")
    if not folders:
        raise UserError("--merge needs folders; give those that tokenmix compare has written")
    found = [_settings(folder) for folder in folders]
    first, before = found[0], found[0].flat()
    for folder, other in zip(folders, found):
        families = {(name := one.model.model).rpartition("_")[0] or name for one in (first, other)}
        if len(families) > 1:
            raise UserError(
                f"{folder} holds a comparison of {other.model.model}, {folders[0]} one of {first.model.model}; merge "
                "comparisons of one model, in any of its sizes"
            )
        for name, value in other.flat().items():
            if name not in (*FREE, *AXES, "data", "model") and value != before[name]:
                raise UserError(
                    f"{folder} holds a comparison with {name} {value}, {folders[0]} one with {before[name]}; "
                    "merge comparisons that differ only in mixers, seeds, data and sizes"
                )
    if first.budget == "seconds":
        raise UserError(
            "--merge takes no comparisons with --budget seconds, whose steps each machine measured for itself; "
            "repeat them with --budget images"
        )
    models = list(dict.fromkeys(model for one in found for model in _models(one)))
    return first.replace(
        **{name: getattr(config.loop, name) for name in ("device", "threads")},
        mixers=tuple(dict.fromkeys(mixer for one in found for mixer in one.mixers)),
        controls=any(one.controls for one in found),
        variants={name: options for one in found for name, options in one.variants.items()},
        seeds=tuple(dict.fromkeys(seed for one in found for seed in one.seeds)),
        data=",".join(dict.fromkeys(data for one in found for data in data_sets(one.data.data))),
        model=models[0],
        sizes=tuple(model.rpartition("_")[2] for model in models) if len(models) > 1 else (),
        **{axis: tuple(dict.fromkeys(n for one in found for n in getattr(one, axis))) for axis in AXES},
        out=config.out,
    )


def _settings(folder: Path) -> CompareConfig:
    file = next((name for name in FILES if (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{folder} holds no comparison; give folders that tokenmix compare has written")
    values = {**from_file(read_part(folder, file)), "out": folder}
    return comparison_config(str(values.get("task", CompareConfig.task))).replace(**values)


def copy_runs(folders: Sequence[Path], cells: Sequence[Cell]) -> None:
    """Copy finished runs of the folders to new cells; `UserError` if a run has other settings than its cell."""
    sources: dict[tuple[object, ...], list[Path]] = {}
    for folder in folders:
        for one, place in split_grid(_settings(folder))[1].values():
            sources.setdefault(_place(one), []).append(place)
    for cell in cells:
        for place in sources.get(_place(cell.config), []):
            run = place / cell.folder.parent.name / cell.folder.name
            if (run / "result.json").is_file() and not cell.is_finished:
                # For a finished run this only compares the config.
                finish_run(cell.config.replace(out=run))
                with new_folder(cell.folder) as partial:
                    copy_folder(run, partial)


def _place(config: CompareConfig | TrainConfig) -> tuple[object, ...]:
    """Settings that distinguish the comparisons of a grid."""
    patch, side = config.model.model_kwargs.get("patch_size"), getattr(config.options, "img_size", None)
    return config.data.data, config.model.model, patch, side


def write_grid(results: Mapping[str, Results], out: Path) -> Path:
    """Write results.md and report.html: scores, linked to the comparisons' folders in `out`, and costs."""
    names = dict.fromkeys(variant.name for one in results.values() for variant in one.variants)
    scores = {name: [_score(one, one.variant(name)) for one in results.values()] for name in names}
    costs = {"tokens": [_tokens(one) for one in results.values()]}
    for name in names:
        found = [one.variant(name) for one in results.values()]
        costs[name] = [TableCell("–" if v is None or v.macs is None else count(v.macs)) for v in found]
    headings = [Heading(name, link=name) for name in results]
    tables = [Table(headings, [Row(name, cells) for name, cells in rows.items()]) for rows in (scores, costs)]
    metric = " or ".join(dict.fromkeys(one.measure for one in results.values()))
    parts = [f"Test {metric}:", tables[0].markdown(), "Tokens and multiply-adds:", tables[1].markdown(), ""]
    replace_file(out / "results.md", "\n\n".join(parts).encode())
    title = f"{len(names)} variants, {len(results)} comparisons"
    return write_page(out / "report.html", "grid.html", title=title, metric=metric, tables=tables)


def _tokens(results: Results) -> TableCell:
    """Tokens of one sample; for a network with several stages, of each stage."""
    tokens = results.skeleton.get("num_tokens", "–")
    return TableCell(", ".join(map(str, tokens)) if isinstance(tokens, list) else str(tokens))


def _score(results: Results, variant: Variant | None) -> TableCell:
    """A score with its spread; best if, with several seeds, the variant is among the leaders."""
    if variant is None or variant.score is None:
        return TableCell("–")
    several = len(results.variants) > 1 and len(results.config["seeds"]) > 1
    return TableCell(spread(variant.score, variant.deviation), best=several and variant in results.leaders())
