"""Admission: every cell of the table, the exact words of every denial, and names that are not in it."""

import itertools
import re

import pytest

import jaxspec
from jaxspec.steps.admission import Admission, admit

ALGORITHMS = ("none", "ngram", "draft_lm", "dspark", "dflash", "eagle", "mtp")
ATTENTIONS = ("reference", "triton", "mosaic")
KINDS = [
    kinds for count in (1, 2, 3) for kinds in itertools.combinations(("full", "swa", "state"), count) if "full" in kinds
]

# What a unified pool grants, a cell for each algorithm and attention: "." always, "c" chains only, "f" only if the
# draft fuses, "s" the same where the target has states, "x" never.
UNIFIED = """
              reference  triton  mosaic
    none          .        .       .
    ngram         .        .       .
    draft_lm      .        .       .
    dspark        c        c       c
    dflash        s        s       x
    eagle         f        f       x
    mtp           f        f       x
"""
CELLS = {
    (algorithm, attention): cell
    for algorithm, *cells in (line.split() for line in UNIFIED.strip().splitlines()[1:])
    for attention, cell in zip(ATTENTIONS, cells, strict=True)
}


def wanted(algorithm, memory, attention, kinds, mla, kpool, topology, fuses):
    if kpool and topology == "tree":
        return False
    if memory == "static":
        return True
    if mla and "swa" in kinds:
        return False
    chain, beside_states = topology == "chain", fuses or "state" not in kinds
    return {".": True, "c": chain, "f": fuses, "s": beside_states, "x": False}[CELLS[algorithm, attention]]


@pytest.mark.parametrize("memory", ["static", "unified"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_cell(algorithm, memory):
    """All of a row: attention, kinds of layer, MLA, KPool, topology, fusion. A denial has words, an admission none."""
    seen = set()
    for attention, kinds, mla, kpool, topology, fuses in itertools.product(
        ATTENTIONS, KINDS, (False, True), (False, True), ("chain", "tree"), (False, True)
    ):
        cell = (attention, kinds, mla, kpool, topology, fuses)
        answer = admit(
            algorithm,
            memory=memory,
            attention=attention,
            kinds=kinds,
            mla=mla,
            kpool=kpool,
            topology=topology,
            fuses=fuses,
        )
        assert answer.admitted == wanted(algorithm, memory, *cell), cell
        assert answer.admitted == (answer.reason == "") == bool(answer), cell
        assert "\n" not in answer.reason
        seen.add(answer.admitted)
    assert seen == {True, False}


def test_every_cell_is_in_the_table():
    assert set(CELLS) == set(itertools.product(ALGORITHMS, ATTENTIONS))


def attention_denied(algorithm):
    return (
        f"attention='mosaic': algorithm='{algorithm}' on memory='unified' runs with 'reference' or 'triton'; choose "
        "one of them, or memory='static'"
    )


def unfused(algorithm):
    return (
        f"fuses=False: algorithm='{algorithm}' on memory='unified' keeps the draft's K and V in the target's entries; "
        "store the draft's layers there, or choose memory='static'"
    )


TREE_OF_POOLS = (
    "topology='tree' with kpool=True: accepted rows of a tree move to their places in the sequence, and a compressed "
    "key, which is made of neighbours, cannot move; choose topology='chain'"
)
MLA_WINDOWS = (
    "mla=True with kinds=('full', 'swa'): a unified pool takes no model with MLA beside sliding-window layers; choose "
    "memory='static'"
)
MLA_ALL = (
    "mla=True with kinds=('full', 'swa', 'state'): a unified pool takes no model with MLA beside sliding-window and "
    "recurrent layers; choose memory='static'"
)
DENIALS = [
    *(({"algorithm": name, "attention": "mosaic"}, attention_denied(name)) for name in ("dflash", "eagle", "mtp")),
    *(({"algorithm": name, "fuses": False}, unfused(name)) for name in ("eagle", "mtp")),
    (
        {"algorithm": "dflash", "fuses": False, "kinds": ("state", "full"), "declined": "a row has 8 bytes"},
        "fuses=False: algorithm='dflash' on memory='unified' keeps the draft's K and V in the target's entries of a "
        "target with states, kinds=('full', 'state') (a row has 8 bytes); store the draft's layers there, or choose "
        "memory='static'",
    ),
    (
        {"algorithm": "dspark", "topology": "tree"},
        "topology='tree': algorithm='dspark' on memory='unified' verifies chains only; choose topology='chain', or "
        "memory='static'",
    ),
    ({"algorithm": "ngram", "mla": True, "kinds": ("full", "swa")}, MLA_WINDOWS),
    ({"algorithm": "none", "mla": True, "kinds": ["state", "swa", "full"]}, MLA_ALL),
    ({"algorithm": "eagle", "kpool": True, "topology": "tree"}, TREE_OF_POOLS),
    ({"algorithm": "ngram", "kpool": True, "topology": "tree", "memory": "static"}, TREE_OF_POOLS),
    # Several at once: the most general comes first.
    (
        {"algorithm": "mtp", "kpool": True, "topology": "tree", "mla": True, "kinds": ("full", "swa"), "fuses": False},
        TREE_OF_POOLS,
    ),
    ({"algorithm": "eagle", "mla": True, "kinds": ("full", "swa"), "attention": "mosaic"}, MLA_WINDOWS),
    ({"algorithm": "eagle", "attention": "mosaic", "fuses": False}, attention_denied("eagle")),
]


@pytest.mark.parametrize(("arguments", "words"), DENIALS)
def test_words_of_denials(arguments, words):
    answer = admit(**arguments)
    assert answer == Admission(False, words)
    with pytest.raises(jaxspec.InputError) as raised:
        answer.require()
    assert str(raised.value) == words


@pytest.mark.parametrize(("arguments", "words"), DENIALS)
def test_the_way_out_is_one(arguments, words):
    """What a denial tells to choose is admitted, or denied by the next rule in words of its own."""
    choice = re.search(r"(topology|memory)='(chain|static)'$", words)
    answer = admit(**{**arguments, choice[1]: choice[2]})
    assert answer.reason != words
    if len(arguments) < 4:
        assert answer.admitted


def test_admission_requires_nothing_more():
    assert admit("ngram").require() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"algorithm": "medusa"},
            "algorithm='medusa': must be 'none', 'ngram', 'draft_lm', 'dspark', 'dflash', 'eagle' or 'mtp'",
        ),
        ({"algorithm": None}, "algorithm=None: must be 'none', 'ngram', .*"),
        ({"memory": "paged"}, "memory='paged': must be 'static' or 'unified'"),
        ({"attention": "fa4"}, "attention='fa4': must be 'reference', 'triton' or 'mosaic'"),
        ({"topology": "star"}, "topology='star': must be 'chain' or 'tree'"),
        (
            {"kinds": ("full", "mamba")},
            r"kinds=\('full', 'mamba'\): must hold one or more of 'full', 'swa' and 'state'",
        ),
        ({"kinds": ()}, r"kinds=\(\): must hold one or more of 'full', 'swa' and 'state'"),
        ({"kinds": "full"}, "kinds='full': must hold one or more of 'full', 'swa' and 'state'"),
    ],
)
def test_unknown_names_list_the_choices(arguments, words):
    with pytest.raises(jaxspec.InputError, match=f"^{words}$"):
        admit(**{"algorithm": "ngram", **arguments})
