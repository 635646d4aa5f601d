"""Many names in little memory: a million Python strings would be copied into every loader process."""

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["Names"]


class Names:
    """Strings as one uint8 tensor and where each ends (int64)."""

    def __init__(self, text: Tensor, ends: Tensor) -> None:
        self.text, self.ends = text, ends

    @classmethod
    def of(cls, names: Iterable[str]) -> "Names":
        """These strings."""
        coded = [name.encode("utf-8", "surrogateescape") for name in names]
        text = torch.frombuffer(bytearray(b"".join(coded)), dtype=torch.uint8) if any(coded) else torch.empty(0).byte()
        return cls(text, torch.tensor([len(name) for name in coded], dtype=torch.int64).cumsum(0))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> str:
        start = int(self.ends[index - 1]) if index else 0
        return self.text[start : int(self.ends[index])].numpy().tobytes().decode("utf-8", "surrogateescape")
