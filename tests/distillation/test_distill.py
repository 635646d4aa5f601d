"""Learning another model's outputs and layers: against plain loops, for every kind of batch, and what is refused."""

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tokenmix
from tokenmix.distillation import Fidelity
from tokenmix.distillation.outputs import neighbour_overlap
from tokenmix.errors import UserError
from tokenmix.layers import SelfAttention


class Net(nn.Module):
    """Two residual layers on tokens (B, N, 8), their mean, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = SelfAttention(8, num_heads=2), SelfAttention(8, num_heads=2)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.head(self.dropout(x + self.second(x)).mean(1))


class TextNet(nn.Module):
    """Tokens and their mask, as a model of transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = SelfAttention(8, num_heads=2)

    def forward(self, inputs: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        assert labels is None
        return {"last_hidden_state": inputs + self.mixer(inputs, attention_mask.bool())}


@pytest.fixture
def teacher() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 4, 8, generator=generator, dtype=torch.float64) for _ in range(5)]


def swapped(teacher: nn.Module, **kwargs: Any) -> Any:
    torch.manual_seed(3)
    student = copy.deepcopy(teacher)
    tokenmix.swap_attention(student, "external", mixer_kwargs={"num_slots": 4}, **kwargs)
    return student


def test_it_is_the_plain_loop(teacher: Net, batches: list[Tensor]) -> None:
    """Forward, AdamW, warm-up, cosine and clipping, written out."""
    student = swapped(teacher)
    plain, targets = copy.deepcopy(student).eval(), copy.deepcopy(teacher).eval()
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in plain.parameters()]
    losses, total, lr, decay = [], 8, 0.01, 0.1
    for step in range(total):
        x = batches[step % 5]
        loss = torch.zeros((), dtype=torch.float64)
        for s, t in zip(plain(x), targets(x).detach()):
            loss = loss + (1 - (s * t).sum() / (s.norm() * t.norm())) / len(x)
        gradients = torch.autograd.grad(loss, list(plain.parameters()))
        norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
        rate = lr * min(1, (step + 1) / (0.25 * total)) * (1 + math.cos(math.pi * step / total)) / 2
        with torch.no_grad():
            for p, g, (m, v) in zip(plain.parameters(), gradients, moments):
                g = g * min(1.0, 1.0 / (norm + 1e-6))
                m.mul_(0.9).add_(0.1 * g)
                v.mul_(0.999).add_(0.001 * g * g)
                p.mul_(1 - rate * decay)
                p.sub_(rate * (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8))
        losses.append(loss.item())
    report = tokenmix.distill(
        teacher, student, batches, steps=8, lr=lr, weight_decay=decay, warmup=0.25, report_every=1
    )
    # Cosines are taken in float32.
    assert [point.loss for point in report.curve] == pytest.approx(losses, rel=1e-4)
    for ours, theirs in zip(student.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert report.steps == 8
    assert report.before is None


def test_a_student_comes_nearer(teacher: Net, batches: list[Tensor]) -> None:
    student, before = swapped(teacher), copy.deepcopy(teacher.state_dict())
    held = [torch.randn(30, 4, 8, dtype=torch.float64)]
    report = tokenmix.distill(teacher, student, batches, steps=150, held_out=held, loss="mse", lr=0.01)
    assert report.after.mse < 0.3 * report.before.mse
    assert report.after.cosine > report.before.cosine
    assert report.curve[-1].held_out == report.after
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert teacher.training
    assert student.training
    assert report.student is student


def test_fidelity_is_what_it_says(teacher: Net) -> None:
    student, x = swapped(teacher), torch.randn(24, 4, 8, dtype=torch.float64)
    report = tokenmix.distill(teacher, student, [x], steps=0, held_out=[x[:20], x[20:]], loss="kl", temperature=2.0)
    ours, theirs = student.eval()(x).tolist(), teacher.eval()(x).tolist()

    def cosine(a: list[float], b: list[float]) -> float:
        return sum(p * q for p, q in zip(a, b)) / math.sqrt(sum(p * p for p in a) * sum(q * q for q in b))

    def nearest(rows: list[list[float]], i: int) -> set[int]:
        others = [j for j in range(24) if j != i]
        return set(sorted(others, key=lambda j: -cosine(rows[i], rows[j]))[:10])

    def share(row: list[float]) -> list[float]:
        return [math.exp(v / 2) / sum(math.exp(w / 2) for w in row) for v in row]

    found = report.before
    assert found == report.after
    assert found.rows == 24
    assert found.cosine == pytest.approx(sum(map(cosine, ours, theirs)) / 24, rel=1e-5)
    errors = sum((p - q) ** 2 for a, b in zip(ours, theirs) for p, q in zip(a, b))
    assert found.mse == pytest.approx(errors / sum(q * q for row in theirs for q in row), rel=1e-5)
    same = sum(a.index(max(a)) == b.index(max(b)) for a, b in zip(ours, theirs))
    assert found.agreement == pytest.approx(same / 24)
    overlap = sum(len(nearest(ours, i) & nearest(theirs, i)) for i in range(24)) / 240
    assert found.neighbours == pytest.approx(overlap)
    divergence = sum(q * math.log(q / p) for a, b in zip(ours, theirs) for p, q in zip(share(a), share(b)))
    # Logarithms that nearly cancel, in float32.
    assert found.loss == pytest.approx(4 * divergence / 24, rel=1e-5, abs=1e-6)


def test_neighbours_of_the_same_rows_are_the_same() -> None:
    rows = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    assert neighbour_overlap(rows, 3 * rows) == 1
    assert neighbour_overlap(rows, rows.flip(0)) < 0.6


def test_layers_learn_on_the_teachers_input(teacher: Net, batches: list[Tensor]) -> None:
    student, kept = swapped(teacher), copy.deepcopy(teacher.head.state_dict())
    x, plain = batches[0], copy.deepcopy(student)
    first = teacher.first(x)
    second = teacher.second(x + first)
    errors = [(plain.first(x) - first, first), (plain.second(x + first) - second, second)]
    wanted = sum(((d**2).sum() / (t**2).sum()).item() for d, t in errors) / 2
    report = tokenmix.distill(
        teacher, student, [x], steps=60, loss=None, layers=["first", "second"], train_only="mixers", lr=0.01
    )
    assert report.curve[0].loss < wanted
    assert report.curve[-1].loss < 0.9 * report.curve[0].loss
    assert all(torch.equal(value, kept[name]) for name, value in student.head.state_dict().items())
    both = tokenmix.distill(teacher, plain, [x], steps=1, layers="[fs]*", layer_weight=2.0, report_every=1)
    alone = copy.deepcopy(swapped(teacher)).eval()
    cosine = nn.functional.cosine_similarity(alone(x), teacher.eval()(x), dim=-1)
    assert both.curve[0].loss == pytest.approx((1 - cosine).mean().item() + 2 * wanted, rel=1e-4)


def text_batches(padding: float) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    inputs, mask = torch.randn(6, 4, 8, generator=generator), torch.ones(6, 4, dtype=torch.long)
    inputs[:, 3], mask[:, 3] = padding, 0
    return [{"inputs": inputs, "attention_mask": mask, "labels": torch.zeros(6), "token_type_ids": mask}]


@pytest.mark.parametrize("output", [None, "mean", "cls", lambda result, batch: result["last_hidden_state"][:, 1]])
def test_padding_and_labels_do_not_count(output: Any) -> None:
    torch.manual_seed(0)
    teacher = TextNet()
    found = []
    for padding in (0.0, 7.0):
        student = swapped(teacher)
        data = text_batches(padding)
        report = tokenmix.distill(teacher, student, data, output=output, layers=["mixer"], steps=3, held_out=data)
        found.append((report.curve, report.after))
    (curve, after), (other_curve, other_after) = found
    assert [p.loss for p in curve] == pytest.approx([p.loss for p in other_curve], rel=1e-5)
    assert after.cosine == pytest.approx(other_after.cosine, rel=1e-5)
    assert after.rows == (18 if output is None else 6)


def test_tensors_tuples_and_dicts_are_the_same(teacher: Net, batches: list[Tensor]) -> None:
    kinds: list[list[Any]] = [
        batches,
        [(x, torch.zeros(6)) for x in batches],
        [[x] for x in batches],
        [{"x": x, "label": torch.zeros(6)} for x in batches],
        [({"x": x}, torch.zeros(6)) for x in batches],
    ]
    losses = [[p.loss for p in tokenmix.distill(teacher, swapped(teacher), k, steps=5).curve] for k in kinds]
    assert all(row == losses[0] for row in losses)


def test_the_seed_decides_the_order(teacher: Net, batches: list[Tensor]) -> None:
    loader = DataLoader(TensorDataset(torch.cat(batches)), batch_size=6, shuffle=True)
    before = torch.random.get_rng_state()
    curves = []
    for seed in (4, 4, 5):
        torch.manual_seed(len(curves))
        student = swapped(teacher)
        report = tokenmix.distill(teacher, student, loader, seed=seed, report_every=1)
        curves.append([point.loss for point in report.curve])
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]
    assert len(curves[0]) == 5, "one pass"
    torch.random.set_rng_state(before)
    tokenmix.distill(teacher, swapped_without_seed(teacher), loader)
    assert torch.equal(torch.random.get_rng_state(), before)


