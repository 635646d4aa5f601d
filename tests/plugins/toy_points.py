"""Small point networks as a user writes them: one without a mask, one that also returns features."""

import torch
from torch import Tensor, nn


class Attending(nn.Module):
    """Classes of clouds, by one encoder layer of PyTorch."""

    def __init__(self, num_classes: int, in_chans: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(in_chans, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, num_classes)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(points)).amax(1))


class Masked(Attending):
    """The same with a mask, True at a cloud's points."""

    def forward(self, points: Tensor, mask: Tensor | None = None) -> Tensor:  # pyrefly: ignore[bad-override]
        hidden = None if mask is None else ~mask
        features = self.encoder(self.embed(points), src_key_padding_mask=hidden)
        if mask is not None:
            features = features.masked_fill(~mask[..., None], -torch.inf)
        return self.head(features.amax(1))


class Parts(nn.Module):
    """A part of each point, with the features beside them, as PointNet returns them."""

    def __init__(self, num_classes: int, num_categories: int) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, 32), nn.ReLU())
        self.kind = nn.Embedding(num_categories, 32)
        self.mix = nn.Identity()
        self.head = nn.Linear(64, num_classes)

    def forward(self, points: Tensor, category: Tensor) -> tuple[Tensor, Tensor]:
        features = self.mix(self.embed(points) + self.kind(category)[:, None])
        whole = features.amax(1, keepdim=True).expand_as(features)
        return self.head(torch.cat([features, whole], -1)).log_softmax(-1), whole


class Transposed(Attending):
    """Points as (B, C, N)."""

    def forward(self, points: Tensor) -> Tensor:
        return super().forward(points.transpose(1, 2))
