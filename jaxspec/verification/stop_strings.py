"""Stop strings: an automaton over the tokens of a tokenizer, built on the host.

Texts are compared as UTF-8 bytes, which is the same as comparing characters, so that a character that spans tokens is
no special case. An Aho-Corasick automaton reads bytes; reading all bytes of a token from each of its states gives the
one that reads tokens. Worked example, string "ab", tokens "a", "b", "ba": state 1 has seen nothing, state 2 an "a".

              a    b        ba
    state 1   2    1        2
    state 2   2    found    found     both complete "ab"; what follows in the token plays no part
"""

import dataclasses
import json
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import tokenizers

from jaxspec.errors import InputError
from jaxspec.verification.stopping import StopMatcher

_MOST_STATES = 2048  # about one for each byte of the strings
_MOST_CELLS = 2**25  # of the table, 64 MB


class StopStrings:
    """Texts that end a request when its completion comes to hold one.

    A completion is kept up to and including the token that completes the string, whatever follows it in that token.
    The string must lie in the completion as a whole: what the prompt ends in is not looked at. Special tokens have no
    text, so they neither belong to a string nor break one. If one token completes several strings, the one that ends
    first is told, and of those that end together the longest.

    Args:
      tokenizer: of the target, byte-level as that of every embedded model and most public ones.
      strings: the texts, the same for every request; or a sequence of texts for each prompt, which may be empty.

    Attributes:
      strings: every text once, in the order in which a matcher numbers them.

    Raises:
      InputError: an empty text, one that is a special token, another kind of tokenizer, or texts whose automaton would
        be too large.

    Example:
      >>> import jaxspec
      >>> target = jaxspec.load_model("target")
      >>> result = jaxspec.generate(
      ...     target.model, jaxspec.Params(target.params), [target.encode("import os\\nimport sys\\nimport")],
      ...     max_new_tokens=32, stop_strings=StopStrings(target.tokenizer, ["\\n\\n", "import"]))
      >>> result.requests[0].finish_reason, result.requests[0].stop_string
      ('stop_string', 'import')
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, strings: str | Sequence[str] | Sequence[Sequence[str]]):
        if isinstance(strings, str):
            strings = [strings]
        shared = not any(isinstance(each, list | tuple) for each in strings)
        groups = (
            [list(strings)]
            if shared
            else [list(each) if isinstance(each, list | tuple) else [each] for each in strings]
        )
        for text in (text for group in groups for text in group):
            _check(text, tokenizer)
        self._groups = groups
        self._shared = shared
        self.strings = tuple(dict.fromkeys(text for group in groups for text in group))
        self._column, self._table, self._starts = _build(_token_bytes(tokenizer), groups, self.strings)

    def matcher(self, num_prompts: int, rows: int, vocab_size: int) -> StopMatcher:
        """The automaton on the device, before the first token.

        Args:
          num_prompts: prompts of the batch, in request rows 1, 2, ..
          rows: R, request rows, the sink row included.
          vocab_size: V of the target; ids that the tokenizer does not have are tokens without a text.

        Raises:
          InputError: strings were given for another number of prompts, or the tokenizer has more ids than the target.
        """
        starts = self._starts * num_prompts if self._shared else self._starts
        if len(starts) != num_prompts:
            raise InputError(f"stop strings for {len(starts)} prompts, but there are {num_prompts}")
        if len(self._column) - 1 > vocab_size:
            raise InputError(
                f"the tokenizer has {len(self._column) - 1} ids but the target {vocab_size}: stop strings need the "
                "target's own tokenizer"
            )
        column = np.full(vocab_size, self._column[-1], np.int32)
        column[: len(self._column) - 1] = self._column[:-1]
        state = np.zeros(rows, np.int32)
        state[1 : 1 + num_prompts] = starts
        return StopMatcher(jnp.asarray(column), jnp.asarray(self._table), jnp.asarray(state))

    def of(self, num_prompts: int) -> list[list[str]]:
        """The texts of each of so many prompts."""
        return self._groups * num_prompts if self._shared else self._groups

    def found(self, state: int) -> str | None:
        """The text that a matcher's state says is complete, None if it says of none."""
        index = state - len(self._table)
        return self.strings[index] if index >= 0 else None


@dataclasses.dataclass(frozen=True)
class _TokenBytes:
    """Bytes of every token, column by column: of the i-th byte only the tokens that have one, the longest first.

    Attributes:
      order: int[n], token of each place.
      columns: for each byte position uint8[m], the bytes of the first m tokens of `order`.
    """

    order: np.ndarray
    columns: list[np.ndarray]

    def walk(self, delta: np.ndarray, state: int) -> np.ndarray:
        """State after each token, all read from one state: int32[n] in the order of ids."""
        states = np.full(len(self.order), state, np.int32)
        for column in self.columns:
            states[: len(column)] = delta[states[: len(column)], column]
        by_id = np.empty_like(states)
        by_id[self.order] = states
        return by_id


