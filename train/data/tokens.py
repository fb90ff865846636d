"""Text to tokens: the bytes of its UTF-8, or what a `tokenizer.json` of the `tokenizers` library makes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from train.errors import RunError, UsageError

# What ends a document, as tokenizers call it.
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "[SEP]")


class Tokenizer(Protocol):
    vocabulary: int  # tokens are numbers below it
    identity: str  # by what it is known again

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        """The tokens of each text, of `dtype`."""

    def separator(self, wanted: str) -> NDArray[np.unsignedinteger]:
        """The tokens between two documents; `auto` is the usual one."""


def dtype(vocabulary: int) -> np.dtype[np.unsignedinteger]:
    """The smallest that holds each token: uint8, uint16 or uint32."""
    return np.min_scalar_type(vocabulary - 1)


class Bytes:
    vocabulary = 256
    identity = "bytes"

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def separator(self, wanted: str) -> NDArray[np.unsignedinteger]:
        """A zero byte, which no text holds."""
        return self.encode(["\0" if wanted == "auto" else wanted])[0]


class TokenizerFile:
    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UsageError("data.tokenizer: a tokenizer.json needs tokenizers: pip install 'lockstep[text]'") from error
        try:
            content = path.read_bytes()
        except OSError as error:
            raise UsageError(f"data.tokenizer: {path} cannot be read: {error.strerror}") from None
        try:
            self.tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the library has no type of its own for this
            raise UsageError(f"data.tokenizer: {path} is no tokenizer.json of the tokenizers library: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.name = path.name
        tokens = self.tokenizer.get_vocab()
        if not tokens:
            raise UsageError(f"data.tokenizer: {path} has no tokens: it is not trained")
        self.vocabulary = max(tokens.values()) + 1
        self.identity = hashlib.sha256(content).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.unsignedinteger]]:
        try:
            encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # such as a word that is no token, where the file names none for such
            raise RunError(f"data.tokenizer: {self.name} cannot make tokens of the text: {error}") from None
        return [np.array(encoding.ids, dtype(self.vocabulary)) for encoding in encodings]

    def separator(self, wanted: str) -> NDArray[np.unsignedinteger]:
        names = SEPARATORS if wanted == "auto" else (wanted,)
        token = next((name for name in names if self.tokenizer.token_to_id(name) is not None), None)
        if token is None:
            raise UsageError(f"data.separator must say the token between documents: {self.name} has no {' or '.join(names)}")
        return np.array([self.tokenizer.token_to_id(token)], dtype(self.vocabulary))


def open_tokenizer(wanted: Path | str) -> Tokenizer:
    """What `data.tokenizer` names: `bytes`, or a file."""
    return Bytes() if wanted == "bytes" else TokenizerFile(Path(wanted))
