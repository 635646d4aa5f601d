"""Sentences of a report: the equal budget, and the limits of the numbers."""

import json
from collections.abc import Mapping, Sequence

from tokenmix.lab.compare.results import IDENTITY, NONE, ORIGINAL, Results, Variant
from tokenmix.lab.compare.statistics import MOST_SEEDS
from tokenmix.lab.tasks.classes import total_sizes
from tokenmix.lab.train.task import size_note
from tokenmix.profiling.machine import SPREAD
from tokenmix.profiling.units import ratio

BALANCED = {"class_weights": ", classes of equal weight in the loss", "sampler": ", classes drawn equally often"}
CALLED = {"self": "self-attention", ORIGINAL: "the original model"}
MATTERS = 0.1
"""Effect size that a test of mixing must be able to show, as a share of the score."""
POINTS = 4
"""Fewest validation scores that show whether a network still learns."""


def budget_sentence(results: Results) -> str:
    """Sentence on the setup that all variants share."""
    config, skeleton, unit = results.config, results.skeleton, results.unit
    augment = config.get("augment")
    mixed = [f"{name} {config[name]:g}" for name in ("mixup", "cutmix", "reprob") if config.get(name)]
    augmented = {None: "", "none": " and no augmentation"}.get(augment, f" and {augment} augmentation")
    augmented += f" but {', '.join(mixed)}" * bool(mixed)
    seeds = config["seeds"]
    order = f"for the same seed ({', '.join(map(str, seeds))})" if len(seeds) > 1 else f"(seed {seeds[0]})"
    known = [size_note(skeleton)] if "img_size" in skeleton else []
    known += [f"embedding width {skeleton['dim']}"] if "dim" in skeleton else []
    known += [f"{skeleton['depth']} blocks"] if "depth" in skeleton else []
    if "num_tokens" in skeleton and "img_size" not in skeleton:
        known.append(f"{skeleton['num_tokens']} tokens")
    place = "what replaces its attention layers" if results.variant(ORIGINAL) else "its mixer"
    place = f"the block after {config['insert_after']}" if config.get("insert_after") else place
    rows = config.get("variants") or {}
    if rows:
        told = "; ".join(f"{name}: {', '.join(_options(row)) or 'none'}" for name, row in rows.items())
        options = f"the options of its row ({told})"
        place = options if all(v.name in rows for v in results.variants) else f"{place}, or in {options}"
    start = ", starting from its published weights," if config.get("pretrained") else ""
    start = f", starting from the weights of {config['init_from']}," if config.get("init_from") else start
    balanced = [text for name, text in BALANCED.items() if config.get(name) == "balanced"]
    listed = f" ({', '.join(known)})" if known else ""
    repeats = results.repeats()
    seen = f"the same {results.different_samples():,} {unit}{repeats}{',' * bool(repeats)}"
    steps = results.variants[0].steps
    batches = f"{steps:,} steps on batches" if steps and results.budget == unit else "batches"
    free = "Parameters, multiply-adds, time and memory"
    if results.budget != unit:
        steps = ", ".join(f"{variant.name} {variant.steps:,}" for variant in results.variants)
        what = " by the time of a step, measured before," * (results.budget == "seconds")
        seen = f"{unit} of the same set for equal {results.budget} of training{what} (steps: {steps}),"
        free = f"The {unit} seen, parameters, {'time' if results.budget != 'seconds' else 'multiply-adds'} and memory"
    rate = f"peak learning rate {config['lr']:g}"
    tuned = [v for v in results.variants if any(score is not None for score in v.tuned.values())]
    if tuned:
        chosen = ", ".join(f"{variant.name} {variant.learning_rate:g}" for variant in tuned)
        tried = ", ".join(tuned[0].tuned)
        rate = f"a peak learning rate chosen on validation samples for each of them ({chosen}; tried: {tried})"
    intro = f"Every variant is {config['model']}{listed} and differs from the others only in"
    if len({row.get("model", config["model"]) for row in rows.values()}) > 1:
        intro = "A variant's network differs from the others in"
    other = ", unless its row has others" * bool(rows)
    return (
        f"{intro} {place}. Each was trained{start} on {seen} "
        f"in the same order {order}, in {batches} of {results.step_batch * config['accumulate']}, with "
        f"{config['opt']}, {rate}, {config['schedule']} schedule, weight decay "
        f"{config['weight_decay']:g}{augmented}{''.join(balanced)}{other}. "
        f"{free} differ and are compared below."
    )


