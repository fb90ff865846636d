"""What `data.path` means: the files of each split and their format, or why there are none.

A path is a local folder, a file, a glob (`data/*.parquet`), an http(s) address of one file, or a data set on the Hugging
Face Hub (`org/name`). A folder's splits are found as on the Hub: by its README, else by the names of folders and files.
"""

from __future__ import annotations

import glob
import logging
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from train.data.download import CACHE_REFUSED, download
from train.data.labels import listed
from train.data.readers import COMPRESSED, is_remote
from train.errors import LockstepError, RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

FORMATS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".txt": "text",
    ".tar": "webdataset",
    ".arrow": "arrow",
}
PICTURES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
NOT_DATA = frozenset({"README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
DESCRIPTIONS = ("README.md", ".huggingface.yaml", "dataset_infos.json")  # of a folder's splits, subsets and columns
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
OPENED_BY_FILE = frozenset({"parquet", "csv", "json", "text"})

UNREACHABLE = frozenset({"TransportError", "ConnectionError", "ConnectError", "LocalEntryNotFoundError"})  # httpx, Hub


@dataclass(frozen=True)
class Located:
    root: str  # what names of files are shown relative to; "" for remote ones
    format: str  # "pictures", or the name of a `datasets` builder
    splits: dict[str, tuple[str, ...]]
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of each picture in class folders
    notes: tuple[str, ...] = ()
    builder: Any = None  # of `datasets`, where it found the files
    subset: str | None = None  # the configuration, of a data set that describes any
    revision: str | None = None  # the commit of a data set on the Hub

    @property
    def features(self) -> dict[str, Any]:
        """The columns as a README describes them."""
        return (self.builder.info.features if self.builder else None) or {}


def locate(
    path: str,
    subset: str | None = None,
    revision: str | None = None,
    *,
    key: str = "data.path",
    say: Callable[[str], None] = lambda line: None,
) -> Located:
    """Find the data that `path` names. `key` is the configuration key it was said under."""
    if path.startswith(("http://", "https://")):
        file = download(path, say)
        return _located(str(Path(file).parent), {"train": [file]}, key)
    if Path(path).is_dir():
        return _folder(path, subset, key)
    if Path(path).exists():
        return _located(str(Path(path).parent), {"train": [path]}, key)
    if glob.has_magic(path):
        base = next(parent for parent in Path(path).parents if not glob.has_magic(str(parent)))
        pattern = str(Path(path).relative_to(base))
        found = sorted(str(file) for file in base.glob(pattern) if file.is_file())
        if not found:
            there = "which exists" if base.is_dir() else "which does not exist"
            raise RunError(f"{key}: no file matches {path} (searched from {base.resolve()}, {there})")
        return _located(str(base), {"train": found}, key)
    if HUB_ID.fullmatch(path):
        say(f"asking the Hugging Face Hub for {path}")
        return _hub(path, subset, revision, key)
    raise RunError(f"{key}: no such file or folder: {path}{_nearest(path)}")


def suffix(file: str) -> str:
    """`.csv` of `a.csv.gz`, `.jpg` of `A.JPG`."""
    name = Path(urlsplit(file).path if is_remote(file) else file).name.lower()
    for packed in COMPRESSED:
        name = name.removesuffix(packed)
    return Path(name).suffix


def walk(folder: str) -> list[str]:
    """The files under a folder, sorted; links are followed, hidden files and folders are not data."""
    found = []
    for base, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        found += [f"{base}/{name}" for name in sorted(names) if not name.startswith(".") and name not in NOT_DATA]
    return found


def _refuse(error: OSError) -> None:
    raise RunError(f"{error.filename}: the folder cannot be read: {error.strerror}")


def _folder(path: str, subset: str | None, key: str) -> Located:
    from train.data.folders import class_folders

    path = str(Path(path).resolve())
    files = walk(path)
    pictures = [file for file in files if suffix(file) in PICTURES]
    tables = [file for file in files if suffix(file) in FORMATS]
    naming = [file for file in tables if FORMATS[suffix(file)] != "text"]  # these can name pictures; a text is a note
    if pictures and (found := class_folders(path, pictures, naming)):
        return Located(path, "pictures", *found)
    if not tables:
        what = "is empty" if not files else f"holds no data file ({listed(sorted({suffix(file) for file in files}))})"
        raise RunError(f"{key}: the folder {path} {what}; wanted are pictures in class folders or {', '.join(FORMATS)}")
    if not pictures and any(Path(path, name).exists() for name in DESCRIPTIONS):
        if glob.has_magic(path):
            raise RunError(f"{key}: `datasets` takes * ? [ in the name of a folder with a README.md for a pattern: rename {path}")
        builder = _builder(key, path, name=subset)
        return _located(path, builder.config.data_files, key, builder)
    # `datasets` would take a folder of pictures beside the tables that name them for a folder of pictures.
    from datasets.data_files import DataFilesDict, get_data_patterns

    base = glob.escape(path)
    suffixes = sorted({suffix(file) for file in (naming or tables)})
    splits = DataFilesDict.from_patterns(get_data_patterns(base), base_path=base, allowed_extensions=suffixes)
    return _located(path, splits, key)


def _located(root: str, splits: Mapping[Any, Sequence[str]], key: str, builder: Any = None) -> Located:
    """One format for all files, and no file of zero bytes."""
    found = sorted({suffix(file) for files in splits.values() for file in files})
    formats = {FORMATS.get(its) for its in found}
    format = formats.pop()
    if formats or format is None:
        raise RunError(f"{key}: data files are all of one format out of {', '.join(FORMATS)}, but {root} has {listed(found)}")
    local = (file for files in splits.values() for file in files if not is_remote(file))
    empty = dict.fromkeys(file for file in local if Path(file).stat().st_size == 0)
    kept = {str(split): tuple(file for file in files if file not in empty) for split, files in splits.items()}
    for split, files in kept.items():
        if not files:
            raise RunError(f"{splits[split][0]}: the file is empty (0 bytes), and there is no other for split {split}")
    subset = builder.config.name if builder else None
    if builder is None and format not in OPENED_BY_FILE:
        builder = _builder(key, root, data_files={split: list(map(glob.escape, files)) for split, files in kept.items()})
    elif builder is not None:
        builder.config.data_files = {split: list(files) for split, files in kept.items()}
    notes = tuple(f"left out: {file} is empty (0 bytes)" for file in empty)
    return Located(root, format, kept, notes=notes, builder=builder, subset=subset)


def _hub(path: str, subset: str | None, revision: str | None, key: str) -> Located:
    builder = _builder(key, path, name=subset, revision=revision)
    splits = {str(split): tuple(files) for split, files in builder.config.data_files.items()}
    known = {FORMATS.get(suffix(file)) for files in splits.values() for file in files}
    format = known.pop() if len(known) == 1 else None
    found = format or builder.name
    return Located("", found, splits, builder=builder, subset=builder.config.name, revision=builder.hash)


def _builder(key: str, path: str, name: str | None = None, revision: str | None = None, **arguments: Any) -> Any:
    import datasets

    try:
        return datasets.load_dataset_builder(path, name=name, revision=revision, **arguments)
    except Exception as error:
        raise refusal(error, key, path, revision) from None


def quiet() -> None:
    """Keep `datasets` and the Hub's client from telling on their own what is told here, and each retry."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)
    huggingface_hub.logging.set_verbosity(logging.CRITICAL)


def refusal(error: Exception, key: str, path: str, revision: str | None) -> LockstepError:
    """Why a data set did not open, one sentence a cause, from what `datasets` and the Hub's client raise."""
    causes = chain(error)
    kinds = {ancestor.__name__ for cause in causes for ancestor in type(cause).__mro__}
    reason = str(error).strip().partition("\n")[0]
    if "BuilderConfig" in reason or "Config name is missing" in reason:
        return UsageError(f"data.subset: {' '.join(str(error).split())}")
    if Path(path).exists() or not HUB_ID.fullmatch(path):
        return RunError(f"{key}: {path} cannot be opened: {reason}")
    if unwritable := next((cause for cause in causes if isinstance(cause, OSError) and cause.filename), None):
        return RunError(CACHE_REFUSED.format(unwritable))
    here = f"{key}: {path} is no file or folder here ({Path(path).absolute()})"
    hub = f"the data set {path} on the Hugging Face Hub"
    if "OfflineModeIsEnabled" in kinds or _offline():
        return RunError(f"{here}, and the Hugging Face Hub is switched off by {_offline()}: unset it, or give a local path")
    if "RevisionNotFoundError" in kinds or reason.startswith("Revision"):
        return UsageError(f"data.revision: {hub} has no revision {revision!r}")
    if "is a gated dataset" in reason:
        return RunError(f"{key}: {hub} is gated ({_token()}): ask for access on its page, then set HF_TOKEN")
    if kinds & {"RepositoryNotFoundError", "DatasetNotFoundError"}:
        return RunError(f"{here}; {hub} does not exist or is private ({_token()}): check the name, or set HF_TOKEN")
    if kinds & UNREACHABLE:
        return RunError(f"{here}, and the Hugging Face Hub cannot be reached (no network?): give a local path, or try again")
    return RunError(f"{here}, and {hub} cannot be opened ({_token()}): {reason}")


def chain(error: BaseException) -> list[BaseException]:
    """An error, what it came from, what that came from, ..."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _offline() -> str | None:
    """The environment variable that switches the Hub off."""
    on = {"1", "true", "yes", "on"}
    return next((n for n in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(n, "").lower() in on), None)


def _token() -> str:
    from huggingface_hub import get_token

    return "a token was sent" if get_token() else "no token was sent"


def _nearest(path: str) -> str:
    """Where a missing path leaves what exists."""
    there = next((parent for parent in Path(path).absolute().parents if parent.exists()), Path("/"))
    missing = Path(path).absolute().relative_to(there).parts[0]
    return f" ({there} exists and has no {missing})"
