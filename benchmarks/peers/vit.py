"""ML-VPT on DINOv2 in PyTorch with `transformers`, equivalent to this package's model.

The blocks are from `transformers`, with its SDPA attention. Deep prompts are concatenated before every block and
dropped after it, as in the authors' code; only prompts and head have gradients. There is no prompt mask, because
PyTorch would have to compute it in every block. All values are random.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import Dinov2Config
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings, Dinov2Layer

# name in the catalog of this package -> width, depth, heads
SHAPES = {"dinov2_vits14": (384, 12, 6), "dinov2_vitb14": (768, 12, 12), "dinov2_vitl14": (1024, 24, 16)}
NATIVE = 518  # side of the images in pixels to which DINOv2's positions belong


class GroupExperts(nn.Module):
    """ML-VPT's head: a bottleneck expert per prompt, a gate per label, a classifier per side.

    As in this package, the classifier votes on the output of each expert before the gates mix the votes.
    """

    def __init__(self, width: int, labels: int, groups: int, per_group: int, hidden: int = 5):
        super().__init__()
        prompts = 2 * groups * per_group
        self.down = nn.Parameter(0.02 * torch.randn(prompts, width, hidden))
        self.down_bias = nn.Parameter(torch.zeros(prompts, 1, hidden))
        self.up = nn.Parameter(0.02 * torch.randn(prompts, hidden, width))
        self.up_bias = nn.Parameter(torch.zeros(prompts, 1, width))
        self.gate = nn.Parameter(0.02 * torch.randn(2, labels, width))
        self.classifier = nn.Parameter(0.02 * torch.randn(2, labels, width))
        self.bias = nn.Parameter(torch.zeros(2, 1, labels))
        self.places = 2, per_group, groups
        self.register_buffer("group_of", torch.arange(labels) % groups)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B,P,D] -> the logits of the classifiers and of the gates of both sides, [2,B,K] each."""
        batch, _, width = tokens.shape
        hidden = nn.functional.gelu(torch.einsum("bpd,pdh->pbh", tokens, self.down) + self.down_bias)
        output = (torch.baddbmm(self.up_bias, hidden, self.up)).transpose(0, 1)
        tokens, output = (part.reshape(batch, *self.places, width) for part in (tokens, output))
        groups = self.group_of.expand(2, batch, self.places[1], 1, -1)

        def own_group(per_group: torch.Tensor) -> torch.Tensor:
            return per_group.gather(3, groups)[:, :, :, 0]  # [2,B,M,G,K] -> [2,B,M,K]

        gates = own_group(torch.einsum("bsmgd,skd->sbmgk", tokens, self.gate))
        votes = own_group(torch.einsum("bsmgd,skd->sbmgk", output, self.classifier))
        weights = gates.float().softmax(dim=2)
        return (weights * votes).sum(2) + self.bias, (weights * gates).sum(2)


class PromptedViT(nn.Module):
    """A frozen DINOv2 with learned prompts in every block, and the head on the prompts of the last block."""

    averaged = True

    def __init__(self, backbone: str, resolution: int, labels: int, groups: int = 5, per_group: int = 3):
        super().__init__()
        width, depth, heads = SHAPES[backbone]
        config = Dinov2Config(
            hidden_size=width,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            image_size=NATIVE,
            patch_size=14,
            attn_implementation="sdpa",
        )
        self.embeddings = Dinov2Embeddings(config)
        self.blocks = nn.ModuleList(Dinov2Layer(config) for _ in range(depth))
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self.count = 2 * groups * per_group
        self.prompts = nn.Parameter(0.02 * torch.randn(depth, 1, self.count, width))
        self.head = GroupExperts(width, labels, groups, per_group)

    def forward(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """f32[B,3,H,W] -> the logits of the classifiers and of the gates of both sides, [2,B,K] each."""
        tokens = self.embeddings(pixels)
        batch, count = len(tokens), tokens.shape[1]
        for block, prompts in zip(self.blocks, self.prompts, strict=True):
            tokens = block(torch.cat([tokens[:, :count], prompts.expand(batch, -1, -1)], dim=1))
        return self.head(tokens[:, count:].float())
