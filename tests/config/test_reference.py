import re
import subprocess
import sys

from helpers.commands import succeeded
from helpers.paths import REPOSITORY

from mlmoe_jax.config import config_options
from mlmoe_jax.config.reference import describe_config, reference_page
from mlmoe_jax.config.table import CONFIG, KEYS, SECTIONS
from mlmoe_jax.main import main
from mlmoe_jax.runtime.keys import ChoiceKey, IntegerKey, Key, NumberKey


# -------------------------------------------------------------------------------------------------------- the table
def test_everything_has_a_sentence_and_a_default_that_is_allowed_and_reads_back():
    for doc in (one.doc for one in (*KEYS.values(), *SECTIONS.values())):
        assert doc[0].isupper()
        assert doc.endswith("."), doc
        assert ". " not in doc.replace("eq. ", "equation "), f"one sentence: {doc}"
        assert "\n" not in doc
    assert not KEYS["train.epochs"].allows(True)
    for name, key in KEYS.items():
        assert key.allows(key.default), name
        if isinstance(key.default, bool | int | float | str):
            assert key.parse(str(key.default)) == key.default


def test_numbers_have_their_type_and_choices_have_a_meaning_each():
    for name, key in KEYS.items():
        if isinstance(key, NumberKey):
            assert isinstance(key.default, int if isinstance(key, IntegerKey) else float), name
        if isinstance(key, ChoiceKey):
            assert len(set(key.choices)) == len(list(key.choices)) > 1, name
            if isinstance(key.choices, dict):
                assert all(meaning and not meaning.endswith(".") for meaning in key.choices.values()), name


# --------------------------------------------------------------------------------------------------------- help
def test_help_of_a_key():
    assert describe_config("optim.learning_rate") == (
        f"optim.learning_rate=0.001 (a number above 0): {KEYS['optim.learning_rate'].doc}"
    )
    assert describe_config("train.log_every").startswith(
        "train.log_every=20 steps (an integer above 0; for fit=steps): "
    )


def test_help_of_a_section(capsys):
    assert main(["--help=model.prompts"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(
        f"model.prompts: {SECTIONS['model.prompts'].doc}\n\nmodel.prompts.kind=none (one of none, deep"
    )
    assert "deep is VPT-deep" in " ".join(shown.split())
    inside = [name for name in KEYS if name.startswith("model.prompts.")]
    assert re.findall(r"^(model\.prompts\.\w+)[= ]", shown, re.MULTILINE) == inside
    assert max(map(len, shown.splitlines())) <= 100


def test_help_names_the_sections_below_and_says_what_is_open():
    assert "model.head.kind" not in describe_config("model")
    whole = describe_config("config")
    assert all(f"\n{name}: " in whole for name, entry in CONFIG.entries.items() if not isinstance(entry, Key))
    assert "\nseed=0 (an integer of at least 0 and at most 4,294,967,295): " in whole
    assert "\nloss.terms.NAME=0.0 (a number): " in describe_config("loss.terms")
    assert describe_config("loss.terms.mine").startswith("loss.terms.mine=0.0 (a number)")


def test_help_of_a_config_file_names_each_option():
    shown = describe_config("config:lora")
    doc, options = config_options("lora")
    assert shown.startswith(f"{doc}\n\ndataset=coco2014 (one of digits, synthetic, voc2007, ")
    assert re.findall(r"^([a-z_]+)[= ].*: ", shown.removeprefix(doc), re.MULTILINE) == list(options)
    assert "\n    float32: float32 everywhere\n" in shown
    assert "\ntargets=query+value (one or more of query, key, value, output, fc1, fc2, each once): Updated" in shown


def test_help_of_your_own_config_file(tmp_path, refusal):
    file = tmp_path / "mine.py"
    file.write_text("""
from mlmoe_jax.config import parse_arg

def get_config(arg=""):
    parse_arg(f"name=a,{arg}", epochs=3, name="x", splits=("a", "b"))
    raise AssertionError("the options are known before")
""")
    for location in (file, file.with_suffix("")):
        assert describe_config(f"config:{location}") == "\n".join(
            ("epochs=3 (an integer)", "name=x", "splits=a+b (strings separated by +)")
        )
    file.write_text("def get_config(arg=''): ...")
    assert describe_config(f"config:{file}") == "It declares no options."
    assert "there is no config 'vtp'; did you mean 'vpt'?" in refusal(describe_config, "config:vtp")


# What one process does, in this order, and what it has not imported after it.
NOT_IMPORTED = {
    "import mlmoe_jax; dir(mlmoe_jax)": "jaxlib flax sklearn orbax optax ml_collections",
    "main(['--help'])": "numpy etils PIL mlmoe_jax.config.defaults",
    "main(['--help=optim'])": "scipy",
    "main(['--help=config:lora'])": "",
    "main(['--mode=reproduce', '--table=mlvpt.4', '--dry-run'])": "",
    "import mlmoe_jax.apps.tools.compare": "jax grain",
}


def test_libraries_are_imported_only_by_what_needs_them():
    """What a training does not import is asserted by multiprocess/worker.py."""
    lines, unwanted = ["import sys", "from mlmoe_jax.main import main"], ""
    for code, names in reversed(NOT_IMPORTED.items()):
        unwanted += f" {names}"
        lines[2:2] = [code, f"assert not {set(unwanted.split())} & sys.modules.keys(), {code!r}"]
    succeeded(subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=REPOSITORY))


# --------------------------------------------------------------------------------------------------------- the page
def test_the_page_in_the_repository_is_up_to_date():
    written = (REPOSITORY / "docs" / "configuration.md").read_text()
    assert written == reference_page(), "run python -m tools.docs.write_configuration"
