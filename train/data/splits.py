"""Which splits of the data at `data.path` are trained and evaluated on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from train.data import readers
from train.data.identity import identity
from train.data.labels import listed
from train.data.locate import Located, locate, quiet
from train.data.source import MapSource, Source, relative
from train.errors import RunError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from train.config.schema import Data

VALIDATION_NAMES = ("validation", "valid", "val", "dev", "test")


class Split(NamedTuple):
    """A split that has been found; nothing of it is read."""

    place: Located
    name: str

    @property
    def files(self) -> tuple[str, ...]:
        return self.place.splits[self.name]

    def identity(self, names: tuple[str, ...]) -> dict[str, Any]:
        return identity(self.files, names, self.place.revision)

    def reader(self) -> readers.Reader:
        """Of its rows, which are some as far as is known."""
        reader = self._reader()
        if not any(reader.columns) or not any(size is None or size > 0 for size in reader.sizes):
            raise self.nothing()
        return reader

    def nothing(self) -> RunError:
        return RunError(f"split {self.name} has no rows ({listed(relative(file, self.place.root) for file in self.files)})")

    def _reader(self) -> readers.Reader:
        place = self.place
        match place.format:
            case "pictures":
                return readers.pictures(place.root, self.files, place.labels[self.name])
            case "parquet":
                return readers.parquet(self.files, place.features)
            case "csv":
                return readers.delimited(self.files, place.features)
            case "json":
                return readers.json_lines(self.files, place.features)
            case "text":
                return readers.text(self.files)
            case _:
                return readers.streamed(place.builder, self.name, self.files)

    def extent(self, source: Source) -> str:
        if isinstance(source, MapSource):
            return f"split {self.name}, {source.size} samples, taken in any order"
        known = [size for size in source.sizes if size is not None]
        rows = f"{sum(known)} samples" if len(known) == source.shards else "samples not counted yet"
        return f"split {self.name}, {rows} in {source.shards} shard{'s' * (source.shards > 1)}, streamed"


class Splits(NamedTuple):
    train: Split
    validation: Split | None
    notes: tuple[str, ...]


def find_splits(data: Data, say: Callable[[str], None]) -> Splits:
    """The splits that `data` names. `say` is told of what may take long, before it begins."""
    quiet()
    found = place = locate(data.path, data.subset, data.revision, say=say)
    for key, given, used in (("revision", data.revision, found.revision), ("subset", data.subset, found.subset)):
        if given is not None and used is None:
            where = "the Hugging Face Hub" + " or a folder whose README.md describes subsets" * (key == "subset")
            raise UsageError(f"data.{key}: {given} means nothing, as data.path={data.path} is not on {where}: remove data.{key}")
    if data.validation_path is not None:
        place = locate(data.validation_path, data.subset, key="data.validation_path", say=say)
    if data.train_split not in found.splits:
        has = f"{data.path} has the splits {', '.join(found.splits)}"
        raise UsageError(f"data.train_split: there is no split {data.train_split}; {has}")
    notes = list(dict.fromkeys((*found.notes, *place.notes)))
    validation = _validation(found, place, data)
    if validation is None and data.validation_split == "auto" and data.validation_fraction is None:
        notes.append(f"validation: none, {data.path} has only the splits {', '.join(found.splits)}")
    return Splits(Split(found, data.train_split), Split(place, validation) if validation else None, tuple(notes))


def _validation(found: Located, place: Located, data: Data) -> str | None:
    wanted = data.validation_split
    if wanted == "none" or data.validation_fraction is not None:
        return None
    if wanted != "auto":
        if wanted not in place.splits:
            raise UsageError(
                f"data.validation_split: there is no split {wanted}; "
                f"{data.validation_path or data.path} has the splits {', '.join(place.splits)}"
            )
        return wanted
    for name in VALIDATION_NAMES:
        if name in place.splits and (place is not found or name != data.train_split):
            return name
    return next(iter(place.splits)) if place is not found else None
