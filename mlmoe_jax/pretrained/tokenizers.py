"""Turn texts into the tokens of a text tower, by the published file of its tokenizer.

The packages are in the extra `text`: tokenizers reads `tokenizer.json`, and sentencepiece reads `tokenizer.model`.
"""

import contextlib
import importlib
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from mlmoe_jax.errors import UserError
from mlmoe_jax.models.text.entry import TextEntry
from mlmoe_jax.runtime.files import damage_explained, read_bytes

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def canonical(text: str, kept: str) -> str:
    """Return a text in lower case with single spaces, and of ASCII's punctuation only `kept`. An underscore is a space.

    big_vision's zero-shot evaluator does so with templates, where `kept` is {}, and with names, where it is a comma
    (evaluators/proj/image_text/prompt_engineering.py).
    """
    parts = text.replace("_", " ").split(kept)
    words = kept.join(part.translate(_PUNCTUATION) for part in parts)
    return " ".join(words.lower().split())


def lower(text: str) -> str:
    """Return a text in lower case with single spaces, as transformers' tokenizer of TIPSv2 reads it.

    Each letter is converted on its own. So a capital sigma at the end of a word becomes σ, not ς as in `str.lower`.
    """
    letters = "".join(map(str.lower, text))
    return " ".join(letters.split())


class Tokenizer:
    """A tokenizer of texts for one text tower.

    Args:
      entry: the format of the texts and the length of the text tower.
      split: function from a text to the numbers of its tokens, without start, end and padding.
      numbers: function from the name of a special token, such as padding, to its number.
    """

    def __init__(self, entry: TextEntry, split: Callable[[str], list[int]], numbers: Callable[[str], int]):
        rules = entry.format
        self.length = entry.shape.length
        self.fixed = rules.fixed
        self._split = split
        self._start = [numbers(rules.start)] if rules.start else []
        self._end = [numbers(rules.end)] if rules.end else []
        self._padding = numbers(rules.padding)

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens i32[n,t] of n > 0 texts, and bool[n,t], False for padding.

        t is the length of the tower if the tower reads padding, and otherwise the number of tokens of the longest text.
        A text that is too long loses its last tokens, and keeps the end token; see `is_cut`.
        """
        rows = [[*self._start, *self._split(text)[: self._room()], *self._end] for text in texts]
        counts = np.array([len(row) for row in rows])
        length = self.length if self.fixed else max(counts.max(), 1)
        valid = np.arange(length) < counts[:, None]
        tokens = np.full(valid.shape, self._padding, np.int32)
        tokens[valid] = np.concatenate(rows)
        return tokens, valid

    def is_cut(self, text: str) -> bool:
        """Return whether a text has more tokens than the tower reads."""
        return len(self._split(text)) > self._room()

    def _room(self) -> int:
        """Return the largest number of tokens that a text may have, without the start and the end token."""
        return self.length - len(self._start) - len(self._end)


def open_tokenizer(path: Path, entry: TextEntry) -> Tokenizer:
    """Read the file of a text tower's tokenizer, `tokenizer.json` or `tokenizer.model`.

    Raises UserError if the file is damaged or belongs to another text tower, or if the extra `text` is not installed.
    """
    opened = _open_sentencepiece if path.suffix == ".model" else _open_json
    split, size, number = opened(path, lower_case=entry.format.lower_case)

    def require(token: str) -> int:
        found = number(token)
        if found is None:
            raise UserError(f"{path} is the tokenizer of another model: it has no token {token}")
        return found

    tokenizer = Tokenizer(entry, split, require)
    # A table may have a few rows that no token has.
    if not 0.99 * entry.shape.vocabulary <= size <= entry.shape.vocabulary:
        expected = f"{size} tokens instead of {entry.shape.vocabulary}"
        raise UserError(f"{path} is the tokenizer of another model: it has {expected}")
    return tokenizer


Opened = tuple[Callable[[str], list[int]], int, Callable[[str], int | None]]  # split, number of tokens, token -> number


def _open_json(path: Path, *, lower_case: bool) -> Opened:
    library = _import("tokenizers")
    with _panics_explained(path):
        tokenizer = library.Tokenizer.from_buffer(read_bytes(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if lower_case:  # after special tokens are found: <EOS> is text
            first = library.normalizers.Lowercase()
            tokenizer.normalizer = library.normalizers.Sequence([first, *filter(None, [tokenizer.normalizer])])

    def split(text: str) -> list[int]:
        with _panics_explained(path):
            return tokenizer.encode(text, add_special_tokens=False).ids

    return split, tokenizer.get_vocab_size(), tokenizer.token_to_id


@contextlib.contextmanager
def _panics_explained(path: Path) -> Iterator[None]:
    """Convert any error in the block to a UserError, also a panic of Rust, which is no Exception."""
    with damage_explained(path):
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError("the package tokenizers cannot use it") from error


def _open_sentencepiece(path: Path, *, lower_case: bool) -> Opened:
    library = _import("sentencepiece")
    model = library.SentencePieceProcessor()
    with damage_explained(path):
        model.load_from_serialized_proto(read_bytes(path))

    def number(token: str) -> int | None:
        found = model.piece_to_id(token)
        return found if model.id_to_piece(found) == token else None  # an unknown token has the number of <unk>

    split = (lambda text: model.encode(lower(text))) if lower_case else model.encode
    return split, model.get_piece_size(), number


def _import(package: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"labels by name need the package {package}; in the folder with pyproject.toml, run "
            'pip install -e ".[text]"'
        ) from error
