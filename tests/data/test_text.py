import builtins
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made import json_lines

from tests.tasks import texts
from train.config.schema import Data
from train.data.plan import Share, training_plan
from train.data.text import open_text
from train.data.tokens import dtype
from train.errors import RunError, UsageError

TEXT = "Wär ich ein Vöglein\r\nund auch zwei Flüglein hätt\n\n— flög ich zu dir!\n" * 9


def opened(path, **keys):
    return open_text(Data(path=str(path), **keys))[0]


def blocks(source, vocabulary=256):
    """The tokens of each block, in the order of the keys."""
    rows = source.take(np.arange(source.size)).to_pylist()
    return [np.frombuffer(row["tokens"], dtype(vocabulary)) for row in rows]


def joined(source, vocabulary=256):
    """Whole blocks one after the other, and the token after the last."""
    found = blocks(source, vocabulary)
    return np.concatenate([*(block[:-1] for block in found), found[-1][-1:]])


def text_file(tmp_path, text=TEXT):
    path = tmp_path / "input.txt"
    path.write_bytes(text.encode())
    return path


def test_the_blocks_of_a_file_are_its_bytes(tmp_path):
    content = TEXT.encode()
    source = opened(text_file(tmp_path), context=10).train
    assert source.size == (len(content) - 1) // 10
    assert joined(source).tobytes() == content[: 10 * source.size + 1]
    assert source.where(3) == "tokens 30 to 40"


def test_a_file_that_is_read_in_pieces_is_one_text(tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.readers.PIECE", 40)
    source = opened(text_file(tmp_path), context=1).train
    assert joined(source).tobytes() == TEXT.encode()


@pytest.mark.parametrize("context", [1, 7, 64])
def test_each_token_but_the_first_is_predicted_once_in_training_or_validation(tmp_path, context):
    sources = opened(text_file(tmp_path), context=context, validation_fraction=0.25)
    targets = [block[1:] for block in (*blocks(sources.train), *blocks(sources.validation))]
    found = np.concatenate(targets).tobytes()
    assert found == TEXT.encode()[1 : len(found) + 1]
    assert len(TEXT.encode()) - 1 - len(found) < context
    assert sources.validation.size == round((len(TEXT.encode()) - 1) // context * 0.25)


def test_an_epoch_shows_each_block_once(tmp_path):
    source = opened(text_file(tmp_path), context=10).train
    share = Share(batch=source.size, micro=source.size, lanes=range(1))
    plan = training_plan(source, share, 0, seed=3, shuffle=True, block=1)
    first, second = (next(plan).keys.tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(source.size))
    assert first != second != list(range(source.size))


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_documents_of_a_table_are_joined_by_a_zero_byte(tmp_path, form):
    documents = ["one and\ntwo", "", "drei — vier", "five"]
    if form == "jsonl":
        json_lines(tmp_path / "set/a.jsonl", [{"text": text, "id": number} for number, text in enumerate(documents[:2])])
        json_lines(tmp_path / "set/b.jsonl", [{"text": text, "id": number} for number, text in enumerate(documents[2:])])
    elif form == "csv":
        (tmp_path / "set").mkdir()
        (tmp_path / "set/a.csv").write_text("id,text\n" + "".join(f'{n},"{text}"\n' for n, text in enumerate(documents)))
    else:
        (tmp_path / "set").mkdir()
        pq.write_table(
            pa.table({"url": documents, "content": documents, "n": [1] * 4}), tmp_path / "set/a.parquet", row_group_size=2
        )
    assert joined(opened(tmp_path / "set", context=1).train).tobytes() == "\0".join(documents).encode()


def test_files_are_documents_and_another_separator_is_one_too(tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"set/{name}.txt").write_text(f"{name} text\n")
    assert joined(opened(tmp_path / "set", context=1).train).tobytes() == b"a text\n\0b text\n"
    assert joined(opened(tmp_path / "set", context=1, separator="--").train).tobytes() == b"a text\n--b text\n"


def test_splits_are_found_as_those_of_pictures_are(tmp_path):
    for split, text in (("train", "some text"), ("validation", "more")):
        (tmp_path / f"{split}.txt").write_text(text)
    sources = opened(tmp_path, context=1)
    assert joined(sources.train).tobytes() == b"some text"
    assert joined(sources.validation).tobytes() == b"more"


def test_tokens_are_written_again_when_the_text_changes(tmp_path):
    said = []
    path = text_file(tmp_path, "first text")
    for expected in (1, 1, 2):
        if expected == 2:
            text_file(tmp_path, "other text!")
        source = open_text(Data(path=str(path), context=1), said.append)[0].train
        assert len(said) == expected
    assert joined(source).tobytes() == b"other text!"


def test_a_long_writing_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("train.data.prepared.SECONDS", 0)
    said = []
    json_lines(tmp_path / "set/a.jsonl", [{"text": "one"}])
    json_lines(tmp_path / "set/b.jsonl", [{"text": "three"}])
    open_text(Data(path=str(tmp_path / "set"), context=1), said.append)
    assert said[1:] == ["3 tokens written, in file 1 of 2", "9 tokens written, in file 2 of 2"]


@pytest.fixture
def tokenizer(tmp_path):
    return texts.tokenizer(tmp_path / "tokenizer.json", TEXT)


def test_the_tokens_of_a_tokenizer_file_are_the_text_again(tmp_path, tokenizer):
    size = tokenizer.get_vocab_size()
    assert 256 < size <= 400
    (tmp_path / "set").mkdir()
    source = opened(text_file(tmp_path / "set"), context=1, tokenizer=tmp_path / "tokenizer.json").train
    found = joined(source, size).tolist()
    assert found == tokenizer.encode(TEXT).ids
    assert tokenizer.decode(found) == TEXT
    assert len(found) < len(TEXT) / 1.5


def test_documents_are_joined_by_the_tokenizers_end_of_text(tmp_path, tokenizer):
    path = json_lines(tmp_path / "set/a.jsonl", [{"text": "ein Vöglein"}, {"text": "zu dir!"}])
    source = opened(path, context=1, tokenizer=tmp_path / "tokenizer.json").train
    found = joined(source, tokenizer.get_vocab_size()).tolist()
    assert tokenizer.decode(found, skip_special_tokens=False) == "ein Vöglein<|endoftext|>zu dir!"
    with pytest.raises(UsageError, match=r"data.separator must say the token between documents: tokenizer.json has no <END>"):
        opened(path, context=1, tokenizer=tmp_path / "tokenizer.json", separator="<END>")


def test_another_tokenizer_file_is_other_data(tmp_path, tokenizer):
    path = tmp_path / "tokenizer.json"
    text = text_file(tmp_path)
    before = open_text(Data(path=str(text), context=8, tokenizer=path))[1].identity
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "truncation": None}))
    assert open_text(Data(path=str(text), context=8, tokenizer=path))[1].identity != before


