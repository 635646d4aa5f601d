"""What the suite does on a GPU, with stand-ins for it: how it takes times, and what it compares there."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from suite import cuda
from suite.groups import gmlp, memory
from suite.harness import Missing, Variant
from suite.place import Place

RATE = 1.5e9


class Device:
    """A GPU that works off what the host enqueues, each with a clock of its own, in seconds."""

    def __init__(self) -> None:
        self.host = self.done = 0.0
        self.float32_calls = 0

    def enqueue(self, seconds: float, *, launch: float = 5e-6) -> None:
        self.host += launch
        self.done = max(self.done, self.host) + seconds

    def synchronize(self) -> None:
        self.host = max(self.host, self.done)

    def sleep(self, cycles: int) -> None:
        self.enqueue(cycles / RATE)

    def event(self, *, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", max(self.done, self.host))
        event.elapsed_time = lambda end: (end.at - event.at) * 1e3
        return event

    def operation(self, kernels: int, seconds: float, launch: float, first: float = 0.0) -> Callable[[], None]:
        """So many kernels, each of them `seconds` on the device and `launch` in Python; compiling takes `first`."""
        calls: Iterator[float] = iter([first])

        def run() -> None:
            self.host += next(calls, 0.0)
            for _ in range(kernels):
                self.enqueue(seconds, launch=launch)

        return run


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    gpu = Device()
    cold = SimpleNamespace(zero_=lambda: gpu.enqueue(93e-6))
    calls = SimpleNamespace(Event=gpu.event, synchronize=gpu.synchronize, _sleep=gpu.sleep)
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(cuda=calls, empty=lambda *_, **__: cold, int8=None))
    monkeypatch.setattr(cuda, "time", SimpleNamespace(perf_counter=lambda: gpu.host))
    return gpu


GPU = Place("cuda", torch.bfloat16, 1)


def test_times_are_those_of_the_device_and_not_of_python(device: Device) -> None:
    functions = {
        "many launches": device.operation(40, 2e-6, 20e-6, first=5.0),
        "one large": device.operation(1, 5e-3, 20e-6),
    }
    times = GPU.time(functions, 20, 1.0)
    assert len(times["many launches"].runs) == 20
    assert times["many launches"].median == pytest.approx(40 * 2e-6)
    assert times["one large"].median == pytest.approx(5e-3)


def test_the_device_is_warm_before_it_is_timed(device: Device) -> None:
    begun: list[float] = []
    work = device.operation(1, 1e-3, 5e-6)

    def run() -> None:
        begun.append(device.host)
        work()

    timing = GPU.time({"a": run}, 10, 1.0)["a"]
    assert len(timing.runs) == 10
    assert begun[-10] - begun[0] >= 0.3


@pytest.mark.parametrize(
    ("repeats", "seconds", "rounds"), [(1000, 0.5, 450), (7, 0.5, 7), (1000, 1e-9, 5), (2, 1e-9, 2)]
)
def test_the_seconds_decide_how_many_rounds(device: Device, repeats: int, seconds: float, rounds: int) -> None:
    timing = GPU.time({"a": device.operation(1, 1e-3, 5e-6)}, repeats, seconds)["a"]
    assert len(timing.runs) == pytest.approx(rounds, rel=0.05)


class Pretended(Place):
    """A place that says it is a GPU and keeps its numbers on the CPU."""

    def randn(self, *shape: int, std: float = 1.0, grad: bool = False) -> torch.Tensor:
        return Place("cpu", self.dtype, 1, self.generator).randn(*shape, std=std, grad=grad)


def test_the_memory_of_the_kernel_is_measured_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CHUNK", 16)
    ours = memory._build(100)(Pretended("cuda", torch.float32, 1)).variants
    assert isinstance(ours["tokenmix"], Variant)
    missing = ours["tokenmix, triton"]
    assert isinstance(missing, Missing)
    assert find_spec("triton") is None or "CUDA" in missing.why
    assert list(memory._build(100)(Place("cpu", torch.float32, 1)).variants) == ["tokenmix"]


@pytest.fixture
def small_twins(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Two linear maps instead of the networks, ours `factor` times as large."""
    monkeypatch.setattr(gmlp, "convert", lambda state, **_: state)

    def put(factor: float) -> None:
        def twins(place: Place) -> tuple[nn.Module, nn.Module]:
            ours, theirs = (nn.Sequential(nn.Flatten(), nn.Linear(3 * 224 * 224, 16)) for _ in range(2))
            theirs.load_state_dict({name: value * factor for name, value in ours.state_dict().items()})
            return place.put(ours), place.put(theirs)

        monkeypatch.setattr(gmlp, "_twins", twins)

    return put


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (2.0, False)])
def test_gradients_of_the_training_step(small_twins, dtype: torch.dtype, factor: float, passes: bool) -> None:
    torch.manual_seed(0)
    small_twins(factor)
    correct = gmlp._train(Place("cpu", dtype, 1)).check()
    assert correct.passed == passes
    assert ("float32" in correct.against) == (dtype != torch.float32)


EXACT = {"weight": torch.tensor([1.0, 0.5]), "bias": torch.tensor([1.0, 0.5])}


def _off(weight: float, bias: float) -> dict[str, torch.Tensor]:
    return {"weight": EXACT["weight"] + weight, "bias": EXACT["bias"] + bias}


@pytest.mark.parametrize(
    ("found", "passes"),
    [
        (_off(0.06, -0.4), True),
        (_off(0.3, 0.0), False),
        (_off(torch.nan, 0.0), False),
        ({**_off(0.0, 0.0), "weight": torch.zeros(2)}, False),
    ],
)
def test_in_a_half_type_a_gradient_may_err_a_few_times_as_much_as_timms_own(
    found: dict[str, torch.Tensor], passes: bool
) -> None:
    assert gmlp._as_good_as(found, _off(-0.05, 0.5), EXACT, GPU).passed == passes