def _options(row: Mapping[str, object]) -> list[str]:
    """The options of a variant's table, those of inner tables too."""
    return [
        one
        for name, value in row.items()
        for one in (_options(value) if isinstance(value, Mapping) else [f"{name} = {json.dumps(value)}"])
    ]


def same_sentence(mixer: str) -> str:
    """Why a mixer has no row of its own."""
    return (
        f"{mixer} has no row of its own: it keeps all weights of the original attention, so that it is the same as "
        f"{ORIGINAL}."
    )


def finding_sentence(results: Results) -> str:
    """The main result: the best variant, or a tie; and whether this data tests mixing at all."""
    leaders, reference = results.leaders(), results.variant(results.reference)
    if not leaders:
        finished = any(run.status == "finished" for variant in results.variants for run in variant.runs)
        return "No variant has a score." if finished else "No variant finished."
    best, *tied = leaders
    others = results.ranked()[1:]
    found = results.difference(best, others[0]) if others else None
    if tied:
        scores = ", ".join(f"{variant.name} {variant.score:.4f}" for variant in leaders)
        text = f"No clear best {results.measure}: chance can explain the differences between {scores}"
    elif found is None:
        text = f"One variant has a score: {best.name}, {results.measure} {best.score:.4f}"
    else:
        one = len(results.config["seeds"]) == 1
        word = "Best" if not one else "Highest" if results.higher else "Lowest"
        text = f"{word} {results.measure}: {best.name}, {best.score:.4f}"
        if reference is not None and reference.score is not None and best is not reference:
            name = CALLED.get(reference.name, reference.name)
            share = f"{ratio(best.macs, reference.macs)} the multiply-adds of " if best.macs and reference.macs else ""
            text += f", at {share}{name}, which" if share else f", where {name}"
            text += f" reached {reference.score:.4f}"
        text = f"{text}; one seed does not show that it is the best" if one and not found.known else text
        if found.known:
            text += f". {difference_sentence(results, best, others[0]).removesuffix('.')}"
    told, pick = [f"{text}.", *mixing_sentence(results)], max if results.higher else min
    if results.baselines:
        name = pick(results.baselines, key=lambda name: results.baselines[name])
        value = results.baselines[name]
        if pick([value, *(variant.score or 0.0 for variant in results.ranked())]) == value:
            told.append(f"No network is better than the baseline {name}, {value:.4f}.")
    return " ".join(told)


def difference_sentence(results: Results, a: Variant, b: Variant) -> str:
    """Advantage of `a` over `b`: between mixers if there are several seeds, between two networks with one seed."""
    found = results.difference(a, b)
    if found.same:
        return f"{a.name} and {b.name} have the same score on each test sample."
    low, high = found.interval()
    sampling = results.sampling
    tested = "these test samples" if sampling is None else f"{sampling.samples:,} test {sampling.unit}"
    seeds = " and ".join(map(str, dict.fromkeys(found.seeds)))
    basis = f"95 % interval {low:.4f} to {high:.4f}; {seeds} seed{'s' * found.between_mixers}, {tested}"
    more = f"{found.value:.4f} {'higher' if results.higher else 'lower'}"
    of, apart = "the network with ", "these two networks differ"
    if found.between_mixers:
        of, apart = "", "the mixers differ"
    verdict = apart if found.real else "chance can explain it"
    text = f"The {results.measure} of {of}{a.name} is {more} than that of {of}{b.name} ({basis}): {verdict}."
    return text if found.between_mixers else f"{text} One seed cannot compare the mixers."


def mixing_sentence(results: Results) -> list[str]:
    """Conclusion from the control without mixing; empty if mixing is shown to help."""
    found, none, some = results.mixing(), results.control(), results.attention()
    if none is None or some is None or found is None or not found.known:
        return []
    control, other = f"{none.name}, which mixes no tokens,", CALLED.get(some.name, some.name)
    if found.value > found.critical:
        guesses = [_predicted(run.confusion) for run in none.runs if run.confusion]
        if not guesses or any(len(used) > 1 for used in guesses):
            return []
        return [
            f"Without mixing ({none.name}) one class is predicted for every sample, as by guessing: {other} is better "
            "because it mixes tokens at all. This does not compare ways of mixing."
        ]
    better = found.value < 0 and found.real
    if better and none.name == NONE:
        seed = "" if found.between_mixers else " with this seed"
        return [f"The block did not pay here: the model without it is{seed} {-found.value:.4f} better than {other}."]
    if better and found.between_mixers:
        return [f"Mixing does not help on this data: {control} is better by {-found.value:.4f}."]
    if found.same:
        close = "has the same score on each test sample as"
    elif better:
        close = f"is, with this seed, {-found.value:.4f} better than"
    elif found.critical > MATTERS * abs(some.score or 0.0):
        word = "worse" if found.value > 0 else "better"
        return [
            f"Cannot tell whether mixing helps: {control} is {abs(found.value):.4f} {word} than {other}, and only "
            f"differences above {found.critical:.4f} would show; give more seeds or test {results.unit}."
        ]
    else:
        close = f"is within the critical difference of {found.critical:.4f} from"
    return [f"This comparison does not test mixing: {control} {close} {other}."]