def swapped_without_seed(teacher: Net) -> Any:
    with torch.random.fork_rng():
        return swapped(teacher)


def test_ctrl_c_keeps_what_was_reached(teacher: Net, batches: list[Tensor]) -> None:
    def interrupted() -> Iterator[Tensor]:
        yield from batches[:3]
        raise KeyboardInterrupt

    student, whole = swapped(teacher), swapped(teacher)
    student.head.requires_grad_(False)
    report = tokenmix.distill(teacher, student, interrupted(), steps=20, held_out=batches[4:], warmup=0.0)
    assert report.interrupted
    assert report.steps == 3
    assert report.after != report.before
    assert "interrupted after 3 steps" in str(report)
    assert not student.head.weight.requires_grad
    assert student.first.query.weight.requires_grad
    assert all(p.grad is None for p in student.parameters())
    assert not tokenmix.distill(teacher, whole, batches, steps=2).interrupted


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@pytest.mark.parametrize(("train_only", "moves"), [(None, True), ("linear.*", False), (["norm.weight"], True)])
def test_only_what_is_chosen_learns(train_only: Any, moves: bool) -> None:
    torch.manual_seed(0)
    teacher, student, x = Norms(), Norms(), torch.randn(32, 8) + 3
    before = copy.deepcopy(student.state_dict())
    report = tokenmix.distill(teacher, student, [x], steps=3, train_only=train_only)
    changed = {name for name, value in student.state_dict().items() if not torch.equal(value, before[name])}
    assert ("norm.running_mean" in changed) is moves
    assert ("linear.weight" in changed) is (train_only != ["norm.weight"])
    assert ("norm.weight" in changed) is (train_only != "linear.*")
    assert report.trained == {None: 43, "linear.*": 27}.get(train_only if train_only is None else str(train_only), 8)
    by_function = tokenmix.distill(teacher, student, [x], steps=1, train_only=lambda name, p: p.dim() == 2)
    assert by_function.trained == 24


