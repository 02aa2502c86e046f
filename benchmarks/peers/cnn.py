"""A classifier like Q2L in PyTorch: torchvision's ResNet-101 and label queries that read its feature map.

As in the published Q2L on 448 px: one encoder layer over the feature map, two decoder layers without the first
self-attention, width 2,048, 4 heads, 8,192 hidden units, and one weight vector per label. Batch norm, the stem and the
first stage are frozen. All values are random.
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


class QueryClassifier(nn.Module):
    """ResNet-101, an encoder layer, two layers of queries, and one weight vector per label."""

    def __init__(self, labels: int, resolution: int = 448):
        super().__init__()
        whole = resnet101(weights=None, norm_layer=FrozenBatchNorm2d)
        stem = [whole.conv1, whole.bn1, whole.relu, whole.maxpool, whole.layer1]
        for module in stem:
            module.requires_grad_(False)
        self.backbone = nn.Sequential(*stem, whole.layer2, whole.layer3, whole.layer4)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, HIDDEN, dropout=0.1, batch_first=True)
        self.layers = nn.ModuleList(QueryLayer() for _ in range(2))
        self.queries = nn.Parameter(0.02 * torch.randn(1, labels, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (resolution // 32) ** 2, WIDTH), requires_grad=False)
        self.kernel, self.bias = nn.Parameter(0.02 * torch.randn(labels, WIDTH)), nn.Parameter(torch.zeros(labels))

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor]:
        """f32[B,3,H,W] -> the logits [1,B,K], a tuple of one."""
        features = self.backbone(pixels.contiguous(memory_format=torch.channels_last))
        value = self.encoder(self.project(features.flatten(2).transpose(1, 2)) + self.positions)
        labels = self.queries.expand(len(value), -1, -1)
        queries = torch.zeros_like(labels)
        for layer in self.layers:
            queries = layer(queries, labels, value + self.positions, value)
        return (((queries * self.kernel).sum(-1) + self.bias)[None],)
