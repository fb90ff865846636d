"""Pictures in class folders: `train/cat/1.jpg`, or `cat/1.jpg` where there is one split."""

from __future__ import annotations

from typing import TYPE_CHECKING

from train.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

SPLIT_NAMES = {  # as `datasets` reads the names of folders
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
LAYOUT = "wanted: train/CLASS/picture.jpg (and validation/CLASS/picture.jpg), or CLASS/picture.jpg without splits"


def class_folders(
    root: str, pictures: Sequence[str], tables: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]] | None:
    """The pictures of each split and beside them their classes; None where they belong to tables that lie among them."""
    names = [picture.removeprefix(f"{root.rstrip('/')}/") for picture in pictures]
    divided = all(name.split("/")[0].lower() in SPLIT_NAMES for name in names if "/" in name)
    splits: dict[str, list[tuple[str, str]]] = {}
    loose = []
    for name, picture in zip(names, pictures, strict=True):
        folders = name.split("/")[:-1]
        split = SPLIT_NAMES[folders.pop(0).lower()] if divided and folders else "train"
        if folders:
            splits.setdefault(split, []).append((picture, folders[0]))
        else:
            loose.append(name)
    classes = {label for rows in splits.values() for _, label in rows}
    if len(classes) > 1 and not loose:
        return (
            {split: tuple(picture for picture, _ in rows) for split, rows in splits.items()},
            {split: tuple(label for _, label in rows) for split, rows in splits.items()},
        )
    if tables:
        return None
    if not loose:
        raise RunError(f"{root}: only one class ({classes.pop()}), so there is nothing to learn; {LAYOUT}")
    if classes:
        raise RunError(f"{root}: {len(loose)} of the pictures lie outside class folders, such as {loose[0]}; {LAYOUT}")
    places = sorted({name.split("/")[0] + "/" if "/" in name else "the folder itself" for name in loose})
    raise RunError(f"{root}: no class folders found: the pictures lie straight in {' and '.join(places)}; {LAYOUT}")
