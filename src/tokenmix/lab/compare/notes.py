"""The sentences of a report: what was held equal, and how far the numbers carry."""

import math

from tokenmix.lab.compare.results import Results, Variant
from tokenmix.lab.train.task import size_note
from tokenmix.profiling.units import ratio


def budget_sentence(results: Results) -> str:
    """What every variant had in common."""
    config, skeleton = results.config, results.skeleton
    augment = "no augmentation" if config["augment"] == "none" else f"augmentation {config['augment']}"
    seeds = config["seeds"]
    order = f"for the same seed ({', '.join(map(str, seeds))})" if len(seeds) > 1 else f"(seed {seeds[0]})"
    sizes = f"{size_note(skeleton)}, " if "img_size" in skeleton else ""
    tokens = "" if "num_tokens" in skeleton else f", {skeleton['tokens']} tokens"
    return (
        f"Every variant is {config['model']} ({sizes}width {skeleton['dim']}, {skeleton['depth']} blocks{tokens}) and "
        "differs from the others only in its mixer. Each was trained on the same "
        f"{results.training_images():,} images, {results.images:,} counting repeats, in the same order {order}, in "
        f"batches of {config['batch_size']}, with {config['opt']}, peak learning rate {config['lr']:g}, "
        f"{config['schedule']} schedule, weight decay {config['weight_decay']:g} and {augment}. "
        "Parameters, multiply-adds, time and memory are not made equal: they are what is compared."
    )


def finding_sentence(results: Results) -> str:
    """The headline result in a sentence."""
    leaders, reference = results.leaders(), results.variant("self")
    if not leaders:
        return "No variant finished."
    best, *tied = leaders
    if tied:
        scores = ", ".join(f"{variant.mixer} {variant.score:.4f}" for variant in leaders)
        return f"No clear best {results.metric}: chance can explain the differences between {scores}."
    one = len(results.config["seeds"]) == 1
    text = f"{'Highest' if one else 'Best'} {results.metric}: {best.mixer}, {best.score:.4f}"
    if reference is not None and reference.score is not None and best is not reference:
        macs = ratio(best.macs, reference.macs)
        text += f", at {macs} the multiply-adds of self-attention, which reached {reference.score:.4f}"
    return f"{text}; one seed does not show that it is the best." if one else f"{text}."


def notes(results: Results) -> list[str]:
    """What a reader must know before quoting a number."""
    return [*failed_runs(results), *uncertainty(results), *_cost(results), *_method(results)]


def failed_runs(results: Results) -> list[str]:
    """What happened to the runs that did not finish."""
    return [f"{variant.mixer} failed, {variant.message}" for variant in results.variants if variant.message]


def uncertainty(results: Results) -> list[str]:
    """What a score is to be held against: a simpler method's, and by how much scores differ by chance."""
    score, images = results.best(lambda t: t.score, True), results.test_images()
    found = [f"{name} on the same images: {results.metric} {value:.4f}" for name, value in results.baseline.items()]
    if results.metric == "accuracy" and score is not None and images:
        error = math.sqrt(score * (1 - score) / images)
        found.append(
            f"With {images:,} test images the standard error of one accuracy is {error:.4f}: two runs that differ "
            f"by less than about {2 * math.sqrt(2) * error:.4f} may differ by chance."
        )
    if len(results.config["seeds"]) == 1:
        found.append("One seed was run; another seed moves the accuracies too. --seeds 0,1,2 measures by how much.")
    return found


def _cost(results: Results) -> list[str]:
    """How the mixers' layers compare with self-attention's here, and at which N they take fewer multiply-adds."""
    reference = results.variant("self")
    others = [variant for variant in results.variants if variant is not reference and variant.crossover]
    if reference is None or not others:
        return []
    tokens, dim = results.skeleton["tokens"], results.skeleton["dim"]
    listed = "; ".join(f"{t.mixer} {ratio(t.mixer_macs, reference.mixer_macs)}, fewer {_where(t)}" for t in others)
    return [
        "Multiply-adds of the mixers without the rest of the network, relative to self-attention, at "
        f"N = {tokens}, and for which N a layer of width {dim} needs fewer: {listed}."
    ]


def _where(variant: Variant) -> str:
    return {"never": "at no N", "always": "at every N"}.get(variant.crossover or "", variant.crossover or "")


def _method(results: Results) -> list[str]:
    return [
        f"The {results.metric} and the confusion matrix are those after the last epoch. Maps are of the weights in the "
        "run folder, which are those of the best epoch.",
        "Times are medians of interleaved rounds in one process, so a machine that slows down slows "
        "all; they hold for this machine and these sizes. Multiply-adds (MACs) are counted from the equations; 1 MAC "
        "is 2 FLOP.",
        "Memory is the peak held by the allocator above weights, optimiser state and input "
        f"(batch {results.step_batch}, precision {results.config['precision']}).",
    ]
