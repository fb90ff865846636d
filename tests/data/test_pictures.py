import pytest
from made import ids, opened, parquet, picture

from train.errors import UsageError


def test_a_fraction_of_the_training_split_is_held_out_evenly(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0] * 40 + [1] * 40)
    sources = opened(path, streaming=False, validation_fraction=0.25)
    train, validation = ({part.where(key) for key in range(part.size)} for part in (sources.train, sources.validation))
    assert (len(train), len(validation)) == (60, 20)
    assert train | validation == {f"a.parquet row {row}" for row in range(80)}
    assert 5 < sum(int(place.split()[-1]) < 40 for place in validation) < 15
    again = opened(path, streaming=False, validation_fraction=0.25)
    assert ids(again) == ids(sources)


def test_a_fraction_of_class_folders_is_held_out(tmp_path):
    for number in range(8):
        picture(tmp_path / f"{'cat' if number < 4 else 'dog'}/{number}.png")
    sources = opened(tmp_path, validation_fraction=0.5)
    places = [part.where(key) for part in (sources.train, sources.validation) for key in range(part.size)]
    assert sorted(places) == [f"{'cat' if number < 4 else 'dog'}/{number}.png" for number in range(8)]
    assert sources.train.size == 4


def test_a_fraction_of_a_stream_is_refused_with_the_mend(tmp_path):
    path = parquet(tmp_path / "a.parquet", [0, 1])
    with pytest.raises(UsageError, match=r"data.validation_fraction is of records .* set data.streaming=false"):
        opened(path, validation_fraction=0.5)
    with pytest.raises(UsageError, match=r"data.validation_fraction: 0.1 of 2 samples leaves a part without any"):
        opened(path, streaming=False, validation_fraction=0.1)
