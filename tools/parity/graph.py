"""Make graph_heads.npz: small random twins of ML-GCN, ADD-GCN and CNN-RNN in torch (needs torch).

The twins are written from the formulas, and name their tensors as the authors' checkpoints of the first two do.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

LABELS, WIDTH, INPUTS, HIDDEN = 6, 32, 12, 24
EMBEDDING, STATE, MAX_LABELS = 8, 16, 3
# One image without labels, one with more than MAX_LABELS, one with exactly as many.
SEQUENCE_LABELS = ((0, 0, 0, 0, 0, 0), (1, 1, 0, 1, 1, 0), (0, 1, 0, 0, 1, 1), (0, 0, 1, 0, 0, 0))
ORDER = (4, 0, 5, 2, 1, 3)


class MLGCN(nn.Module):
    def __init__(self, counts, positives, words):
        super().__init__()
        self.gc1, self.gc2 = nn.Module(), nn.Module()
        self.gc1.weight = nn.Parameter(torch.empty(INPUTS, HIDDEN))
        self.gc2.weight = nn.Parameter(torch.empty(HIDDEN, WIDTH))
        self.A = nn.Parameter(self.weighted(counts, positives))
        self.words = words

    @staticmethod
    def weighted(counts, positives):
        binary = (torch.from_numpy(counts / positives[:, None]) >= 0.4).double()
        return (0.25 * binary / (binary.sum(0, keepdim=True) + 1e-6) + torch.eye(LABELS)).float()

    def adjacency(self):
        root = torch.diag(self.A.sum(1) ** -0.5)
        return (self.A @ root).t() @ root

    def forward(self, feature_map):
        feature = nn.MaxPool2d(feature_map.shape[-2:])(feature_map).flatten(1)
        adjacency = self.adjacency().detach()
        nodes = F.leaky_relu(adjacency @ (self.words @ self.gc1.weight), 0.2)
        return feature @ (adjacency @ (nodes @ self.gc2.weight)).t()


class Gcn(nn.Module):
    def __init__(self):
        super().__init__()
        self.static_adj = nn.Sequential(nn.Conv1d(LABELS, LABELS, 1, bias=False), nn.LeakyReLU(0.2))
        self.static_weight = nn.Sequential(nn.Conv1d(HIDDEN, HIDDEN, 1), nn.LeakyReLU(0.2))
        self.conv_global, self.bn_global = nn.Conv1d(HIDDEN, HIDDEN, 1), nn.BatchNorm1d(HIDDEN)
        self.conv_create_co_mat = nn.Conv1d(2 * HIDDEN, LABELS, 1)
        self.dynamic_weight = nn.Conv1d(HIDDEN, HIDDEN, 1)
        self.graph = None

    def forward(self, nodes):
        nodes = nodes + self.static_weight(self.static_adj(nodes.mT).mT)
        context = F.leaky_relu(self.bn_global(self.conv_global(nodes.mean(2, keepdim=True))), 0.2)
        self.graph = self.conv_create_co_mat(torch.cat([context.expand_as(nodes), nodes], 1)).sigmoid()
        return F.leaky_relu(self.dynamic_weight(F.leaky_relu(nodes @ self.graph, 0.2)), 0.2)


class ADDGCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Conv2d(WIDTH, LABELS, 1, bias=False)
        self.conv_transform = nn.Conv2d(WIDTH, HIDDEN, 1)
        self.gcn = Gcn()
        self.mask_mat = nn.Parameter(torch.eye(LABELS), requires_grad=False)
        self.last_linear = nn.Conv1d(HIDDEN, LABELS, 1)

    def forward(self, feature_map):
        scores = self.fc(feature_map).flatten(2)
        nodes = self.conv_transform(feature_map).flatten(2) @ scores.sigmoid().mT
        votes = (self.last_linear(nodes + self.gcn(nodes)) * self.mask_mat).sum(2)
        return scores.amax(2), votes


class CNNRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(LABELS + 2, EMBEDDING)
        self.cell = nn.LSTMCell(EMBEDDING, STATE)
        self.state_projection = nn.Linear(STATE, EMBEDDING, bias=False)
        self.image_projection = nn.Linear(WIDTH, EMBEDDING, bias=False)

    def forward(self, feature, path):
        """Return the scores after each label of one path, which begins with the start."""
        state, scores = None, []
        for label in path:
            state = self.cell(self.embedding(torch.tensor([label])), state)
            joint = torch.relu(self.state_projection(state[0]) + self.image_projection(feature[None]))
            scores.append(joint[0] @ self.embedding.weight[: LABELS + 1].t())
        return torch.stack(scores)


def randomise(model, seed):
    """Give every tensor of a model values that half precision holds exactly, none of which can be overlooked."""
    random = np.random.RandomState(seed)
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name in ("A", "mask_mat") or name.endswith("num_batches_tracked"):
            continue
        if name.endswith("running_var"):
            value = random.uniform(0.5, 2, shape)
        elif name.endswith("bn_global.weight"):
            value = random.uniform(0.5, 1.5, shape)
        elif len(shape) == 1:
            value = 0.2 * random.randn(*shape)
        else:
            value = random.randn(*shape) * (1.5 / np.prod(shape[1:])) ** 0.5
        tensor.copy_(torch.from_numpy(value.astype(np.float16)).to(tensor.dtype))
    return model.eval()


def halves(random, *shape):
    return torch.from_numpy(random.randn(*shape).astype(np.float16)).float()


def tensors(model, name):
    stored = {}
    for key, tensor in model.state_dict().items():
        exact = key == "A" or not tensor.is_floating_point()
        stored[f"{name}/weights/{key}"] = tensor.numpy().copy() if exact else tensor.numpy().astype(np.float16)
    return stored


def gradients(model, loss, name, keys):
    model.zero_grad()
    loss.backward()
    found = dict(model.named_parameters())
    return {f"{name}/gradient/{key}": found[key].grad.numpy().copy() for key in keys}


def make_ml_gcn():
    random = np.random.RandomState(0)
    labels = (random.rand(200, LABELS) < 0.25).astype(np.int64)
    labels[:, 2] |= labels[:, 4] & (random.rand(200) < 0.7)
    labels[:, 2] |= labels[:, 5] & (random.rand(200) < 0.6)
    labels[:, 1] |= labels[:, 0] & (random.rand(200) < 0.5)
    positives, counts = labels.sum(0), labels.T @ labels
    np.fill_diagonal(counts, 0)
    words = halves(random, LABELS, INPUTS)
    model = randomise(MLGCN(counts, positives, words), 1)
    feature_map, target = halves(random, 3, WIDTH, 4, 5), halves(random, 3, LABELS)
    logits = model(feature_map)
    return tensors(model, "ml_gcn") | {
        "ml_gcn/counts": counts,
        "ml_gcn/positives": positives,
        "ml_gcn/adjacency": model.adjacency().detach().numpy(),
        "ml_gcn/words": words.numpy(),
        "ml_gcn/map": feature_map.numpy().astype(np.float16),
        "ml_gcn/target": target.numpy(),
        "ml_gcn/logits": logits.detach().numpy(),
        **gradients(model, (logits * target).sum(), "ml_gcn", ("gc1.weight", "gc2.weight")),
    }


def make_add_gcn():
    random = np.random.RandomState(2)
    model = randomise(ADDGCN(), 3)
    feature_map, target = halves(random, 4, WIDTH, 4, 5).relu(), halves(random, 4, LABELS)
    arrays = tensors(model, "add_gcn") | {
        "add_gcn/map": feature_map.numpy().astype(np.float16),
        "add_gcn/target": target.numpy(),
    }
    for mode in ("eval", "train"):
        model.train(mode == "train")
        on_map, by_graph = model(feature_map)
        arrays[f"add_gcn/{mode}/map"] = on_map.detach().numpy()
        arrays[f"add_gcn/{mode}/graph"] = by_graph.detach().numpy()
        arrays[f"add_gcn/{mode}/dynamic"] = model.gcn.graph.detach().numpy()
        keys = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
        # A batch takes away what the bias in front of its normalization adds.
        keys = [key for key in keys if mode == "eval" or key != "gcn.conv_global.bias"]
        loss = ((on_map + by_graph) / 2 * target).sum()
        arrays |= gradients(model, loss, f"add_gcn/{mode}", keys)
    for key in ("running_mean", "running_var"):
        arrays[f"add_gcn/after/{key}"] = getattr(model.gcn.bn_global, key).numpy().copy()
    return arrays


def make_cnn_rnn():
    random = np.random.RandomState(4)
    model = randomise(CNNRNN(), 5)
    features = halves(random, len(SEQUENCE_LABELS), WIDTH)
    end, start = LABELS, LABELS + 1
    losses, best = [], []
    for feature, present in zip(features, SEQUENCE_LABELS, strict=True):
        path = [label for label in ORDER if present[label]]
        targets = [*path, end] if len(path) <= MAX_LABELS else path[:MAX_LABELS]
        scores = model(feature, [start, *targets[:-1]])
        losses.append(F.cross_entropy(scores, torch.tensor(targets), reduction="sum"))
        best.append(scores.softmax(1)[:, :LABELS].amax(0).logit())
    path = [start, 3, 1, 5]
    arrays = tensors(model, "cnn_rnn") | {
        "cnn_rnn/features": features.numpy().astype(np.float16),
        "cnn_rnn/labels": np.array(SEQUENCE_LABELS, np.float32),
        "cnn_rnn/order": np.array(ORDER),
        "cnn_rnn/path": np.array(path),
        "cnn_rnn/scores": model(features[0], path).detach().numpy(),
        "cnn_rnn/losses": torch.stack(losses).detach().numpy(),
        "cnn_rnn/logits": torch.stack(best).detach().numpy(),
    }
    keys = [key for key, _ in model.named_parameters()]
    return arrays | gradients(model, torch.stack(losses).mean(), "cnn_rnn", keys)


def write(folder: Path) -> None:
    arrays = make_ml_gcn() | make_add_gcn() | make_cnn_rnn()
    np.savez_compressed(folder / "graph_heads.npz", **arrays)
