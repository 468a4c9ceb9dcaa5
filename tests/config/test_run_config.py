"""The text of a config is read as the data that it was made of."""

from __future__ import annotations

import pytest
import yaml

from trainer.config.run_config import yaml_text


@pytest.mark.parametrize("libyaml", [True, False])
def test_yaml_is_read_as_it_was_and_keys_keep_their_order(libyaml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not libyaml:
        monkeypatch.delattr(yaml, "CSafeDumper", raising=False)
    said = {
        "z": ["", "a: b", "word " * 60, "two\nlines", "grün", "null", "1e3", "${oc.env:X}"],
        "a": {"inf": 1e20, "no": None},
    }
    for choice in (True, False):
        text = yaml_text(said, choice)
        assert yaml.safe_load(text) == said
        assert text.index("z:") < text.index("a:") and ("grün" in text) == choice
