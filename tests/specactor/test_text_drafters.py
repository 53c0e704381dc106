from refrain.engines.specactor.text_drafters import TEXT_DRAFTERS
from refrain.schemas import drafting


def test_settings_name_the_drafters_that_exist() -> None:
    assert tuple(TEXT_DRAFTERS) == drafting.TEXT_DRAFTERS