def _token_bytes(tokenizer: tokenizers.Tokenizer) -> _TokenBytes:
    """The tokenizer's vocabulary as bytes, and behind it a token without any."""
    settings = json.loads(tokenizer.to_str())
    decoder = settings.get("decoder") or {}
    kinds = [part.get("type") for part in decoder.get("decoders", [decoder])]
    if kinds != ["ByteLevel"]:
        raise InputError(
            f"stop strings need a byte-level tokenizer; this one decodes by {', '.join(map(str, kinds))}: decode the "
            "completions and cut them, or stop at ids"
        )
    special = {token["id"] for token in settings["added_tokens"] if token["special"]}
    size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    texts = [None if i in special else tokenizer.id_to_token(i) for i in range(size)]
    tokens = [b"" if text is None else _spelled(text) for text in texts] + [b""]
    order = np.array(sorted(range(len(tokens)), key=lambda i: -len(tokens[i])), np.int64)
    columns = []
    for place in range(len(tokens[order[0]])):
        longer = [tokens[i][place] for i in order if len(tokens[i]) > place]
        columns.append(np.array(longer, np.uint8))
    return _TokenBytes(order, columns)


def _alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable bytes stand for themselves, the others, in their order,
    for the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _spelled(token: str) -> bytes:
    """The bytes that a token of a byte-level vocabulary stands for. An added token may hold other characters; it is
    plain text then."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _check(text: str, tokenizer: tokenizers.Tokenizer) -> None:
    """Raises InputError for a text that no completion can come to hold."""
    if not isinstance(text, str):
        raise InputError(f"stop string {text!r} is a {type(text).__name__}: give a string")
    if not text:
        raise InputError("a stop string is empty: give at least one character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputError(f"stop string {text!r} holds half a character: write it as UTF-8") from None
    added = tokenizer.get_added_tokens_decoder()
    special = [i for i, token in added.items() if token.special and token.content == text]
    if special:
        raise InputError(f"stop string {text!r} is a special token, which has no text: stop at its id {special[0]}")


def _automaton(patterns: Sequence[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Aho-Corasick over bytes: (delta int32[n, 256], output int32[n], the pattern that is complete in a state, or -1).

    State 0 is the start. A state with an output is not left.
    """
    children: list[dict[int, int]] = [{}]
    output = [-1]
    for index, pattern in enumerate(patterns):
        node = 0
        for byte in pattern:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                output.append(-1)
            node = children[node][byte]
        output[node] = index
    delta = np.zeros((len(children), 256), np.int32)
    # Level by level: the longest proper suffix of a node is a node of a level before, whose row is complete.
    level = [(child, byte, 0, 0) for byte, child in children[0].items()]
    for child, byte, _, _ in level:
        delta[0, byte] = child
    while level:
        below = []
        for node, _, _, suffix in level:
            if output[node] < 0:
                output[node] = output[suffix]
            delta[node] = delta[suffix]
            for byte, child in children[node].items():
                below.append((child, byte, node, int(delta[suffix, byte])))
                delta[node, byte] = child
        level = below
    output = np.array(output, np.int32)
    complete = np.flatnonzero(output >= 0)
    delta[complete] = complete[:, None]
    return delta, output


def _build(
    tokens: _TokenBytes, groups: Sequence[Sequence[str]], strings: Sequence[str]
) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Automata of all groups side by side: (column int32[n], of each token; table uint16[S, K]; start of each group).

    Both dimensions of the table are rounded up to powers of two, so that other strings of that size run in the same
    compiled programs.
    """
    number = {text: i for i, text in enumerate(strings)}
    rows, starts = [np.zeros(len(tokens.order), np.int16)], {frozenset(): 0}
    for group in groups:
        key = frozenset(group)
        if key in starts:
            continue
        patterns = sorted(key)
        total = len(rows) + sum(len(text.encode()) for text in patterns)
        if total > _MOST_STATES:
            raise InputError(
                f"stop strings of {total} bytes in all, those of every different set counted: at most {_MOST_STATES} "
                "fit the table; give fewer or shorter ones"
            )
        delta, output = _automaton([text.encode() for text in patterns])
        inner = np.flatnonzero(output < 0)
        name = np.empty(len(output), np.int16)
        name[inner] = len(rows) + np.arange(len(inner))
        name[output >= 0] = [-1 - number[patterns[i]] for i in output[output >= 0]]  # until S is known
        starts[key] = len(rows)
        rows += [name[tokens.walk(delta, state)] for state in inner]

    size = _rounded(len(rows), 16)
    column, firsts = np.zeros(len(tokens.order), np.int64), np.zeros(1, np.int64)  # a token of each column
    for row in rows:
        if (row != row[firsts][column]).any():
            pairs = column * (2 * _MOST_STATES) + row
            _, firsts, column = np.unique(pairs, return_index=True, return_inverse=True)
    width = _rounded(len(firsts), 64)
    if size * width > _MOST_CELLS:
        raise InputError(
            f"stop strings need a table of {size} states and {width} kinds of token, more than {_MOST_CELLS} entries: "
            "give fewer or shorter ones"
        )
    table = np.zeros((size, width), np.uint16)
    for state, row in enumerate(rows):
        entries = row[firsts].astype(np.int32)
        table[state, : len(firsts)] = np.where(entries < 0, size - 1 - entries, entries)
    return column.astype(np.int32), table, [starts[frozenset(group)] for group in groups]


def _rounded(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())
