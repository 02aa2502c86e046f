import tracemalloc

import numpy as np
import pytest
from helpers.label_trees import draw_tree

from mlmoe_jax.config import default_config
from mlmoe_jax.data.label_tree import LabelTree, read_tree
from mlmoe_jax.data.sources.open import open_splits
from mlmoe_jax.data.split_checks import check_splits

NAMES = ("animal", "cat", "day", "dog", "night", "no", "poodle")
ANIMAL, CAT, DAY, DOG, NIGHT, NO, POODLE = range(7)
TEXT = """
implies:
  dog: [animal, no]   # a comment
  cat: [animal]
  poodle:
    - dog
exclusive:
  - [day, night]
"""
TREE = LabelTree(((DOG, ANIMAL), (DOG, NO), (CAT, ANIMAL), (POODLE, DOG)), ((DAY, NIGHT),))
BOTH = LabelTree(TREE.implies, ((DAY, NIGHT), (DOG, CAT)))


def read(tmp_path, text: str) -> LabelTree:
    (tmp_path / "tree.yaml").write_text(text)
    return read_tree(tmp_path / "tree.yaml", NAMES)


def test_a_file_is_read(tmp_path):
    assert read(tmp_path, TEXT) == TREE
    assert read(tmp_path, '{"implies": {"dog": ["animal", "no"]}}').implies == ((DOG, ANIMAL), (DOG, NO)), (
        "JSON is YAML"
    )


# A mapping that would have 10^40 characters as text.
REPEATED = "".join(f"- &{k + 1} {{{', '.join(f'{j}: *{k}' for j in range(10))}}}\n" for k in range(40))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("implies: {dgo: animal}", "names 'dgo', which is not one of the 7 labels; correct it, or add it"),
        ("implies:\n  dog: plant", "names 'plant', which is not one of the 7 labels; correct it, or add it"),
        (
            "implies: {dog: animal, animal: cat, cat: dog}",
            "dog implies animal implies cat implies dog, which is a cycle",
        ),
        ("implies: {dog: dog}", "dog implies dog, which is a cycle"),
        ("implies: {dog: animal}\nexclusive: [[animal, dog]]", "animal and dog are exclusive, but dog implies animal"),
        ("implies: {dog: [day, night]}\nexclusive: [[day, night]]", "but dog implies day and night"),
        ("exclusive: [[day, day]]", "day, day are not two or more different labels"),
        ("exclusive: [day, night]", "the exclusive labels day are not two or more different labels"),
        ("exclusive: [[day, [night]]]", "is damaged"),
        ("implies:\n  dog: animal\n  cat: animal\n  dog: no", "line 4 gives 'dog' again; give it once, with a list"),
        ("exclusive: [[day, night]]\nexclusive: [[cat, dog]]", "line 2 gives 'exclusive' again"),
        ("implies: {poodle: {dog: animal}}", "is damaged: a value is no label or list of labels; write such as"),
        ("exclusive: [{day: cat, night: dog}]", "is no label or list of labels"),
        (f"exclusive:\n- &0 {{x: y}}\n{REPEATED}", "is no label or list of labels"),
        ("implies: {dog: }", "names '', which is not one of the 7 labels"),
        ("exclude: [[day, night]]", "has exclude, which is neither implies nor exclusive; write such as"),
        ("implies: [dog, animal]", "tree.yaml has another form; write such as"),
        ("exclusive: " + "[" * 100_000, "is damaged"),
        ("exclusive:\n- &a [" + "dog, " * 1000 + "]\n" + "- *a\n" * 1000, "names more than 1,000,000 labels"),
        ("- dog", "has dog, which is neither implies nor exclusive; write such as"),
        ("", "tree.yaml has no labels"),
        ("exclusive: []", "tree.yaml has no labels"),
        ("implies: {dog: animal", "is damaged"),
        ("\0", "is damaged"),
        ("implies: " + "[" * 1100, "is damaged"),
    ],
)
def test_another_form_or_a_contradiction_is_one_sentence(tmp_path, refusal, text, message):
    assert message in (said := refusal(read, tmp_path, text))
    assert said.startswith(f"{tmp_path / 'tree.yaml'} ")
    assert "\n" not in said


def test_large_trees_are_checked_in_seconds(tmp_path):
    """A chain, whose closure is quadratic, and a ladder, which has exponentially many paths."""
    names, path = [f"l{number}" for number in range(4_000)], tmp_path / "tree.yaml"
    for step in (1, 2):
        rows = [f"  {names[k]}: [{', '.join(names[k + 1 : k + 1 + step])}]" for k in range(len(names) - 1)]
        path.write_text("\n".join(["implies:", *rows, f"exclusive: [[{names[-1]}, other]]"]))
        tracemalloc.start()
        assert len(read_tree(path, [*names, "other"]).implies) >= len(rows)
        assert tracemalloc.get_traced_memory()[1] < 25e6
        tracemalloc.stop()


def test_a_missing_or_large_file_is_named(tmp_path, refusal):
    assert "tree.yaml: it has more than 4,194,304 bytes" in refusal(read, tmp_path, "#" * 2**22 + "\n")
    (tmp_path / "tree.yaml").unlink()
    assert f"cannot read {tmp_path / 'tree.yaml'}" in refusal(read_tree, tmp_path / "tree.yaml", NAMES)