def test_a_loss_of_ones_own_is_given_the_outputs(teacher: Net, batches: list[Tensor]) -> None:
    seen = []

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        seen.append((student.shape, teacher.requires_grad))
        return (student - teacher).abs().mean()

    report = tokenmix.distill(teacher, swapped(teacher), batches, steps=40, loss=loss, held_out=batches[:2], lr=0.01)
    assert set(seen) == {((6, 5), False)}
    assert report.after.loss < report.before.loss


def test_the_report_is_for_people_and_programs(teacher: Net, batches: list[Tensor]) -> None:
    lines: list[str] = []
    report = tokenmix.distill(
        teacher, swapped(teacher), batches, steps=4, report_every=2, held_out=batches * 2, progress=lines.append
    )
    text = str(report)
    assert text.splitlines()[0].split() == ["step", "loss", "cosine", "mse", "agreement", "neighbours"]
    assert [line.split()[0] for line in text.splitlines()[1:4]] == ["0", "2", "4"]
    assert "after 4 steps" in text
    assert "60 held-out rows" in text
    assert report.after.cosine > report.before.cosine
    assert "loss rose" not in text
    worse = tokenmix.distill(teacher, swapped(teacher), batches, steps=4, lr=10.0, held_out=batches)
    assert worse.after.cosine < worse.before.cosine
    assert f"; the held-out loss rose from {worse.before.loss:.4f} to {worse.after.loss:.4f}" in str(worse)
    assert report._repr_html_().count("<tr>") == 4
    assert json.loads(json.dumps(report.to_json()))["curve"][1]["step"] == 4
    assert lines[0].startswith("step 2 of 4: loss ")
    bare = tokenmix.distill(teacher, swapped(teacher), batches, steps=2)
    assert bare.after is None
    assert str(bare).splitlines()[0].split() == ["step", "loss"]
    assert json.loads(json.dumps(bare.to_json()))["before"] is None


