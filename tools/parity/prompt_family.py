"""Make prompt_family.npz: what VPT, E2VPT and GateVPT compute, written with PyTorch as their papers and code say.

Each case is a tiny state dict under the names of the authors' code, with values that a seed gives, and the wiring of
that code: the sequence is [class token, prompts, patches]. VPT-deep throws the prompts' outputs away and puts the
block's own prompts in their place; VPT-shallow lets them travel; GateVPT mixes what leaves a block with what entered
it, and divides the attention logits by a temperature that is kept within 0.01 and 10; E2VPT puts further keys and
values in front of the projected ones and multiplies the projected prompts by masks, where channel c belongs to segment
c mod 16 and a prompt with mask 0 stays as a zero vector. The feature is the class token after the last LayerNorm; on
MAE it is the mean of prompts and patches, and the norm comes after the mean (`fc_norm`; in GateVPT's code `norm`).
Stored are the feature and the logits. Torch is imported where it is used, so that tests can take the state dicts from
here without it.
"""

import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WIDTH, DEPTH, HEADS, PATCH, IMAGE, LABELS = 32, 3, 4, 4, 16, 7
PROMPTS, KEY_VALUES, SEGMENTS = 5, 3, 16


@dataclass(frozen=True)
class Case:
    """One method; `timm`: on MAE or MoCo v3, whose classes have timm's names; `mae`: on MAE."""

    deep: bool = True
    timm: bool = False
    mae: bool = False
    project: int = 0
    gated: bool = False
    key_values: str = ""  # "" | shared | two
    masked: bool = False


CASES = {
    "vpt_deep": Case(),
    "vpt_deep_projected": Case(project=6),
    "vpt_deep_timm": Case(timm=True),
    "vpt_shallow": Case(deep=False),
    "gate_vpt": Case(deep=False, timm=True, gated=True),
    "e2vpt": Case(key_values="shared", masked=True),
    "e2vpt_projected": Case(key_values="shared", masked=True, project=16),
    "e2vpt_timm": Case(key_values="shared", masked=True, timm=True),
    "e2vpt_unshared": Case(key_values="two"),
    "vpt_deep_mae": Case(timm=True, mae=True),
    "vpt_shallow_mae": Case(deep=False, timm=True, mae=True),
    "gate_vpt_mae": Case(deep=False, timm=True, mae=True, gated=True),
    "e2vpt_mae": Case(key_values="shared", timm=True, mae=True),
}


def image() -> np.ndarray:
    """Return f32[2,H,W,3], the same on every machine."""
    i = np.arange(2 * IMAGE * IMAGE * 3)
    return (np.sin(0.37 * i) + 0.5 * np.cos(0.011 * i)).reshape(2, IMAGE, IMAGE, 3).astype(np.float32)


