"""The account of used and unused input."""

from mlmoe_jax.data.usage import Usage, unused_input


def test_an_account_says_what_is_left_out_and_why():
    usage = Usage("labels.csv", "row")
    usage.use("train", 40)
    for line in range(2, 7):
        usage.leave_out("of the split 'valid'", f"line {line}")
    usage.leave_out("without labels", "line 9")
    assert (usage.given, usage.unused) == (46, 6)
    assert usage.sentence() == (
        "labels.csv: 6 of 46 rows are not used: 5 of the split 'valid' (line 2, line 3, line 4, …); 1 without labels "
        "(line 9)"
    )


def test_equal_accounts_are_reported_once_and_complete_ones_never():
    complete, partial, same = (Usage(place, "file") for place in ("a", "b", "b"))
    complete.use(count=3)
    for usage in (partial, same):
        usage.leave_out("without image suffix", "b/x")
    assert unused_input([partial, complete, same]) == ["b: 1 of 1 file is not used: 1 without image suffix (b/x)"]
