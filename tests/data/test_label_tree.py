import tracemalloc
from time import process_time

import numpy as np
from helpers.tables import settings

from mlmoe_jax.data.label_codes import DIFFICULT, NEGATIVE, POSITIVE, UNKNOWN
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


def test_a_file_is_read(tmp_path):
    as_json = '{"implies": {"dog": ["animal", "no"]}}', LabelTree(TREE.implies[:2])
    for text, tree in ((TEXT, TREE), as_json):
        (tmp_path / "tree.yaml").write_text(text)
        assert read_tree(tmp_path / "tree.yaml", NAMES) == tree


def test_large_trees_are_checked_in_seconds(tmp_path):
    """A chain, whose closure is quadratic, and a ladder, which has exponentially many paths."""
    path = tmp_path / "tree.yaml"
    for step, count in ((1, 4_000), (2, 400)):
        names = [f"l{number}" for number in range(count)]
        rows = [f"  {names[k]}: [{', '.join(names[k + 1 : k + 1 + step])}]" for k in range(count - 1)]
        path.write_text("\n".join(["implies:", *rows, f"exclusive: [[{names[-1]}, other]]"]))
        tracemalloc.start()
        assert len(read_tree(path, [*names, "other"]).implies) >= len(rows)
        assert tracemalloc.get_traced_memory()[1] < 25e6
        tracemalloc.stop()


def test_equal_groups_are_one_and_many_groups_are_closed_in_little_time(tmp_path):
    path = tmp_path / "tree.yaml"
    path.write_text("exclusive:\n- [day, night]\n" + "- [night, day]\n" * 2_000)
    assert list(map(set, read_tree(path, NAMES).exclusive)) == [{DAY, NIGHT}]
    count = 400
    pairs = LabelTree(exclusive=tuple((k, j) for k in range(count) for j in range(k)))
    codes = np.full((30, count), UNKNOWN, np.int8)
    codes[:, 5], codes[0, 7] = POSITIVE, DIFFICULT
    start = process_time()
    closed, contradictions = pairs.close(codes)
    assert process_time() - start < 2
    assert contradictions[:, 1].tolist() == [True] + [False] * 29
    assert closed[0].tolist() == [UNKNOWN if k in (5, 7) else NEGATIVE for k in range(count)]
    assert closed[1].tolist() == [POSITIVE if k == 5 else NEGATIVE for k in range(count)]


def codes_of(*rows: str) -> np.ndarray:
    """Return the codes of rows of 0, 1, 2 (difficult) and ? (unknown), one letter per label of NAMES."""
    return np.array([["?012".index(code) - 1 for code in row] for row in rows], np.int8)


def test_labels_are_closed():
    codes = codes_of("??????1", "0??????", "????1??", "???1??2")
    closed, doubts = BOTH.close(codes)
    # A poodle is all that it implies, and no cat; no animal is no cat, dog and poodle; night is no day; a difficult
    # poodle stays difficult.
    np.testing.assert_array_equal(closed, codes_of("10?1?11", "00?0??0", "??0?1??", "10?1?12"))
    assert not doubts.any()
    np.testing.assert_array_equal(codes[0], codes_of("??????1")[0], "the table stays")


def test_contradictions_are_marked_and_decided():
    closed, doubts = BOTH.close(codes_of("0001000", "0010100", "0101000", "0000002"))
    assert doubts[:, :2].tolist() == [[True, False], [False, True], [True, True], [True, False]]
    # The positive label prevails; neither day nor night; either of cat and dog is an animal; difficult ones prevail.
    np.testing.assert_array_equal(closed, codes_of("1001010", "00?0?00", "1?0?010", "2002022"))


def test_the_labels_of_all_splits_are_closed_before_images_are_held_out(tmp_path):
    rows = ["image,labels", *(f"{n}.jpg,{'poodle' if n % 2 else 'day;night'}" for n in range(10))]
    for name, text in (("labels.csv", rows), ("classes.txt", NAMES), ("tree.yaml", [TEXT])):
        (tmp_path / name).write_text("\n".join(text))
    keys = {"table": "labels.csv", "classes": "classes.txt", "tree": "tree.yaml", "bad_images": "skip"}
    data = settings(tmp_path, val_fraction=0.4, split_seed=3, **keys)
    train, val = open_splits(data, ["val"], keep_missing=True).values()
    of_val = (val.labels[:] == 1).sum(axis=0)
    assert of_val.tolist() == [2, 0, 0, 2, 0, 2, 2]
    assert ((train.labels[:] == 1).sum(axis=0) + of_val).tolist() == [5, 0, 0, 5, 0, 5, 5]
    _, negative, exclusive, *_ = check_splits(train, [val])
    assert negative == (
        "3 of the 5 images of split train have a negative label that another label of the image implies, which counts "
        f"as positive (data.tree): {', '.join(name for name in train.ids if int(name[0]) % 2)}"
    )
    assert exclusive.startswith("2 of the 5 images of split train have exclusive labels that are both positive")
