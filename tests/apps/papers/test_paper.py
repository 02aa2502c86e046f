"""The numbers of the papers: that they agree with one another and with what the texts say; docs/published.md."""

import pytest

from mlmoe_jax.apps.papers.paper import PAPERS, SMALL_DATASETS, Recipe, filter_rows, find_table, load_paper
from tools.docs import write_papers as writing

RESULTS = [result for name in PAPERS for result in load_paper(name).tables()]


# ------------------------------------------------------------------------------------------------------- the numbers
@pytest.mark.parametrize(("figure", "precision", "recall"), [("CF1", "CP", "CR"), ("OF1", "OP", "OR")])
def test_f1_is_the_harmonic_mean_of_precision_and_recall(figure, precision, recall):
    """In every row that prints the three of them, so that no digit can be wrong by much."""
    checked = 0
    for result in RESULTS:
        for row in result.rows if precision in result.columns else ():
            f1, *both = (row.numbers[column].value for column in (figure, precision, recall))
            if None not in (f1, *both):
                assert f1 == pytest.approx(2 * both[0] * both[1] / sum(both), abs=0.11), row.label
                checked += 1
    assert checked > 35


# ------------------------------------------------------------------------------------------------- rows and recipes
def test_a_row_names_its_config():
    table = find_table("mlvpt.1")[1]
    recipes = {row.label: row.recipe.reference for row in table.rows}
    assert recipes["VPT, ViT-B/16, MAE, coco2014, 448"] == "vpt:backbone=vit_b16_mae,dataset=coco2014,resolution=448"
    assert recipes["ML-VPT, ViT-B/16, MAE, coco2014, 224"] == "mlvpt_vit:backbone=mae,dataset=coco2014,resolution=224"
    missing = {row.settings["method"]: row.recipe for row in find_table("drmoe.originals")[1].rows}
    assert missing["ML-Decoder"] is missing["CNN-RNN"] is None
    row = find_table("drmoe.gains")[1].rows[0]
    assert row.settings["method"] == "DR-MoE − HSQ"
    assert [one.reference.partition("_")[0] for one in (row.recipe, row.subtracted)] == ["drmoe", "hsq"]


def test_another_data_set_keeps_the_backbone_but_a_small_one_has_its_own():
    recipes = [row.recipe for row in find_table("mlvpt.1", "voc2007")[1].rows]
    assert recipes[0] == Recipe("vpt:backbone=vit_b16_in1k,dataset=voc2007,resolution=224")
    small = {row.recipe for row in find_table("mlvpt.1", SMALL_DATASETS[0])[1].rows}
    assert small == {Recipe(f"{name}:dataset=digits") for name in ("vpt", "gatevpt", "e2vpt", "mlvpt_dinov2")}
    groups = [row.settings["model.prompts.num_groups"] for row in find_table("mlvpt.fig5", "digits")[1].rows]
    assert groups == [f"num_groups={count}" for count in (1, 1, 2, 2, 3, 3, 5, 5, 8, 8)], (
        "there are no 13 labels to divide"
    )


def test_a_recipe_names_its_folder_and_data_set():
    recipe = Recipe("gvpt:sides=co,dataset=voc2007", (("model.prompts.num_groups", "2"),))
    assert recipe.name == "gvpt,sides=co,dataset=voc2007,model.prompts.num_groups=2"
    assert recipe.dataset == "voc2007"
    assert recipe.with_seed(3).name == f"{recipe.name},seed=3"
    assert recipe.with_seed(3).overrides[-1] == ("seed", "3")


@pytest.mark.parametrize(
    ("only", "count", "methods"),
    [
        ("", 48, {"VPT", "GateVPT", "E2VPT", "ML-VPT"}),
        ("VPT", 12, {"VPT"}),
        ("ml-vpt,dinov2-s,448", 1, {"ML-VPT"}),
        ("dinov2*", 16, {"VPT", "GateVPT", "E2VPT", "ML-VPT"}),
        ("vit_b16_mae, 224", 4, {"VPT", "GateVPT", "E2VPT", "ML-VPT"}),
        ("g*", 12, {"GateVPT"}),
    ],
)
def test_rows_are_selected(only, count, methods):
    rows = filter_rows(find_table("mlvpt.1")[1].rows, only)
    assert len(rows) == count
    assert {row.settings["method"] for row in rows} == methods


# --------------------------------------------------------------------------------------------------------- the page
def test_the_page_in_the_repository_is_up_to_date():
    assert writing.PAGE.read_text() == writing.page(), "run python -m tools.docs.write_papers"