def test_labels_are_closed():
    codes = np.full((4, 7), -1, np.int8)
    codes[0, POODLE] = codes[2, NIGHT] = codes[3, DOG] = 1
    codes[1, ANIMAL], codes[3, POODLE] = 0, 2
    closed, doubts = BOTH.close(codes)
    assert closed[0].tolist() == [1, 0, -1, 1, -1, 1, 1], (
        "all that a poodle implies, and no cat; the rest stays unknown"
    )
    assert closed[1].tolist() == [0, 0, -1, 0, -1, -1, 0], "no animal, so no cat, dog and poodle"
    assert closed[2].tolist() == [-1, -1, 0, -1, 1, -1, -1]
    assert closed[3].tolist() == [1, 0, -1, 1, -1, 1, 2], "a difficult poodle stays difficult"
    assert not doubts.any()
    assert (codes[0] == [-1, -1, -1, -1, -1, -1, 1]).all(), "the table stays"


def test_contradictions_are_marked_and_decided():
    codes = np.zeros((4, 7), np.int8)
    codes[0, DOG] = codes[2, DOG] = 1
    codes[1, [DAY, NIGHT]] = 1
    codes[2, CAT], codes[3, POODLE] = 1, 2
    closed, doubts = BOTH.close(codes)
    assert doubts.tolist() == [[True, False], [False, True], [True, True], [True, False]]
    assert closed[0].tolist() == [1, 0, 0, 1, 0, 1, 0], "the positive label prevails"
    assert closed[1].tolist() == [0, 0, -1, 0, -1, 0, 0]
    assert closed[2].tolist() == [1, -1, 0, -1, 0, 1, 0], "either is an animal"
    assert closed[3].tolist() == [2, 0, 0, 2, 0, 2, 2]


@pytest.mark.parametrize("seed", range(5))
def test_closed_labels_agree_with_the_tree_and_stay(seed):
    tree = draw_tree(seed)
    codes = np.random.default_rng(seed).choice([-1, 0, 1, 2], (2000, 12), p=[0.5, 0.35, 0.1, 0.05]).astype(np.int8)
    closed, _ = tree.close(codes)
    present = (closed == 1) | (closed == 2)
    for label, implied in tree.implies:
        assert present[present[:, label], implied].all()
        assert (closed[closed[:, label] == 1, implied] == 1).all()
        assert not (present[:, label] & (closed[:, implied] == 0)).any()
        assert (closed[closed[:, implied] == 0, label] == 0).all()
    for group in map(list, tree.exclusive):
        alone = present[:, group].sum(axis=1)
        assert alone.max() <= 1
        assert ((closed[:, group] == 0).sum(axis=1) == len(group) - 1)[alone == 1].all()
    again, doubts = tree.close(closed)
    np.testing.assert_array_equal(again, closed)
    assert not doubts.any()


def test_sets_of_labels_are_augmented():
    present = np.zeros((1, 7), bool)
    present[0, POODLE] = True
    assert np.flatnonzero(BOTH.add_implied(present)).tolist() == [ANIMAL, DOG, NO, POODLE]


def test_a_tree_is_stored_and_checked():
    stored = BOTH.arrays()
    assert LabelTree.from_arrays(stored, NAMES) == BOTH
    assert LabelTree.from_arrays({}, NAMES) == LabelTree()
    with pytest.raises(ValueError, match="other labels than its 7 names"):
        LabelTree.from_arrays({"implies": stored["implies"] + 5}, NAMES)
    with pytest.raises(ValueError, match="but poodle implies dog"):
        LabelTree.from_arrays(stored | {"exclusive": np.array([[0, 0], [DOG, POODLE]])}, NAMES)


def test_the_labels_of_all_splits_are_closed_before_images_are_held_out(tmp_path):
    rows = ["image,labels", *(f"{n}.jpg,{'poodle' if n % 2 else 'day;night'}" for n in range(10))]
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    (tmp_path / "classes.txt").write_text("\n".join(NAMES))
    (tmp_path / "tree.yaml").write_text(TEXT)
    data = default_config().data
    data.name, data.root, data.table, data.classes = "csv", str(tmp_path), "labels.csv", "classes.txt"
    data.val_fraction, data.split_seed, data.bad_images, data.tree = 0.4, 3, "skip", "tree.yaml"
    train, val = open_splits(data, ["val"], keep_missing=True).values()
    assert ((train.labels == 1).sum(axis=0) + (val.labels == 1).sum(axis=0)).tolist() == [5, 0, 0, 5, 0, 5, 5]
    assert (val.labels == 1).sum(axis=0).tolist() == [2, 0, 0, 2, 0, 2, 2]
    unlabeled, negative, exclusive, *of_val = check_splits(train, [val])
    assert "no positive image of 3 of its 7 classes" in unlabeled
    assert negative == (
        "3 of the 5 images of split train have a negative label that another label of the image implies, which counts "
        f"as positive (data.tree): {', '.join(name for name in train.ids if int(name[0]) % 2)}"
    )
    assert exclusive.startswith("2 of the 5 images of split train have exclusive labels that are both positive")
    starts = [text.partition(" have")[0] for text in of_val]
    assert starts == ["2 of the 5 images of split val", "3 of the 5 images of split val"]
