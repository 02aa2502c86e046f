import re

import pytest

from mlmoe_jax.runs.naming import default_folder

DINO = "configs/mlvpt_dinov2.py"


@pytest.mark.parametrize(
    ("reference", "overrides", "options", "name"),
    [
        (DINO, [], {}, "mlvpt_dinov2"),
        ("mlvpt_dinov2", [], {}, "mlvpt_dinov2"),
        (f"{DINO}:resolution=448,dataset=voc2012", [], {}, "mlvpt_dinov2,dataset=voc2012,resolution=448"),
        (DINO, [("seed", "1"), ("optim.learning_rate", "1e-3")], {}, "mlvpt_dinov2,optim.learning_rate=1e-3,seed=1"),
        (DINO, [("data.workers", "4"), ("model.remat", "true")], {}, "mlvpt_dinov2"),
        (DINO, [("log.wandb", "mine"), ("checkpoint.keep", "9"), ("data.bad_images", "skip")], {}, "mlvpt_dinov2"),
        (DINO, [("data.cache_features", "float16")], {}, "mlvpt_dinov2,data.cache_features=float16"),  # it rounds
        ("own_csv:root=photos", [], {}, "own_csv,root=photos"),
        ("e2vpt", [], {"mode": "prune"}, "e2vpt,mode=prune"),
        ("vpt", [], {"sweep": ["config.seed=0,1", " model.prompts.count=3"]}, "vpt,sweep=model.prompts.count+seed"),
    ],
)
def test_names(reference, overrides, options, name):
    assert default_folder(reference, overrides, **options) == f"runs/{name}"


def test_different_commands_have_different_safe_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for path in ("vpt.py", "mine/vpt.py", "mine/vpt2.py"):
        (tmp_path / path).touch()
    commands = [
        ("own_csv:root=photos", []),
        ("own_csv:root=/a/photos", []),
        ("own_csv:root=/b/photos", []),
        ("own_csv", [("data.root", "photos")]),
        ("own_csv", [("init_from", "a/official.pth")]),
        ("own_csv", [("init_from", "b/official.pth")]),
        ("own_csv", [("prune.token_levels", "(0.1, 0.2)")]),
        ("own_csv", [("data.images", "a b")]),
        ("own_csv", [("data.images", "a  b")]),
        ("own_csv", [("data.images", "a" * 120)]),
        ("own_csv", [("data.images", "a" * 121)]),
        ("mine/vpt.py", []),
        ("mine/vpt2.py", []),
        ("vpt.py", []),
    ]
    folders = [default_folder(reference, overrides) for reference, overrides in commands]
    names = [folder.removeprefix("runs/") for folder in folders]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9._+=,-]{1,120}", name) for name in names), names
    assert folders == [default_folder(reference, overrides) for reference, overrides in commands]
    assert names[1].startswith("own_csv,root=photos-")
    assert default_folder("./mine/vpt.py") == default_folder("mine/vpt.py") == folders[-3]