def test_half_precision_of_forward_passes(teacher: Net, batches: list[Tensor]) -> None:
    single, data = teacher.float(), [x.float() for x in batches]
    losses = [
        tokenmix.distill(single, swapped(single), data, steps=5, precision=precision).curve[-1].loss
        for precision in ("fp32", "bf16")
    ]
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.2, abs=0.02)


def test_pixels_are_rows() -> None:
    torch.manual_seed(0)
    teacher, x = nn.Conv2d(3, 4, 1), torch.randn(2, 3, 5, 5)
    report = tokenmix.distill(teacher, nn.Conv2d(3, 4, 1), [x], steps=0, held_out=[x])
    assert isinstance(report.before, Fidelity)
    assert report.before.rows == 50
    assert report.before.neighbours is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"loader": (x for x in ())}, "does not say how many batches it has; give steps="),
        ({"loader": [], "steps": 2}, "the loader has no batch"),
        ({"loader": iter([torch.zeros(2, 4, 8)]), "steps": 2}, "ended after 1 batches and cannot be read again"),
        ({"loss": "cosinus"}, "unknown loss 'cosinus'; did you mean cosine"),
        ({"loss": None}, "loss=None trains layers alone; name them by layers="),
        ({"layers": ["frist"]}, "unknown module of teacher and student 'frist'; did you mean first"),
        ({"layers": "nothing*"}, "matches no module of both models"),
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"train_only": "encoder.*"}, r"train_only='encoder.\*' matches nothing.*parameters are first\."),
        ({"lr": float("nan")}, "lr must be a finite number"),
        ({"lr": 1e30, "weight_decay": 0.0, "steps": 4}, "the loss is .* give a smaller lr"),
        ({"temperature": 0.0, "loss": "kl"}, "temperature must be positive"),
        ({"held_out": []}, "held_out has no batch"),
        ({"loader": [{"y": torch.zeros(2, 4, 8)}]}, "a batch has y, and the forward pass of Net takes x; rename"),
        ({"loader": ["text"]}, "a batch is a tensor, a tuple whose first is the input, or a dict"),
        ({"output": lambda result, batch: 3}, "gives int; name an output that is a tensor"),
        ({"output": "mean"}, r"output='mean' pools tokens \(B, N, D\), got \(2, 5\)"),
        ({"student": nn.Linear(8, 5)}, r"output is \(2, 4, 5\) and the teacher's \(2, 5\)"),
        ({"student": nn.ReLU()}, "the student is without weights"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    torch.manual_seed(0)
    teacher = Net()
    given: dict[str, Any] = {"student": swapped(teacher), "loader": [torch.randn(2, 4, 8)], **changes}
    with pytest.raises(UserError, match=message):
        tokenmix.distill(teacher, **given)


def test_the_teacher_is_no_student(teacher: Net, batches: list[Tensor]) -> None:
    with pytest.raises(UserError, match=r"the same model as the teacher; give a copy\.deepcopy"):
        tokenmix.distill(teacher, teacher, batches)


def test_outputs_are_named(teacher: Net) -> None:
    text = TextNet()
    with pytest.raises(UserError, match="the model returns last_hidden_state, and pooler is not among them"):
        tokenmix.distill(text, swapped(text), text_batches(0.0), output="pooler")


def test_batches_that_do_not_fit_are_one_line() -> None:
    teacher, student = nn.Linear(4, 2), nn.Linear(4, 2)
    with pytest.raises(UserError, match="the loader is one tensor"):
        tokenmix.distill(teacher, student, torch.randn(8, 4))
    with pytest.raises(UserError, match=r"Linear on a batch \(8, 3\) fails with"):
        tokenmix.distill(teacher, student, [torch.randn(8, 3)])


@pytest.mark.parametrize("output", [None, "mean"])
def test_padding_of_sound_does_not_count(output: Any) -> None:
    from transformers import HubertConfig, HubertModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    layers = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    config = HubertConfig(**sizes, **layers, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2)
    torch.manual_seed(0)
    teacher = HubertModel(config).eval()
    student, mask = copy.deepcopy(teacher), torch.ones(2, 400, dtype=torch.long)
    mask[1, 100:] = 0
    tokenmix.swap_attention(student, "external", example_inputs=(torch.randn(1, 400),))
    batch = {"input_values": torch.randn(2, 400) * mask, "attention_mask": mask}
    found = tokenmix.distill(teacher, student, [batch], output=output, loss="mse", steps=0, held_out=[batch])
    ours, theirs = (model(**batch).last_hidden_state for model in (student.eval(), teacher))
    lengths = [ours.shape[1], int(teacher._get_feat_extract_output_lengths(torch.tensor(100)))]
    rows = [(one[i, :n], other[i, :n]) for i, n in enumerate(lengths) for one, other in [(ours, theirs)]]
    if output == "mean":
        rows = [(one.mean(0, keepdim=True), other.mean(0, keepdim=True)) for one, other in rows]
    one, other = (torch.cat(part) for part in zip(*rows, strict=True))
    assert found.after is not None
    assert found.after.rows == len(one)
    assert found.after.mse == pytest.approx(((one - other).square().sum() / other.square().sum()).item(), rel=1e-4)


def test_layers_that_are_not_called_are_refused() -> None:
    class Unused(TextNet):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(8, 8)

    with pytest.raises(UserError, match="the forward pass does not call other; name layers that it calls"):
        tokenmix.distill(Unused(), swapped(Unused()), text_batches(0.0), layers=["other"], loss=None, steps=1)


def test_a_mask_of_another_length_is_said() -> None:
    class Halved(TextNet):
        def forward(self, inputs: Tensor, attention_mask: Tensor, **more: Tensor) -> dict[str, Tensor]:
            return {"last_hidden_state": super().forward(inputs, attention_mask)["last_hidden_state"][:, ::2]}

    teacher = Halved()
    with pytest.warns(UserWarning, match=r"an output has 2 tokens and attention_mask 4, so that padding counts"):
        tokenmix.distill(teacher, swapped(teacher), text_batches(0.0), steps=1)
    # Outputs of a decoder have the decoder's mask.
    mask = torch.tensor([[1, 1]] * 5 + [[1, 0]])
    (batch,) = text_batches(0.0)
    batch |= {"decoder_input_ids": mask, "decoder_attention_mask": mask}
    found = tokenmix.distill(teacher, swapped(teacher), [batch], steps=0, held_out=[batch])
    assert found.after is not None
    assert found.after.rows == 11


def test_mixers_include_an_inserted_block() -> None:
    """Its gamma is 0 at the start, so that the mixer alone would learn nothing."""
    torch.manual_seed(0)
    teacher = Net()
    student = copy.deepcopy(teacher)
    student.head.weight.data.mul_(0.5)
    batches = [torch.randn(4, 6, 8)] * 4
    tokenmix.insert(student, "first", "external", example_inputs=(batches[0],))
    tokenmix.distill(teacher, student, batches, loss="mse", steps=4, train_only="mixers", lr=1e-2)
    assert student.first.inserted.gamma.any()


def test_a_student_in_evaluation_stays_in_it() -> None:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    student = copy.deepcopy(teacher)
    tokenmix.distill(teacher, student, [torch.randn(4, 3, 8, 8)], loss="mse", steps=2)
    assert not any(module.training for module in student.modules())


def test_a_teacher_that_shares_what_is_trained_is_refused(teacher: Net, batches: list[Tensor]) -> None:
    student = copy.deepcopy(teacher)
    student.first = teacher.first
    with pytest.raises(UserError, match=r"which shares first\."):
        tokenmix.distill(teacher, student, batches)
    tokenmix.distill(teacher, student, batches, steps=1, train_only="head.*")