def notes(results: Results) -> list[str]:
    """Notes that a reader needs before quoting a number."""
    counted = ", the confusion matrix" if any(run.confusion for v in results.variants for run in v.runs) else ""
    return [
        *failed_runs(results),
        *map(same_sentence, results.same),
        *_classes(results),
        *_beside_none(results),
        *uncertainty(results),
        *_cost(results),
        f"The {results.measure}{counted} and the samples shown are of the weights in the run folder: {_kept(results)}. "
        "tokenmix eval gives the same numbers.",
        "Times are medians of interleaved rounds in one process, so a slowdown of the machine affects all variants. "
        "They hold for this machine and these sizes.",
        "Multiply-adds (MACs) are counted from the equations, or in a forward pass if a model has none. 1 MAC is 2 "
        "FLOP.",
        "Memory is the allocator's peak above weights, optimiser state and input "
        f"(batch {results.step_batch}, precision {results.config['precision']}).",
    ]


def _predicted(confusion: Sequence[Sequence[int]]) -> set[int]:
    """Classes that are predicted at all: the columns of a confusion matrix that hold samples."""
    return {i for i, column in enumerate(zip(*confusion)) if any(column)}


def _one_class(results: Results) -> list[str]:
    """Networks that predict one class for every test sample; of the control the main result says so."""
    found = []
    for variant in (variant for variant in results.variants if variant is not results.control()):
        # With test samples of one class, it may be right.
        runs = [(run.seed, run.confusion) for run in variant.runs if run.confusion and sum(map(any, run.confusion)) > 1]
        used = {seed: _predicted(confusion) for seed, confusion in runs}
        alike = [f"seed {seed}: {results.classes[min(some)]}" for seed, some in used.items() if len(some) == 1]
        if alike and len(results.classes) > 1:
            found.append(f"{variant.name} ({', '.join(alike)})")
    if not found:
        return []
    return [
        f"One class is predicted for every test sample by {', '.join(found)}: too few steps, or another learning rate; "
        "their scores do not test mixing."
    ]


def _beside_none(results: Results) -> list[str]:
    """The best inserted block against the model without one."""
    none = results.variant(NONE)
    blocks = [variant for variant in results.ranked() if variant.name not in (NONE, IDENTITY)]
    if results.reference != NONE or none is None or none.score is None or not blocks:
        return []
    found = results.difference(blocks[0], none)
    return [difference_sentence(results, blocks[0], none)] if found.known else []


def _classes(results: Results) -> list[str]:
    """Reason for balanced accuracy."""
    counts = total_sizes(results.data.get("counts") or {})
    if results.metric != "balanced_accuracy" or not counts or results.config.get("monitor"):
        return []
    ordered = sorted(counts, key=lambda name: counts[name])
    smallest, largest = (f"{name} {counts[name]:,}" for name in (ordered[0], ordered[-1]))
    weighted = any(results.config.get(name) == "balanced" for name in BALANCED)
    remedy = "" if weighted else " --class-weights balanced raises the recall of small classes."
    return [
        "Balanced accuracy, the mean recall of the classes, since the largest class has more than twice as many "
        f"{results.unit} as the others on average ({largest}, {smallest}).{remedy}"
    ]


def _kept(results: Results) -> str:
    held = results.data.get("validation")
    if not held:
        return "those of the last epoch, as nothing was held out to choose by"
    return f"those of the best epoch on {held:,} validation {results.unit}"


def failed_runs(results: Results) -> list[str]:
    """Messages of the runs that did not finish, and variants whose metric is undefined."""
    failed = [f"{variant.name} failed, {variant.message}" for variant in results.variants if variant.message]
    return failed + [
        f"{results.measure} is not defined for {variant.name}, seed {run.seed}: its answers or the test labels may all "
        "be the same"
        for variant in results.variants
        for run in variant.runs
        if run.status == "finished" and run.score is None
    ]


