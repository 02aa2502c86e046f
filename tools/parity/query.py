"""Make query.npz: small random twins of Q2L, ML-Decoder and torch's transformer, with outputs and gradients (torch).

Make positions.npz, too: a position table resampled by torch's bicubic and bilinear interpolation.

The layers are wired here from torch.nn's parts, and once from torch.nn.TransformerEncoder and -Decoder as they are.
Weights are stored under the names of the authors' checkpoints.
"""

import math
from pathlib import Path

import numpy as np
import torch
from torch import nn

WIDTH, HIDDEN, LABELS = 16, 24, 6
# Rows and columns differ, so that they cannot be taken for one another.
BATCH, GRID = 2, (3, 5)
# Of resampled positions: larger, smaller and the table's own; the last but one shrinks one axis far enough to widen the
# antialiased kernel.
GRIDS = ((3, 4), (8, 7), (16, 16), (2, 9), (5, 5))
SIDE, CHANNELS = 5, 3


def sine_positions(width, rows, columns):
    """Return f32[1,width,rows,columns] in DETR's normalized form."""
    half = width // 2
    ones = torch.ones(1, rows, columns)
    y, x = ones.cumsum(1), ones.cumsum(2)
    y, x = (axis / (last + 1e-6) * 2 * math.pi for axis, last in ((y, y[:, -1:, :]), (x, x[:, :, -1:])))
    period = 10000 ** (2 * torch.div(torch.arange(half), 2, rounding_mode="floor") / half)
    channels = []
    for axis in (y, x):
        angle = axis[..., None] / period
        pairs = torch.stack((angle[..., 0::2].sin(), angle[..., 1::2].cos()), dim=4)
        channels.append(pairs.flatten(3))
    return torch.cat(channels, dim=3).permute(0, 3, 1, 2)


def resampled_positions():
    """Return the table and what torch makes of it, {kind}_{rows}x{columns}."""
    table = np.random.RandomState(0).randn(SIDE, SIDE, CHANNELS).astype(np.float32)
    image = torch.from_numpy(table).permute(2, 0, 1)[None]
    arrays = {"table": table.reshape(1, SIDE * SIDE, CHANNELS)}
    for grid in GRIDS:
        plain = torch.nn.functional.interpolate(image, size=grid, mode="bicubic")
        scale = tuple((size + 0.1) / SIDE for size in grid)
        offset = torch.nn.functional.interpolate(image, scale_factor=scale, mode="bicubic")
        assert offset.shape == plain.shape
        results = {"size": plain, "offset": offset}
        results["size_antialias"] = torch.nn.functional.interpolate(image, size=grid, mode="bicubic", antialias=True)
        results["linear"] = torch.nn.functional.interpolate(image, size=grid, mode="bilinear")
        results["linear_antialias"] = torch.nn.functional.interpolate(image, size=grid, mode="bilinear", antialias=True)
        for name, result in results.items():
            arrays[f"{name}_{grid[0]}x{grid[1]}"] = result[0].permute(1, 2, 0).reshape(1, -1, CHANNELS).numpy()
    return arrays


class Layer(nn.Module):
    """A layer of DETR; what is not asked for does not exist, so that its tensors are not in the file."""

    def __init__(self, heads, *, decodes, self_attention=True):
        super().__init__()
        self.decodes = decodes
        self.self_attn = nn.MultiheadAttention(WIDTH, heads, batch_first=True) if self_attention else None
        self.norm1 = nn.LayerNorm(WIDTH) if self_attention else None
        if decodes:
            self.multihead_attn = nn.MultiheadAttention(WIDTH, heads, batch_first=True)
            self.norm3 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.linear1, self.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def step(self, x, norm, part):
        return norm(x + part(x))

    def feed(self, x):
        return self.linear2(torch.relu(self.linear1(x)))

    def forward(self, x, added, memory=None, positions=None):
        if self.self_attn is not None:
            x = self.step(x, self.norm1, lambda y: self.self_attn(y + added, y + added, y)[0])
        if not self.decodes:
            return self.step(x, self.norm2, self.feed)
        x = self.step(x, self.norm2, lambda y: self.multihead_attn(y + added, memory + positions, memory)[0])
        return self.step(x, self.norm3, self.feed)


class Stack(nn.Module):
    def __init__(self, layers, norm):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(WIDTH) if norm else None


class Head(nn.Module):
    """What Q2L puts on a feature map: names and wiring."""

    def __init__(self, channels, encoder, decoder):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.encoder, self.transformer.decoder = encoder, decoder
        self.query_embed = nn.Embedding(LABELS, WIDTH)
        self.input_proj = nn.Conv2d(channels, WIDTH, 1) if channels != WIDTH else nn.Identity()
        self.fc = nn.Module()
        self.fc.W, self.fc.b = nn.Parameter(torch.empty(1, LABELS, WIDTH)), nn.Parameter(torch.empty(1, LABELS))
        self.register_buffer("positions", sine_positions(WIDTH, *GRID), persistent=False)

    def forward(self, features):
        x = self.input_proj(features).flatten(2).transpose(1, 2)
        positions = self.positions.flatten(2).transpose(1, 2)
        hidden = self.decode(x, positions, self.query_embed.weight[None].repeat(len(x), 1, 1))
        return (self.fc.W * hidden).sum(-1) + self.fc.b

    def decode(self, memory, positions, queries):
        encoder, decoder = self.transformer.encoder, self.transformer.decoder
        for layer in encoder.layers:
            memory = layer(memory, positions)
        if encoder.norm is not None:
            memory = encoder.norm(memory)
        hidden = torch.zeros_like(queries)
        for layer in decoder.layers:
            hidden = layer(hidden, queries, memory, positions)
        return decoder.norm(hidden)


