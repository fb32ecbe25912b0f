"""A cache with room: what is in it is what transformers' own would hold, and a token copies nothing else."""

import pytest


@pytest.fixture
def caches():
    """transformers' own cache of two layers after a prompt of 3 rows and 5 tokens, and one with room."""
    import torch
    from transformers.cache_utils import DynamicCache

    from vlm_engine.transformers.greedy_decoding import make_room

    torch.manual_seed(5)
    own, roomy = DynamicCache(), DynamicCache()
    for cache in (own, roomy):
        torch.manual_seed(5)
        for layer in range(2):
            cache.update(torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4), layer)
    make_room(roomy)
    return own, roomy


def step(caches, tokens=1):
    """Append to both caches, rows as they have now; nothing is there but what was appended."""
    import torch

    rows = caches[0].layers[0].keys.shape[0]
    for layer in range(2):
        keys, values = torch.randn(2, rows, 2, tokens, 4)
        appended = [cache.update(keys, values, layer) for cache in caches]
        for own, roomy in zip(*appended, strict=True):
            assert torch.equal(own, roomy)


def test_a_token_copies_no_other(caches):
    """Guards: what was computed before stays where it lies, until 64 tokens filled the room."""
    (layer, _) = caches[1].layers
    step(caches)
    places = set()
    for _ in range(63):
        step(caches)
        places.add((layer.keys.data_ptr(), layer.values.data_ptr()))
    assert len(places) == 1
    step(caches, tokens=2)
    assert (layer.keys.data_ptr(), layer.values.data_ptr()) not in places
    assert caches[1].get_seq_length() == 5 + 64 + 2


def test_whatever_is_done_to_it_it_holds_what_transformers_would(caches):
    """Guards: guesses that are cut off, rows that leave and columns in another order find no stale token."""
    import torch

    step(caches, tokens=6)
    for cache in caches:
        cache.crop(-4)
    step(caches, tokens=2)
    for cache in caches:
        cache.batch_select_indices(torch.tensor([0, 2]))
    step(caches)
    order = torch.arange(7, -1, -1).expand(2, -1)[:, None, :, None]
    for cache in caches:
        for layer in cache.layers:
            layer.keys = layer.keys.take_along_dim(order, dim=-2)
            layer.values = layer.values.take_along_dim(order, dim=-2)
    step(caches)
    step(caches, tokens=70)


def test_rows_that_left_take_no_memory(caches):
    """Guards: the room of all rows is given back with the rows, not kept beside the smaller one."""
    import torch

    step(caches)
    caches[1].batch_select_indices(torch.tensor([1]))
    assert [len(layer.rooms) for layer in caches[1].layers] == [0, 0]


def test_layers_of_another_kind_stay_as_they_are():
    """Guards: a layer that looks back over a number of columns drops tokens by itself, and has no room."""
    import torch
    from transformers import Gemma3TextConfig
    from transformers.cache_utils import DynamicCache

    from vlm_engine.transformers.greedy_decoding import make_room

    config = Gemma3TextConfig(num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention"] * 2)
    cache = DynamicCache(config=config)
    for layer in range(2):
        cache.update(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4), layer)
    kinds = [type(layer) for layer in cache.layers]
    make_room(cache)
    assert [type(layer) for layer in cache.layers] == kinds


def test_answers_are_decoded_with_it(monkeypatch):
    """Guards: the loop of our own puts it in the place of transformers' cache, and says the same."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from vlm_engine.transformers import greedy_decoding
    from vlm_engine.transformers.greedy_decoding import make_room

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
        )
    ).eval()
    roomy = []
    monkeypatch.setattr(greedy_decoding, "make_room", lambda cache: (make_room(cache), roomy.append(cache)))
    prompts = torch.randint(2, 32, (2, 6))
    decoding = greedy_decoding.GreedyDecoding(stop_token_ids=[1], pad_token_id=0, limits=[9, 9])
    asked = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": 1, "pad_token_id": 0}
    said = model.generate(prompts, custom_generate=decoding, **asked)
    assert torch.equal(said, model.generate(prompts, **asked))
    assert all(layer.rooms for layer in roomy[0].layers)
