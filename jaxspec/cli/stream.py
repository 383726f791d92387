"""Shows completions as they come, each in one piece."""

from collections.abc import Callable, Sequence

from jaxspec.cli.prompts import Prompt
from jaxspec.cli.screen import Screen

_PROMPT_LINES = 4  # of the end of a prompt, shown above its completion

Decode = Callable[[Sequence[int]], str]


class TextStream:
    """Text of a growing list of token ids.

    A token may end within a character, and the bytes so far then decode to U+FFFD; such an ending is held back until
    the next ids complete it or `end` says that none will come.

    Args:
      decode: text of a list of ids.

    Example:
      >>> stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"))
      >>> stream.push([104, 195]), stream.push([169]), stream.end()
      ('h', 'é', '')
    """

    def __init__(self, decode: Decode):
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0

    def push(self, ids: Sequence[int]) -> str:
        """Takes more ids and returns the text that is certain now."""
        self._ids += ids
        return self._advance(self._decode(self._ids).rstrip("\ufffd"))

    def end(self) -> str:
        """The text that was held back."""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        new, self._shown = text[self._shown :], max(self._shown, len(text))
        return new


class Completions:
    """Prints completions in the order of their prompts.

    The first unfinished request is printed line by line while its tokens arrive. What arrives for later ones waits
    until those before have ended, so that the output of a batch reads as if requests ran one after another.

    Args:
      screen: where to.
      prompts: all prompts, encoded.
      decode: text of ids; None if the model has no tokenizer, ids are printed then.
      notes: for each prompt what its heading says besides; nothing by default.
    """

    def __init__(
        self, screen: Screen, prompts: Sequence[Prompt], decode: Decode | None, notes: Sequence[str] | None = None
    ):
        self._screen, self._prompts, self._decode = screen, prompts, decode
        self._notes = [""] * len(prompts) if notes is None else notes
        self._streams = [TextStream(decode or _spell) for _ in prompts]
        self._waiting = [""] * len(prompts)  # text that has not been printed
        self._ended = [False] * len(prompts)
        self._front, self._begun = 0, False

    def add(self, index: int, ids: Sequence[int]) -> None:
        """Takes new tokens of a request."""
        self._waiting[index] += self._streams[index].push(ids)
        self._print()

    def end(self, index: int) -> None:
        """No more tokens will come for a request; saying so twice is harmless."""
        if not self._ended[index]:
            self._waiting[index] += self._streams[index].end()
            self._ended[index] = True
            self._print()

    def _print(self) -> None:
        while self._front < len(self._prompts):
            index = self._front
            whole, line_feed, rest = self._waiting[index].rpartition("\n")
            ready = whole + line_feed
            if self._ended[index]:
                ready, rest = ready + rest + "\n" * bool(rest) + "\n", ""
            if ready and not self._begun:
                ready, self._begun = self._title(index) + ready, True
            if ready:
                self._screen.write(ready)
            self._waiting[index] = rest
            if not self._ended[index]:
                return
            self._front, self._begun = self._front + 1, False

    def _title(self, index: int) -> str:
        """A heading, the end of the prompt behind bars, and an arrow where the completion begins."""
        prompt, note = self._prompts[index], self._notes[index]
        text = prompt.text.rstrip() if prompt.text is not None else (self._decode or _spell)(prompt.token_ids)
        lines = text.split("\n")
        cut = ["| ..."] if len(lines) > _PROMPT_LINES else []
        shown = [f"| {line[-110:]}" for line in lines[-_PROMPT_LINES:]]
        return "\n".join(
            [f"== {prompt.id}: {len(prompt.token_ids)} prompt tokens{note and ', '}{note}", *cut, *shown, "-> ", ""]
        ).removesuffix("\n")


def _spell(ids: Sequence[int]) -> str:
    return "".join(f"{i} " for i in ids)
