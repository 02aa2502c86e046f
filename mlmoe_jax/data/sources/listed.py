"""Paths of tables and COCO-style files of your own images, and of the images that they list."""

from pathlib import Path

from ml_collections import ConfigDict

from mlmoe_jax.errors import UserError


def ids_of(files: list[str], images: str, split: str) -> list[str]:
    """Return ids that differ between splits, even if each has its own `images` folder with the same file names."""
    return [f"{split}/{file}" for file in files] if "{split}" in images else files


def table_path(folder: Path, table: str, split: str) -> Path:
    """Return the file of `data.table` for a split; UserError if it does not exist."""
    path = folder / table.replace("{split}", split)
    if not path.is_file():
        kinds = (".csv", ".json", ".jsonl")
        there = sorted(file.name for kind in kinds for file in path.parent.glob(f"*{kind}"))
        others = f" (found {', '.join(there[:5])}{', …' if len(there) > 5 else ''})" if there else ""
        raise UserError(f"there is no table {path} for split {split}; correct data.table, which is {table}{others}")
    return path


def images_folder(folder: Path, images: str, split: str) -> Path:
    """Return the folder `data.images` below the root, to which the paths in a table are relative."""
    return folder / images.replace("{split}", split)


def relative_to(folder: Path, images: list[str], table: Path) -> list[str]:
    """Return the paths of a table relative to `folder`; UserError for an absolute path outside it."""
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
    """Raise UserError unless `split` is the training split, to which tables without split names belong."""
    if split != data_config.train_split:
        raise UserError(
            f"{path} {lacks}, so all its images are in split {data_config.train_split} and none in {split}; write one "
            "table per split and use {split} in data.table, or hold out images with data.val_fraction and clear "
            "data.test_splits"
        )
