"""Marks on ids: using one in a space it does not belong to is an error while the step is traced, and costs nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import make_step, prompt

import jaxspec
from jaxspec.metadata import Ids, verify_metadata
from jaxspec.steps import run_round


@pytest.fixture(scope="module", params=["static", "unified"])
def step(request):
    return make_step("draft_lm", batch=2, new=8, memory=request.param, check_ids=True)


def initial(spec):
    return jaxspec.init_state(spec.target, spec.drafter, spec.config, [prompt(9), prompt(21)])


def planned(spec):
    """State and plan after `prepare`, traced only."""
    return jax.eval_shape(lambda: jaxspec.prepare(spec, initial(spec)))


def test_a_step_that_uses_every_id_where_it_belongs_compiles_to_the_same_program(step):
    spec, params = step
    plain = dataclasses.replace(spec, config=dataclasses.replace(spec.config, check_ids=False))
    state = jax.eval_shape(lambda: initial(spec))
    programs = [jax.jit(run_round, static_argnums=0).lower(s, params, state).as_text() for s in (spec, plain)]
    assert programs[0] == programs[1]


def test_marks_name_the_space_of_what_a_builder_makes(step):
    _, plan = planned(step[0])
    metadata = plan.metadata
    spaces = [metadata.window.virtual_loc, metadata.window.full_loc, metadata.window.swa_loc]
    assert [ids.space for ids in spaces] == ["virtual", "full", "swa"]
    assert (metadata.page_table.space, metadata.swa_page_table.space) == ("full", "swa")
    assert not isinstance(metadata.window.positions, Ids)


WRONG = {
    "written where virtual ids say": lambda w, m: (w.replace(full_loc=w.virtual_loc), m),
    "FULL rows at SWA locations": lambda w, m: (w.replace(full_loc=w.swa_loc), m),
    "SWA rows at FULL locations": lambda w, m: (w.replace(swa_loc=w.full_loc), m),
    "SWA layers read by the FULL table": lambda w, m: (w, m.replace(swa_page_table=m.page_table)),
    "the FULL table not translated": lambda w, m: (w, m.replace(page_table=Ids(m.page_table.value, "virtual"))),
}


@pytest.mark.parametrize("how", WRONG)
def test_ids_of_another_space_are_refused(step, how):
    spec, params = step
    state, plan = planned(spec)
    state, drafts = jax.eval_shape(lambda *rest: jaxspec.draft(spec, *rest), params, state, plan)
    window, metadata = WRONG[how](plan.metadata.window, plan.metadata)
    wrong = plan.replace(metadata=metadata.replace(window=window))
    with pytest.raises(TypeError, match="translate virtual ids once, by the map of their kind"):
        jax.eval_shape(lambda *rest: jaxspec.verify(spec, *rest), params, state, wrong, drafts)


def test_translating_twice_is_refused(step):
    spec, _ = step
    state, plan = planned(spec)
    with pytest.raises(TypeError, match="ids are 'full' where 'virtual' ones are needed"):
        jax.eval_shape(
            functools.partial(verify_metadata, page_size=4, limit=spec.config.context_len),
            plan.seq_lens,
            plan.req_rows,
            plan.metadata.page_table,
            state.pages.v2p,
            plan.anchor,
            state.metadata,
        )


def test_hand_made_tables_without_marks_pass():
    ids = jnp.array([1, 2])
    assert jaxspec.metadata.ids.unmarked(ids, "full") is ids
    np.testing.assert_array_equal(jaxspec.metadata.ids.unmarked(Ids(ids, "swa"), "swa"), ids)
