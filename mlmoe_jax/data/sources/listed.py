"""What tables and COCO-style files of your own images share: where the file is, and where its paths start."""

from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError


def ids_of(files: list[str], images: str, split: str) -> list[str]:
    """Return ids that tell the splits apart, also where each has an `images` folder of its own with the same names."""
    return [f"{split}/{file}" for file in files] if "{split}" in images else files


def table_path(folder: Path, table: str, split: str) -> Path:
    """Return the file of `data.table` for a split; UserError where there is none."""
    path = folder / table.replace("{split}", split)
    if not path.is_file():
        kinds = (".csv", ".json", ".jsonl")
        there = sorted(found.name for kind in kinds for found in path.parent.glob(f"*{kind}"))
        others = f" ({', '.join(there[:5])}{', …' if len(there) > 5 else ''} are there)" if there else ""
        raise UserError(f"there is no table {path} for split {split}; set data.table, now {table}, to yours{others}")
    return path


def images_folder(folder: Path, images: str, split: str) -> Path:
    """Return the folder, `data.images` below the root, from which the paths in a table start."""
    return folder / images.replace("{split}", split)


def relative_to(folder: Path, images: list[str], table: Path) -> list[str]:
    """Return the paths of a table with absolute ones made relative to `folder`; UserError for one outside it."""
    if not any(image.startswith("/") for image in images):
        return images
    start = f"{folder.absolute()}".rstrip("/") + "/"
    for image in images:
        if image.startswith("/") and not image.startswith(start):
            raise UserError(
                f"{table} lists {image}, which is not below {folder}; set data.images to a folder above all images, "
                "such as /"
            )
    return [image.removeprefix(start) for image in images]


def refuse_other_splits(path: Path, split: str, data_config: ConfigDict, lacks: str) -> None:
    """Raise UserError unless `split` is the training split, which a table that says nothing of splits stands for."""
    if split != data_config.train_split:
        raise UserError(
            f"{path} {lacks}, so that all its images are split {data_config.train_split} and none is {split}; write "
            "one table per split and put {split} into data.table, or hold images out with data.val_fraction and clear "
            "data.test_splits"
        )
