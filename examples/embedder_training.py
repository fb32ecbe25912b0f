"""Train the example's text embedder: python -m examples.embedder_training DIR [--steps 500]

A BERT of two layers whose vectors lie near to those of requests that a property answers. It learns from the
texts of drawn properties and from requests for them (requests.py), and sees no image and no text of others.
The same command gives the same weights on the same machine.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from examples.requests import Request, draw_request
from examples.truth import FIELDS, draw_truth, summarize
from vlm_assets.config.property_description import PropertyDescription
from vlm_durable.files.files import make_directory, write_replacing
from vlm_engine.schema import description_text

WIDTH: Final = 96
"""Numbers of a vector."""

_LAYERS, _HEADS, _INNER, _LONGEST = 2, 4, 192, 192
_PIECES: Final = r"[^\p{L}\p{N}]+"
"""Between words. JSON's marks say nothing: each would be a token."""
_SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_TEXTS, _REQUESTS = 48, 96
"""Texts and requests of a step."""
_UNUSUAL: Final = 0.5
"""Share of the texts whose fields are drawn apart, so that no field can be told from another."""
_RATE: Final = 3e-3
_SHARPNESS: Final = 0.05
"""Cosines are divided by it before the softmax."""
_PER_FIELD: Final = 3.0
"""How much less likely an answer is, in nats, for each field of the request that it does not meet."""


def draw_properties(seed: int, start: int, count: int) -> list[PropertyDescription]:
    """Drawn properties; of half of them each field is another property's."""
    rng = random.Random(f"embedder/{seed}/{start}")
    drawn = [draw_truth("training", seed, index) for index in range(start, start + 2 * count)]
    found = drawn[:count]
    for place in range(int(count * _UNUSUAL)):
        fields = {name: getattr(rng.choice(drawn), name) for name in FIELDS}
        for name in ("has_pool", "has_fireplace", "has_solar_panels"):
            fields[name] = rng.random() < 0.3
        found[place] = PropertyDescription(**fields, summary=summarize(fields))
    return found


def text_of(truth: PropertyDescription) -> str:
    """The text that is embedded, as of a published description."""
    return description_text(truth.model_dump())


def words_of(text: str) -> list[str]:
    """The words of a text, as the tokenizer takes it apart."""
    return [word for _, (_, _), word in _words(text)]


def _words(text: str) -> Iterator[tuple[int, tuple[int, int], str]]:
    from tokenizers import normalizers

    plain = normalizers.BertNormalizer(lowercase=True).normalize_str(text)
    for number, (word, place) in enumerate(_splitter().pre_tokenize_str(plain)):
        yield number, place, word


def _splitter() -> Any:
    from tokenizers import Regex, pre_tokenizers

    return pre_tokenizers.Split(Regex(_PIECES), behavior="removed")


def build_tokenizer(seed: int = 0) -> Any:
    """A WordPiece tokenizer: every word of texts and requests is a token, any other is spelled.

    Its words are counted and sorted here: the trainer of tokenizers breaks ties by chance.
    """
    from tokenizers import Tokenizer, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    rng, counts = random.Random(f"words/{seed}"), Counter[str]()
    for truth in draw_properties(seed, 0, 2000):
        counts.update(words_of(text_of(truth)))
        for _ in range(3):
            counts.update(words_of(draw_request(truth, rng).text))
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = sorted(counts, key=lambda word: (-counts[word], word))
    tokens = dict.fromkeys([*_SPECIAL, *words, *letters, *(f"##{letter}" for letter in letters)])
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(numbers, unk_token="[UNK]"))  # noqa: S106 - a token of text
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[(name, numbers[name]) for name in ("[CLS]", "[SEP]")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=_LONGEST,
        unk_token="[UNK]",  # noqa: S106 - a token of text
        pad_token="[PAD]",  # noqa: S106 - a token of text
        cls_token="[CLS]",  # noqa: S106 - a token of text
        sep_token="[SEP]",  # noqa: S106 - a token of text
        mask_token="[MASK]",  # noqa: S106 - a token of text
    )


def build_model(tokenizer: Any) -> Any:
    """The layers, with random weights."""
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=WIDTH,
            num_hidden_layers=_LAYERS,
            num_attention_heads=_HEADS,
            intermediate_size=_INNER,
            max_position_embeddings=_LONGEST,
            type_vocab_size=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            pad_token_id=tokenizer.pad_token_id,
        ),
        add_pooling_layer=True,
    )


def vectors(model: Any, tokenizer: Any, texts: Sequence[str]) -> Any:
    """Unit vectors [texts, width]: the mean of the tokens' last states."""
    import torch

    tokens = tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")
    mask = tokens["attention_mask"]
    states = model(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state
    pooled = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(pooled, dim=-1)


def loss_of(requests: Any, texts: Any, asked: Sequence[Request], truths: Sequence[Mapping[str, Any]]) -> Any:
    """How far the texts' order is from that of unmet fields, and their likeness from that of their fields.

    requests: vectors [requests, width]. texts: vectors [texts, width].
    """
    import torch

    unmet = torch.tensor([[request.unmet(truth) for truth in truths] for request in asked])
    wanted = torch.softmax(-_PER_FIELD * unmet, dim=1)
    given = torch.log_softmax(requests @ texts.T / _SHARPNESS, dim=1)
    order = torch.nn.functional.kl_div(given, wanted, reduction="batchmean")
    rows = [[str(truth[name]) for name in FIELDS] for truth in truths]
    alike = torch.tensor(
        [[sum(a == b for a, b in zip(x, y, strict=True)) / len(FIELDS) for y in rows] for x in rows]
    )
    return order + ((texts @ texts.T - alike) ** 2).mean()


def train(tokenizer: Any, *, steps: int, seed: int = 0) -> Any:
    """The trained layers."""
    import torch

    torch.manual_seed(seed)
    torch.set_num_threads(1)  # With more, the order of additions is not always the same.
    model = build_model(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=_RATE, total_steps=steps, pct_start=0.1)
    rng = random.Random(f"requests/{seed}")
    for step in range(steps):
        truths = draw_properties(seed, 10_000 + 2 * _TEXTS * step, _TEXTS)
        asked = [draw_request(truths[place % _TEXTS], rng) for place in range(_REQUESTS)]
        loss = loss_of(
            vectors(model, tokenizer, [request.text for request in asked]),
            vectors(model, tokenizer, [text_of(truth) for truth in truths]),
            asked,
            [truth.model_dump() for truth in truths],
        )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)  # noqa: T201 - for who waits
    return model.eval()


def save(folder: Path, model: Any, tokenizer: Any) -> None:
    """The files, in the layout of sentence-transformers."""
    make_directory(folder / "1_Pooling")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    kinds = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(kinds)
    ]
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    for name, content in (
        ("modules.json", modules),
        ("sentence_bert_config.json", {"max_seq_length": _LONGEST, "do_lower_case": False}),
        ("1_Pooling/config.json", pooling),
    ):
        write_replacing(folder / name, (json.dumps(content, indent=2) + "\n").encode())


def main() -> None:
    """Train it and save it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=500)
    asked = parser.parse_args()
    tokenizer = build_tokenizer()
    save(asked.folder, train(tokenizer, steps=asked.steps), tokenizer)


if __name__ == "__main__":
    main()