def uncertainty(results: Results) -> list[str]:
    """Networks that learnt nothing, uncertainty of the scores, and curves that were still improving."""
    again = "by the same command; finished runs are kept."
    warning = results.warning or f"quartiles of a time are over {SPREAD:.0%} of its median apart; measure again"
    found = [] if results.steady else [f"Warning: {warning} {again}"]
    found += _one_class(results)
    if len(ranked := results.ranked()) > 1:
        found += _resolution(results, ranked[0], ranked[1])
    if len(results.config["seeds"]) == 1:
        found.append(
            f"One seed was run. The {results.measure} also varies between seeds: --seeds 0,1,2 measures how much, and "
            "a claim needs 10."
        )
    ends = [
        v.name
        for v in results.variants
        if v.tuned and f"{v.learning_rate:g}" in (min(v.tuned, key=float), max(v.tuned, key=float))
    ]
    if ends:
        found.append(
            f"The best learning rate on validation samples is the lowest or highest that was tried: {', '.join(ends)}; "
            "another one outside of them may be better. Give more values to --tune."
        )
    learning = [variant.name for variant in results.variants if still_learning(results, variant)]
    if learning:
        found.append(
            f"Still learning at the end: {', '.join(learning)}. In the last quarter of training the validation "
            f"{results.measure} improved by over a tenth of what it had gained in all; give more --epochs."
        )
    points = {v.name: max(len(run.score_curve.values) for run in v.runs) for v in results.variants if v.scores}
    short = [name for name, number in points.items() if number < POINTS]
    if short:
        remedy = "give more --epochs" if any(points.values()) else "hold out samples with --validation"
        found.append(
            f"Fewer than {POINTS} validation scores do not show whether training has converged: {', '.join(short)}. "
            f"See the curves of the training loss, or {remedy}."
        )
    return found


def _resolution(results: Results, best: Variant, second: Variant) -> list[str]:
    one, metric = results.difference(best, second), results.measure
    if not one.known:
        return []
    if one.same:
        return [f"{best.name} and {second.name} have the same score on each test sample, so none tells them apart."]
    what = "as mixers" if one.between_mixers else "two networks of one seed"
    found = [
        f"{best.name} and {second.name}, {what}: the critical difference in {metric} (95 %) is {one.critical:.4f}; a "
        f"smaller one may be chance. The minimum detectable effect (80 % power) is {one.detectable:.4f}."
    ]
    if one.real and second in results.leaders():
        found.append(
            f"Their difference, {one.value:.4f}, is larger, but not after Holm's adjustment for the "
            f"{len(results.ranked()) - 1} comparisons with the best."
        )
    if one.between_mixers and not one.real and one.value:
        more, question = one.more_seeds(), f"whether {best.name} is {one.value:.4f} better than {second.name}"
        if more is None and one.limited_by_samples:
            found.append(f"More seeds cannot settle {question}: that needs more test samples.")
        elif more is None:
            found.append(f"More than {MOST_SEEDS:,} seeds would be needed to show {question}.")
        else:
            seeds = f"{more} more seed{'s' * (more > 1)} of each"
            found.append(f"About {seeds} would show {question}, if seeds vary as here.")
    return found


def still_learning(results: Results, variant: Variant) -> bool:
    """Whether the validation score still improved in the last quarter of training, by a tenth of its whole gain."""
    sign = 1 if results.higher else -1
    late = whole = 0.0
    for run in variant.runs:
        curve = [sign * value for value in run.score_curve.values]
        if len(curve) >= POINTS:
            late += curve[-1] - max(curve[: -(len(curve) // 4)])
            whole += curve[-1] - curve[0]
    return late > 0.1 * whole > 0


def _cost(results: Results) -> list[str]:
    """Cost of the mixers' layers relative to self-attention, and the N from which they need less."""
    reference = results.variant("self")
    others = [variant for variant in results.variants if variant is not reference and variant.crossover]
    if reference is None or not reference.layer_macs or not all(variant.layer_macs for variant in others) or not others:
        return []
    tokens, dim = results.skeleton["num_tokens"], results.skeleton["dim"]
    ends = {"never": "at no N", "always": "at every N"}
    listed = "; ".join(
        f"{t.name} {ratio(t.layer_macs or 0, reference.layer_macs)}, fewer {ends.get(t.crossover or '', t.crossover)}"
        for t in others
    )
    return [
        "Multiply-adds of one layer of a mixer without the rest of the network, relative to self-attention, at "
        f"N = {tokens}, and for which N a layer of width {dim} needs fewer: {listed}."
    ]
