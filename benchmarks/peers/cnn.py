"""Classifiers like Q2L and DR-MoE in PyTorch: torchvision's ResNet-101 and label queries that read its feature map.

Q2L, as published on 448 px: one encoder layer over the feature map, two decoder layers without the first
self-attention, width 2,048, 4 heads, 8,192 hidden units, and one weight vector per label. DR-MoE, as published: the
layers of torch.nn.Transformer, width 512, 8 heads, 2,048 hidden units, two encoder and two decoder layers, and per
label a gate over four shared experts and one expert of the label. Q2L freezes batch norm, the stem and the first stage;
DR-MoE trains everything, without a moving average. All values are random.
"""

from __future__ import annotations

import torch
from torch import nn
from torchvision.models import resnet101
from torchvision.ops import FrozenBatchNorm2d

WIDTH, HEADS, HIDDEN = 2048, 4, 8192


class QueryLayer(nn.Module):
    """Cross-attention from the queries to the feature map, then an MLP; each with dropout, residual and LayerNorm."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Dropout(0.1), nn.Linear(HIDDEN, WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.dropout = nn.Dropout(0.1)

    def forward(self, queries: torch.Tensor, labels: torch.Tensor, key: torch.Tensor, value: torch.Tensor):
        """[B,K,D] and the feature map as keys and values [B,N,D] -> [B,K,D]."""
        mixed = self.attention(queries + labels, key, value, need_weights=False)[0]
        queries = self.norms[0](queries + self.dropout(mixed))
        return self.norms[1](queries + self.dropout(self.mlp(queries)))


def random(*shape: int, train: bool = True) -> nn.Parameter:
    """Return a parameter with small random values."""
    return nn.Parameter(0.02 * torch.randn(*shape), requires_grad=train)


class FeatureMap(nn.Module):
    """ResNet-101 without its classifier: f32[B,3,H,W] -> f32[B,N,2048]."""

    def __init__(self, *, frozen: bool):
        super().__init__()
        whole = resnet101(weights=None, norm_layer=FrozenBatchNorm2d if frozen else nn.BatchNorm2d)
        stem = [whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1]
        for module in stem:
            module.requires_grad_(not frozen)
        self.stages = nn.Sequential(*stem, whole.layer2, whole.layer3, whole.layer4)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.stages(pixels.contiguous(memory_format=torch.channels_last)).flatten(2).transpose(1, 2)


class QueryClassifier(nn.Module):
    """Q2L: an encoder layer, two layers of queries, and one weight vector per label."""

    averaged = True

    def __init__(self, labels: int, resolution: int = 448):
        super().__init__()
        self.backbone = FeatureMap(frozen=True)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList(QueryLayer() for _ in range(2))
        self.queries, self.positions = random(1, labels, WIDTH), random(1, (resolution // 32) ** 2, WIDTH, train=False)
        self.kernel, self.bias = random(labels, WIDTH), nn.Parameter(torch.zeros(labels))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        """f32[B,3,H,W] -> the logits [1,B,K], a tuple of one."""
        value = self.encoder(self.project(self.backbone(pixels)) + self.positions)
        labels = self.queries.expand(len(value), -1, -1)
        queries = torch.zeros_like(labels)
        for layer in self.layers:
            queries = layer(queries, labels, value + self.positions, value)
        return (((queries * self.kernel).sum(-1) + self.bias)[None],)


class RoutedExperts(nn.Module):
    """DR-MoE: an encoder and a decoder of two layers, experts of one layer, and a gate and a classifier per label."""

    averaged = False

    def __init__(self, labels: int, resolution: int = 448, *, width: int = 512, hidden: int = 256, shared: int = 4):
        super().__init__()
        self.backbone, self.project = FeatureMap(frozen=False), nn.Linear(WIDTH, width)
        layers = {"d_model": width, "nhead": 8, "dim_feedforward": 2048, "dropout": 0.1, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layers), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layers), 2, nn.LayerNorm(width))
        self.queries, self.positions = random(1, labels, width), random(1, (resolution // 32) ** 2, width, train=False)
        self.shared = nn.Linear(width, shared * hidden)
        self.task, self.task_bias = random(labels, width, hidden), random(labels, 1, hidden)
        self.gate, self.gate_bias = random(labels, width, hidden), random(labels, 1, hidden)
        self.route, self.route_bias = random(labels, hidden, shared + 1), random(labels, 1, shared + 1)
        self.kernel, self.bias = random(labels, hidden), nn.Parameter(torch.zeros(labels))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        """f32[B,3,H,W] -> the logits [1,B,K], a tuple of one."""
        memory = self.encoder(self.project(self.backbone(pixels)) + self.positions)
        features = self.decoder(self.queries.expand(len(memory), -1, -1), memory)
        by_label = features.transpose(0, 1)
        routed = torch.baddbmm(self.gate_bias, by_label, self.gate).relu()
        weights = torch.baddbmm(self.route_bias, routed, self.route).float().softmax(-1).transpose(0, 1)
        shared = self.shared(features).unflatten(-1, (-1, self.kernel.shape[-1])).relu()
        task = torch.baddbmm(self.task_bias, by_label, self.task).relu().transpose(0, 1)
        mixed = (weights[..., None] * torch.cat([shared, task[:, :, None]], dim=2)).sum(2)
        return (((mixed * self.kernel).sum(-1) + self.bias)[None],)
