"""The account of used and unused input."""

from mlmoe_jax.data.usage import Usage, join_usages


def test_an_account_says_what_is_left_out_and_why():
    usage = Usage("labels.csv", "row")
    usage.use("train", 40)
    for line in range(2, 7):
        usage.leave_out("of the split 'valid'", f"line {line}")
    usage.leave_out("without labels", "line 9")
    assert (usage.given, usage.unused) == (46, 6)
    usage.notes.append("spells a label in two ways")
    assert usage.sentences() == [
        "labels.csv: 6 of 46 rows are not used: 5 of the split 'valid' (line 2, line 3, line 4, …); 1 without labels "
        "(line 9)",
        "labels.csv spells a label in two ways",
    ]


def test_accounts_of_the_splits_of_a_file_are_joined():
    """Images that are left out of one split only are counted once, and are not used in the account of the others."""

    def account(*splits):
        usage = Usage("labels.csv", "row", {"train": 40, "val": 10})
        usage.leave_out("without labels", count=2)
        for split in splits:
            usage.merge(split, 1)
            usage = usage.drop(split, "without a file", ["a.png"])
        return usage

    joined, *more = join_usages([account("train"), account("val"), account()])
    assert not more
    assert (joined.given, joined.used, joined.unused) == (52, {"train": 38, "val": 8}, 4)
    document = joined.document()
    assert document["left_out"] == {
        "without labels": 2,
        "without a file (split train)": 1,
        "without a file (split val)": 1,
    }
    assert (document["given"], document["merged"]) == (52, 2)
    assert joined.hold_out("train", "val", 5).used == {"train": 33, "val": 5}
