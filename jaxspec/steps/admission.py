"""Which algorithm may run where: a table over static descriptions, with the reason in words.

    algorithm                unified memory: attention       and                  static memory
    none, ngram, draft_lm    reference, triton, mosaic                            all
    dspark                   reference, triton, mosaic       chains only          all
    dflash                   reference, triton               beside states        all
                                                             the draft fuses
    eagle, mtp               reference, triton               the draft fuses      all

Whatever the algorithm, a unified pool takes no model with MLA beside sliding-window layers, and neither memory takes
trees over compressed keys (KPool). "mosaic" is the attention that walks a fixed grid and so may fetch table entries
past a row's end; in the table it takes the place of FlashAttention 4.

Source: SGLang's admission of speculative algorithms on unified memory (0.5.23), with the attention kinds of this
library. Wider than there, and ours alone: plain decoding, prompt lookup and a draft model, which SGLang does not admit
on unified memory or admits for hybrid models only. They write what any decode writes, through tables that are rebuilt
every round, so they run with every attention kind and every model.
"""

import dataclasses
from collections.abc import Collection
from typing import NamedTuple

from jaxspec.cache.layout import KINDS
from jaxspec.config import MEMORIES
from jaxspec.errors import InputError

ATTENTIONS = ("reference", "triton", "mosaic")
TOPOLOGIES = ("chain", "tree")


class Terms(NamedTuple):
    """On what terms a unified pool takes an algorithm.

    Attributes:
      attentions: the attention kinds that the target's verify may run with.
      chain_only: whether drafts must form a chain.
      must_fuse: whether the draft's K and V must be lanes of the target's entries: "always", "states", which is where
        the target has some, or "never".
    """

    attentions: tuple[str, ...] = ATTENTIONS
    chain_only: bool = False
    must_fuse: str = "never"


_NOT_FIXED_GRID = ("reference", "triton")
UNIFIED_TERMS = {
    "none": Terms(),
    "ngram": Terms(),
    "draft_lm": Terms(),
    "dspark": Terms(chain_only=True),
    "dflash": Terms(_NOT_FIXED_GRID, must_fuse="states"),
    "eagle": Terms(_NOT_FIXED_GRID, must_fuse="always"),
    "mtp": Terms(_NOT_FIXED_GRID, must_fuse="always"),
}
ALGORITHMS = tuple(UNIFIED_TERMS)


@dataclasses.dataclass(frozen=True)
class Admission:
    """Whether a combination may run. True or False where a condition is wanted.

    Attributes:
      admitted: the answer.
      reason: empty if admitted; otherwise one line that names the argument, its value, the rule it breaks and the way
        out.
    """

    admitted: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.admitted

    def require(self) -> None:
        """Raises InputError with the reason, unless admitted."""
        if not self.admitted:
            raise InputError(self.reason)


def _names(choices: Collection[str], last: str = "or") -> str:
    *others, final = map(repr, choices)
    return f"{', '.join(others)} {last} {final}" if others else final


def _denial(algorithm, memory, attention, kinds, mla, kpool, topology, fuses, declined) -> str:
    """The reason against known names, the most general first; empty if there is none."""
    if kpool and topology == "tree":
        return (
            "topology='tree' with kpool=True: accepted rows of a tree move to their places in the sequence, and a "
            "compressed key, which is made of neighbours, cannot move; choose topology='chain'"
        )
    if memory == "static":
        return ""
    if mla and "swa" in kinds:
        others = "sliding-window and recurrent layers" if "state" in kinds else "sliding-window layers"
        return (
            f"mla=True with kinds={kinds}: a unified pool takes no model with MLA beside {others}; "
            "choose memory='static'"
        )
    terms, runs = UNIFIED_TERMS[algorithm], f"algorithm={algorithm!r} on memory='unified'"
    if attention not in terms.attentions:
        return (
            f"attention={attention!r}: {runs} runs with {_names(terms.attentions)}; choose one of them, or "
            "memory='static'"
        )
    if terms.chain_only and topology != "chain":
        return f"topology={topology!r}: {runs} verifies chains only; choose topology='chain', or memory='static'"
    if not fuses and (terms.must_fuse == "always" or (terms.must_fuse == "states" and "state" in kinds)):
        beside = "" if terms.must_fuse == "always" else f" of a target with states, kinds={kinds}"
        return (
            f"fuses=False: {runs} keeps the draft's K and V in the target's entries{beside}"
            f"{f' ({declined})' if declined else ''}; store the draft's layers there, or choose memory='static'"
        )
    return ""


def admit(
    algorithm: str,
    *,
    memory: str = "unified",
    attention: str = "reference",
    kinds: Collection[str] = ("full",),
    mla: bool = False,
    kpool: bool = False,
    topology: str = "chain",
    fuses: bool = True,
    declined: str = "",
) -> Admission:
    """Whether an algorithm may run with a memory, an attention kind and a model. A pure function of names and flags.

    Args:
      algorithm: who drafts: "none", "ngram", "draft_lm", "dspark", "dflash", "eagle" or "mtp".
      memory: "static" or "unified".
      attention: who runs the target's attention: "reference", "triton" or "mosaic".
      kinds: the kinds of page that the model's layers are kept in, as `PoolLayout.kinds`: of "full", "swa" and "state".
      mla: whether the full-attention layers keep compressed rows (multi-head latent attention).
      kpool: whether attention selects by keys that each stand for a few neighbouring tokens.
      topology: what a verify's rows form, "chain" or "tree".
      fuses: whether the draft's K and V can be lanes of the target's entries. Of no account for an algorithm without
        any.
      declined: why they cannot, to be said where that is the reason.

    Returns:
      An `Admission`. Where several rules are broken the reason is the most general one's: trees over compressed keys,
      then MLA beside windows, then attention, topology and fusion.

    Raises:
      InputError: a name is not among the choices, which the message lists.

    Source: SGLang's unified memory admission; "none", "ngram" and "draft_lm" are wider than there, see the module.

    Example:
      >>> bool(admit("dflash", attention="triton", kinds=("full", "swa")))
      True
      >>> print(admit("dflash", attention="mosaic").reason)
      attention='mosaic': algorithm='dflash' on memory='unified' runs with 'reference' or 'triton';
      choose one of them, or memory='static'
    """
    for name, value, choices in (
        ("algorithm", algorithm, ALGORITHMS),
        ("memory", memory, MEMORIES),
        ("attention", attention, ATTENTIONS),
        ("topology", topology, TOPOLOGIES),
    ):
        if value not in choices:
            raise InputError(f"{name}={value!r}: must be {_names(choices)}")
    if isinstance(kinds, str) or not kinds or set(kinds) - set(KINDS):
        raise InputError(f"kinds={kinds!r}: must hold one or more of {_names(KINDS, 'and')}")
    kinds = tuple(kind for kind in KINDS if kind in kinds)
    reason = _denial(algorithm, memory, attention, kinds, mla, kpool, topology, fuses, declined)
    return Admission(not reason, reason)
