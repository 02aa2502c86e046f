import subprocess
import sys
from types import SimpleNamespace

import pytest

from mlmoe_jax.data.sources import NAMES, open_split


def settings(name, root="", keep_empty=False):
    return SimpleNamespace(name=name, root=root, keep_empty=keep_empty)


def test_digits_need_no_root():
    split = open_split(settings("digits_single"), "val")
    assert len(split) == 2_000
    assert split.images[3].shape == (64, 64, 3)
    split = open_split(settings("digits"), "val")
    assert split.images.shape == (1_000, 64, 64, 3)


def test_files_are_found_below_the_root(shared_data):
    assert len(open_split(settings("voc2012", shared_data), "val")) == 200
    assert len(open_split(settings("coco2014", shared_data / "coco"), "val")) == 50


@pytest.mark.parametrize("keep_empty", [False, True])
@pytest.mark.parametrize(
    ("name", "opener", "before"),
    [("voc2007", "open_voc", (2007,)), ("voc2012", "open_voc", (2012,)), ("coco2014", "open_coco", ())],
)
def test_settings_reach_the_source(monkeypatch, name, opener, before, keep_empty):
    calls = []
    monkeypatch.setattr(f"mlmoe_jax.data.sources.{opener}", lambda *args, **options: calls.append((args, options)))
    open_split(settings(name, "somewhere", keep_empty), "train")
    assert calls == [(("somewhere", *before, "train"), {"keep_empty": keep_empty})]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_refuses_an_unknown_split(name, refusal, tmp_path):
    assert refusal(open_split, settings(name, tmp_path), "nope").startswith(
        f"data set {name} has no split 'nope'; it has "
    )


def test_unknown_names_get_the_list_and_the_nearest(refusal):
    known = "digits, digits_single, voc2007, voc2012, coco2014"
    sentence = refusal(open_split, settings("coco14"), "train")
    assert sentence == f"there is no data set 'coco14' among {known}; did you mean 'coco2014'"
    sentence = refusal(open_split, settings("zzz"), "train")
    assert sentence == f"there is no data set 'zzz' among {known}; set data.name to one of them"


def test_scikit_learn_is_imported_for_digits_only():
    code = "import sys, mlmoe_jax.data.sources; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