def test_a_tokenizer_that_cannot_be_had_is_told_with_the_mend(tmp_path, monkeypatch):
    text = text_file(tmp_path)
    real_import = builtins.__import__

    def without_tokenizers(name, *rest):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "__import__", without_tokenizers)
        with pytest.raises(UsageError, match=r"needs tokenizers: pip install 'lockstep\[text\]'"):
            opened(text, tokenizer=text)
    pytest.importorskip("tokenizers")
    with pytest.raises(UsageError, match=r"data.tokenizer: .*input.txt is no tokenizer.json"):
        opened(text, tokenizer=text)
    with pytest.raises(UsageError, match=r"data.tokenizer: .*gone.json cannot be read: No such file"):
        opened(text, tokenizer=tmp_path / "gone.json")


def test_a_tokenizer_that_has_no_token_for_a_text_is_told(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    for name, model, kind, words in (
        ("words", tokenizers.models.WordLevel({"known": 0}), RunError, "words.json cannot make tokens of the text"),
        ("untrained", tokenizers.models.BPE(), UsageError, "untrained.json has no tokens"),
    ):
        tokenizers.Tokenizer(model).save(str(tmp_path / f"{name}.json"))
        with pytest.raises(kind, match=f"data.tokenizer: .*{words}"):
            opened(text_file(tmp_path), tokenizer=tmp_path / f"{name}.json")


def test_texts_without_a_token_are_refused(tmp_path):
    with pytest.raises(RunError, match=r"there are no tokens in a.jsonl"):
        opened(json_lines(tmp_path / "a.jsonl", [{"text": ""}]))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf")  # no more than a mark of the byte order
    with pytest.raises(RunError, match=r"there are no tokens in b.txt"):
        opened(tmp_path / "b.txt")


def test_a_text_that_is_shorter_than_a_block_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"split train has 5 tokens, which is less than a block of data.context=5 and one more"):
        opened(text_file(tmp_path, "short"), context=5)
    assert opened(text_file(tmp_path, "short"), context=4).train.size == 1


def test_a_fraction_that_leaves_nothing_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"data.validation_fraction: 0.1 of 4 blocks leaves a part without any"):
        opened(text_file(tmp_path, "short"), context=1, validation_fraction=0.1)


def test_a_missing_text_is_told_with_its_row_or_left_out(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"text": "one"}, {"text": None}, {"text": "two"}])
    with pytest.raises(RunError, match=r"a.jsonl row 1: the text is missing"):
        opened(path, context=1)
    assert joined(opened(path, context=1, on_error="skip").train).tobytes() == b"one\0two"


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\xfe bad\n")
    with pytest.raises(RunError, match=r"a.txt: cannot be read .*'utf-8' codec can't decode byte 0xff"):
        opened(tmp_path / "a.txt", context=1)


def test_a_table_without_a_usual_name_of_text_asks_for_its_column(tmp_path):
    path = json_lines(tmp_path / "a.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(UsageError, match=r"data.text_column must say which column is meant: question or answer"):
        opened(path, context=1)
    rows = [{"question": "abc", "answer": 1}]
    assert joined(opened(json_lines(tmp_path / "b.jsonl", rows), context=1).train).tobytes() == b"abc"
    with pytest.raises(UsageError, match=r"data.text_column: column answer of .* is int"):
        opened(tmp_path / "b.jsonl", context=1, text_column="answer")