def q2l(channels=WIDTH, self_attention=False):
    layers = [Layer(4, decodes=True, self_attention=self_attention) for _ in range(2)]
    return Head(channels, Stack([Layer(4, decodes=False)], False), Stack(layers, True))


class TorchHead(Head):
    """torch.nn's own encoder and decoder: queries are their input, and positions are added once."""

    def __init__(self, channels):
        options = {"dropout": 0.0, "batch_first": True}
        encoder = nn.TransformerEncoderLayer(WIDTH, 4, HIDDEN, **options)
        decoder = nn.TransformerDecoderLayer(WIDTH, 4, HIDDEN, **options)
        super().__init__(
            channels,
            nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False),
            nn.TransformerDecoder(decoder, 2, nn.LayerNorm(WIDTH)),
        )
        self.hidden_from = None

    def decode(self, memory, positions, queries):
        memory = self.transformer.encoder(memory + positions)
        return self.transformer.decoder(queries, memory, memory_mask=self.hidden_from)


class MLDecoder(nn.Module):
    def __init__(self, channels, labels, groups):
        super().__init__()
        self.decoder = decoder = nn.Module()
        decoder.embed_standart = nn.Linear(channels, WIDTH)
        decoder.query_embed = nn.Embedding(groups, WIDTH)
        layer = nn.Module()
        layer.multihead_attn = nn.MultiheadAttention(WIDTH, 8, batch_first=True)
        layer.norm1, layer.norm2, layer.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        layer.linear1, layer.linear2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        decoder.layers = nn.ModuleList([layer])
        decoder.duplicate_pooling = nn.Parameter(torch.empty(groups, WIDTH, -(-labels // groups)))
        decoder.duplicate_pooling_bias = nn.Parameter(torch.empty(labels))

    def forward(self, features):
        decoder, layer = self.decoder, self.decoder.layers[0]
        memory = torch.relu(decoder.embed_standart(features.flatten(2).transpose(1, 2)))
        x = decoder.query_embed.weight[None].repeat(len(memory), 1, 1)
        x = layer.norm1(x + x)
        x = layer.norm2(x + layer.multihead_attn(x, memory, memory)[0])
        x = layer.norm3(x + layer.linear2(torch.relu(layer.linear1(x))))
        votes = [x[:, group] @ weight for group, weight in enumerate(decoder.duplicate_pooling)]
        bias = decoder.duplicate_pooling_bias
        return torch.cat(votes, dim=1)[:, : len(bias)] + bias


def randomise(model, random):
    """Give every parameter values that half precision holds exactly, none of which can be overlooked."""
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if len(shape) > 1:
            value = random.randn(*shape) * (1.5 / shape[1]) ** 0.5
        elif "norm" in name and name.endswith("weight"):
            value = random.uniform(0.5, 1.5, shape)
        else:
            value = 0.3 * random.randn(*shape)
        parameter.data = torch.from_numpy(value.astype(np.float16)).float()
    return model


def measure(model, channels, seed):
    """Return weights, input, logits, a target, and two gradients of Σ logits·target: by the input and by a weight."""
    random = np.random.RandomState(seed)
    randomise(model, random)
    features = torch.from_numpy(random.randn(BATCH, channels, *GRID).astype(np.float32)).requires_grad_()
    logits = model(features)
    target = torch.from_numpy(random.randn(*logits.shape).astype(np.float32))
    (logits * target).sum().backward()
    parameters = dict(model.named_parameters())
    kernel = next(name for name in parameters if name.endswith("layers.0.multihead_attn.in_proj_weight"))
    arrays = {f"weights/{name}": p.detach().numpy().astype(np.float16) for name, p in parameters.items()}
    return arrays | {
        "features": features.detach().numpy(),
        "logits": logits.detach().numpy(),
        "target": target.numpy(),
        "gradient/features": features.grad.numpy(),
        "gradient/in_proj_weight": parameters[kernel].grad.numpy(),
    }


def write(folder: Path) -> None:
    visible = np.random.RandomState(9).rand(LABELS, GRID[0] * GRID[1]) < 0.5
    models = {
        "q2l": (q2l(), WIDTH),
        "q2l_projection": (q2l(20), 20),
        "q2l_self_attention": (q2l(self_attention=True), WIDTH),
        "torch": (TorchHead(20), 20),
        "ml_decoder": (MLDecoder(20, LABELS, LABELS), 20),
        "ml_decoder_grouped": (MLDecoder(20, 7, 3), 20),
    }
    arrays = {"visible": visible, "positions/3x5": sine_positions(WIDTH, 3, 5).numpy()}
    arrays["positions/7x7"] = sine_positions(64, 7, 7).numpy()
    seeds = (0, 1, 2, 5, 7, 8)
    for seed, (case, (model, channels)) in zip(seeds, models.items(), strict=True):
        torch.manual_seed(seed)
        arrays |= {f"{case}/{name}": array for name, array in measure(model, channels, seed).items()}
    model, _ = models["torch"]
    model.hidden_from = ~torch.from_numpy(visible)
    with torch.no_grad():
        arrays["torch/masked_logits"] = model(torch.from_numpy(arrays["torch/features"])).numpy()
    np.savez_compressed(folder / "query.npz", **arrays)
    np.savez_compressed(folder / "positions.npz", **resampled_positions())
