"""The groups of cases: damaged inputs, and the functions of the package that read them."""

from tools.fuzz.account import own_input
from tools.fuzz.commands import command_line, overrides, stored_config
from tools.fuzz.data_sets import keywords, packed_data, prepare_packed, prepare_published, published, tables
from tools.fuzz.files import containers, images, lists, prepare_images, weights
from tools.fuzz.hostile import Group
from tools.fuzz.runs import make_run, model, prepare_run, run_folder
from tools.fuzz.strangers import names, prepare_shared, requests, shared_model, tokenizers, vectors

GROUPS = {
    "overrides": Group(overrides, 0.15),
    "stored config": Group(stored_config, 0.05),
    "command line": Group(command_line, 0.1),
    "tables": Group(tables, 0.2),
    "keywords": Group(keywords, 0.1),
    "published data": Group(published, 0.1, prepare_published),
    "packed data": Group(packed_data, 0.05, prepare_packed),
    "weights": Group(weights, 0.12),
    "images": Group(images, 0.12, prepare_images),
    "containers": Group(containers, 0.05, prepare_images),
    "image lists": Group(lists, 0.05),
    "run folders": Group(run_folder, 0.05, make_run),
    "own input": Group(own_input, 0.1),
    "models": Group(model, 0.03, prepare_run),
    "requests": Group(requests, 0.1),
    "names": Group(names, 0.05),
    "vectors": Group(vectors, 0.05),
    "tokenizers": Group(tokenizers, 0.1),
    "shared models": Group(shared_model, 0.02, prepare_shared),
}