def positions_of_mae() -> np.ndarray:
    """Return the fixed table of MAE, f32[1,1+N,D]: zeros, then sines and cosines of the column and of the row."""
    side, table = IMAGE // PATCH, np.zeros((1, 1 + (IMAGE // PATCH) ** 2, WIDTH))
    frequencies = 1 / 10_000 ** (np.arange(WIDTH // 4) / (WIDTH / 4))
    for row in range(side):
        for column in range(side):
            angles = column * frequencies, row * frequencies
            table[0, 1 + row * side + column] = np.concatenate([f(angle) for angle in angles for f in (np.sin, np.cos)])
    return table.astype(np.float32)


def _norm_of(case: Case) -> str:
    if not case.timm:
        return "encoder.encoder_norm"
    return "fc_norm" if case.mae and not case.gated else "norm"


def _backbone_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    width = WIDTH
    linear = {"weight": (width, width), "bias": (width,)}
    norm = {"weight": (width,), "bias": (width,)}
    patches = {"weight": (width, 3, PATCH, PATCH), "bias": (width,)}
    up, down = ({"weight": (a, b), "bias": (a,)} for a, b in ((4 * width, width), (width, 4 * width)))
    if case.timm:
        qkv = {"weight": (3 * width, width), "bias": (3 * width,)}
        block = {"norm1": norm, "norm2": norm, "attn.qkv": qkv, "attn.proj": linear, "mlp.fc1": up, "mlp.fc2": down}
        place, modules = "blocks.", {"patch_embed.proj": patches}
        tokens = "cls_token", "pos_embed"
    else:
        block = {"attention_norm": norm, "ffn_norm": norm, "ffn.fc1": up, "ffn.fc2": down}
        block |= {f"attn.{name}": linear for name in ("query", "key", "value", "out")}
        place, modules = "encoder.layer.", {"embeddings.patch_embeddings": patches}
        tokens = "embeddings.cls_token", "embeddings.position_embeddings"
    modules |= {_norm_of(case): norm}
    modules |= {f"{place}{i}.{name}": shapes for i in range(DEPTH) for name, shapes in block.items()}
    positions = 1 + (IMAGE // PATCH) ** 2
    named = {f"{module}.{name}": shape for module, shapes in modules.items() for name, shape in shapes.items()}
    return {tokens[0]: (1, 1, width), tokens[1]: (1, positions, width), **named}


def _prompt_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    width = case.project or WIDTH
    shapes = {"prompt_embeddings": (1, PROMPTS, width)}
    if case.deep:
        shapes["deep_prompt_embeddings"] = (DEPTH - 1, PROMPTS, width)
    if case.project:
        shapes |= {"prompt_proj.weight": (WIDTH, width), "prompt_proj.bias": (WIDTH,)}
    if case.gated:
        shapes |= {"gate_logit": (DEPTH - 1,), "temp": (DEPTH,)}
    if case.masked:
        shapes["prompt_soft_tokens_mask_cls_token"] = (PROMPTS,)
        shapes["prompt_soft_tokens_pieces_mask_cls_token"] = (PROMPTS, SEGMENTS)
    place = "blocks" if case.timm else "encoder.layer"
    for suffix in {"": (), "shared": ("",), "two": ("_K", "_V")}[case.key_values]:
        for block in range(DEPTH):
            shapes[f"{place}.{block}.attn.deep_QKV_embeddings{suffix}"] = (HEADS, KEY_VALUES, WIDTH // HEADS)
    return shapes


def state_dict(name: str) -> dict[str, np.ndarray]:
    """Return the tensors of a case, f32, by the names of its authors' code; they make every part of it count."""
    case, random = CASES[name], np.random.RandomState(zlib.crc32(name.encode()))
    shapes = {**_backbone_shapes(case), **_prompt_shapes(case)}
    shapes = {key if case.timm else f"transformer.{key}": shape for key, shape in shapes.items()}
    shapes |= {"head.weight": (LABELS, WIDTH), "head.bias": (LABELS,)}
    tensors = {key: _draw(key, shape, random).astype(np.float32) for key, shape in sorted(shapes.items())}
    return tensors | ({"pos_embed": positions_of_mae()} if case.mae else {})


def _draw(name: str, shape: tuple[int, ...], random: np.random.RandomState) -> np.ndarray:
    noise = random.standard_normal(shape)
    if "mask_cls_token" in name:  # pruned, weakened, kept
        return np.array([0.0, 0.5, 1.0])[random.randint(0, 3, shape)]
    if name == "temp":  # the last lies beyond what it is kept within
        return np.array([0.5, 2.0, 12.0])
    if name == "gate_logit":
        return noise
    if "norm" in name and name.endswith("weight"):
        return 1 + 0.2 * noise
    return noise / np.sqrt(np.prod(shape[1:])) if name.endswith("weight") else 0.3 * noise


# -------------------------------------------------------------------------------------------------------- the twins
class Twin:
    """The forward pass of a case."""

    def __init__(self, name: str):
        import torch

        self.torch, self.case = torch, CASES[name]
        tensors = {key.removeprefix("transformer."): x for key, x in state_dict(name).items()}
        self.tensors = {key: torch.from_numpy(x) for key, x in tensors.items()}

    def linear(self, x, name: str):
        return self.torch.nn.functional.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def norm(self, x, name: str):
        parameters = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return self.torch.nn.functional.layer_norm(x, (WIDTH,), *parameters, eps=1e-6)

    def embed(self, pixels):
        module = "patch_embed.proj" if self.case.timm else "embeddings.patch_embeddings"
        tokens = "cls_token", "pos_embed"
        if not self.case.timm:
            tokens = "embeddings.cls_token", "embeddings.position_embeddings"
        weight, bias = self.tensors[f"{module}.weight"], self.tensors[f"{module}.bias"]
        patches = self.torch.nn.functional.conv2d(pixels, weight, bias, stride=PATCH).flatten(2).transpose(1, 2)
        first = self.tensors[tokens[0]].expand(len(pixels), -1, -1)
        return self.torch.cat([first, patches], dim=1) + self.tensors[tokens[1]]

    def prompts(self, block: int, batch: int):
        """Return the prompts that a block's parameters stand for, [B,P,D]."""
        key = "deep_prompt_embeddings" if block else "prompt_embeddings"
        prompts = self.tensors[key][max(block - 1, 0)]
        if self.case.project:
            prompts = self.linear(prompts, "prompt_proj")
        if self.case.masked:
            segments = self.tensors["prompt_soft_tokens_pieces_mask_cls_token"]
            prompts = prompts * segments.repeat(1, WIDTH // SEGMENTS)
            prompts = prompts * self.tensors["prompt_soft_tokens_mask_cls_token"][:, None]
        return prompts.expand(batch, -1, -1)

    def attention(self, x, place: str, block: int):
        """Attend, over further keys and values if there are any and at a temperature if there is one."""
        if self.case.timm:
            parts = self.linear(x, f"{place}.attn.qkv").chunk(3, dim=-1)
        else:
            parts = [self.linear(x, f"{place}.attn.{name}") for name in ("query", "key", "value")]
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if self.case.key_values:
            suffixes = ("", "") if self.case.key_values == "shared" else ("_K", "_V")
            further = [self.tensors[f"{place}.attn.deep_QKV_embeddings{suffix}"] for suffix in suffixes]
            key, value = (
                self.torch.cat([extra.expand(len(x), -1, -1, -1), part], dim=2)
                for extra, part in zip(further, (key, value), strict=True)
            )
        logits = query @ key.transpose(-1, -2) / np.sqrt(WIDTH // HEADS)
        if self.case.gated:
            logits = logits / self.tensors["temp"][block].clamp(0.01, 10.0)
        mixed = (logits.softmax(-1) @ value).transpose(1, 2).flatten(2)
        return self.linear(mixed, f"{place}.attn.{'proj' if self.case.timm else 'out'}")

    def block(self, x, block: int):
        place, first, second, mlp = f"blocks.{block}", "norm1", "norm2", "mlp"
        if not self.case.timm:
            place, first, second, mlp = f"encoder.layer.{block}", "attention_norm", "ffn_norm", "ffn"
        x = x + self.attention(self.norm(x, f"{place}.{first}"), place, block)
        hidden = self.torch.nn.functional.gelu(self.linear(self.norm(x, f"{place}.{second}"), f"{place}.{mlp}.fc1"))
        return x + self.linear(hidden, f"{place}.{mlp}.fc2")

    def __call__(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        with self.torch.no_grad():
            tokens = self.embed(self.torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous())
            entering = self.prompts(0, len(pixels))
            for block in range(DEPTH):
                x = self.block(self.torch.cat([tokens[:, :1], entering, tokens[:, 1:]], dim=1), block)
                leaving = x[:, 1 : 1 + PROMPTS]
                tokens = self.torch.cat([x[:, :1], x[:, 1 + PROMPTS :]], dim=1)
                if self.case.deep:
                    entering = self.prompts(min(block + 1, DEPTH - 1), len(pixels))
                elif self.case.gated and block < DEPTH - 1:
                    gate = self.tensors["gate_logit"][block].sigmoid()
                    entering = gate * leaving + (1 - gate) * entering
                else:
                    entering = leaving
            feature = x[:, 1:].mean(dim=1) if self.case.mae else x[:, 0]
            feature = self.norm(feature, _norm_of(self.case))
            return {"feature": feature.numpy(), "logits": self.linear(feature, "head").numpy()}


def arrays() -> dict[str, np.ndarray]:
    return {f"{name}/{key}": value for name in CASES for key, value in Twin(name)(image()).items()}


def write(folder: Path) -> None:
    np.savez_compressed(folder / "prompt_family.npz", **arrays())
