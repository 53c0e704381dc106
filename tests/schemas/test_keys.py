"""Keys of prompts and samples. They must never change, and every part of a sample's name must
affect its noise."""

from refrain.schemas.keys import prompt_key, sample_key, variant_key

SAMPLE = {"seed": 0, "step": 1, "split": "train", "prompt": "a", "sample_index": 0}
OTHERS = {"seed": 1, "step": 2, "split": "validation", "prompt": "b", "sample_index": 1}


def test_every_part_of_a_samples_name_changes_its_noise():
    keys = {sample_key(**SAMPLE | {name: other}) for name, other in OTHERS.items()}
    assert len(keys | {sample_key(**SAMPLE)}) == len(OTHERS) + 1


def test_noise_is_the_same_in_every_release():
    assert sample_key(**SAMPLE) == 8093565261611435192
    assert sample_key(**SAMPLE | {"step": 2}) == 8012333270794086526


def test_prompts_have_the_same_keys_in_every_release():
    assert prompt_key((1, 3, 2)) == "10b98703daa0acca09b2e1aa1f97c5e8"
    assert variant_key(prompt_key((1, 3, 2)), "a") == "67c29ce57a6432128fe594208e4f3e29"
