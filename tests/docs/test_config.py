"""docs/config.md is what the code says."""

import dataclasses

import pytest

from fasttrain.recipes import RECIPES
from tests.docs.settings_page import COMMAND, PAGE, page, sections, settings_of


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), f"docs/config.md is not what the code says; to update it: {COMMAND}"


@pytest.mark.parametrize("section", [section for _, section in sections()], ids=lambda section: section.__name__)
def test_every_setting_says_what_it_means(section):
    settings = settings_of(section)
    kept = [field.name for field in dataclasses.fields(section) if not dataclasses.is_dataclass(field.default_factory)]
    assert [setting.name for setting in settings] == kept
    assert [setting.name for setting in settings if not setting.meaning] == [], "give it a docstring"


def test_every_setting_and_recipe_is_on_the_page():
    text = page()
    for name, section in sections():
        for setting in settings_of(section):
            assert f"\n- `{f'{name}.{setting.name}'.removeprefix('.')}` (" in text
    assert all(text.count(f"\n- `{name}`: ") == 1 for name in RECIPES)
