import pytest

from fasttrain.cli.parse import load
from fasttrain.config import Config
from fasttrain.flops import num_parameters
from fasttrain.recipes import RECIPES

# Published sizes where there are some, otherwise what the name says: parameters, and how exactly.
SIZES = {
    "pico-tiny": (6.5e6, 0.02),
    "300m": (300e6, 0.03),
    "124m": (124e6, 0.01),
    "124m-continued": (124e6, 0.01),
    "550m": (550e6, 0.01),
    "llama2-7b": (6_738_415_616, 0),
    "llama2-13b": (13_015_864_320, 0),
    "llama2-70b": (68_976_648_192, 0),
    "qwen3-0.6b": (596_049_920, 0),
    "qwen3-1b": (1e9, 0.03),
    "qwen3-8b": (8_190_735_360, 0),
}


def test_tiny_is_the_default():
    assert next(iter(RECIPES)) == "tiny"
    assert load([], RECIPES) == RECIPES["tiny"]()


@pytest.mark.parametrize("name", SIZES)
def test_a_recipe_has_the_size_that_its_name_states(name):
    model = RECIPES[name]().model
    stated, tolerance = SIZES[name]
    assert num_parameters(model, model.vocab).total == pytest.approx(stated, rel=tolerance or 1e-12)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_whole_run_of_its_own_directory(name):
    config = RECIPES[name]()
    assert isinstance(config, Config)
    assert config.out.name == name
    assert load(["--recipe", name], RECIPES) == config


def test_the_300m_run_sees_the_tokens_that_were_meant():
    config = RECIPES["300m"]()
    assert config.batch.steps * config.batch.sequences * config.data.sequence == pytest.approx(12.8e9, rel=0.01)


def test_the_continuation_differs_from_its_base_only_where_it_was_meant_to():
    base, continued = RECIPES["124m"](), RECIPES["124m-continued"]()
    assert continued.model == base.model
    assert (continued.optim.lr, continued.optim.schedule) == (1e-5, "constant")
    assert continued.data.sequence * 2 == base.data.sequence
    assert continued.batch.sequences == 2 * base.batch.sequences
