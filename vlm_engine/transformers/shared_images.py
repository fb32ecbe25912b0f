"""Several questions about the images of one batch, of which the model sees each once.

A prompt is images and then text, so the prompts of all questions begin alike. This module has what the model
keeps of a batch's images: the keys, values and states of its layers after the shared beginning. Each question
goes on from a copy of it. The endings of the prompts are learnt in collation.py.
Terms: prefix caching; chunked prefill. Whether a model computes the same numbers in two parts is tried in
transformers_engine.py.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from vlm_engine.transformers.greedy_decoding import PER_ROW
from vlm_engine.transformers.model_inputs import ModelInputs

if TYPE_CHECKING:
    import torch

    from vlm_engine.images.images import LoadedProperty
    from vlm_engine.transformers.collation import Endings


class SharedBeginning:
    """What the model has computed of the beginning of a batch's prompts.

    ending: tokens that follow it in the prompt of the question that is asked.
    """

    def __init__(self, ending: int) -> None:
        self.ending = ending
        self._cache: Any = None
        self._positions: torch.Tensor | None = None
        """Of the beginning and of one token more [..., rows or 1, tokens]."""

    @property
    def is_computed(self) -> bool:
        """Whether other questions can go on from it."""
        return self._cache is not None

    def inputs_after(self, model: Any, input_ids: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """The model's inputs for the ending; the beginning is computed where it is not yet.

        input_ids: whole prompts [rows, tokens]. arguments: of ``generate``'s decoding; they get a copy of the
        state, and positions.
        """
        import torch

        if self._cache is None:
            self._compute(model, input_ids, arguments)
        arguments["past_key_values"] = _copied(self._cache)
        if (begun := self._positions) is not None:
            steps = torch.arange(1, self.ending, device=begun.device)
            arguments["position_ids"] = torch.cat([begun, begun[..., -1:] + steps], dim=-1)
        inputs: dict[str, Any] = model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=self.ending, **arguments
        )
        return inputs

    def of_rows(self, rows: Sequence[int], all_rows: int, ending: int) -> Self:
        """The same of these rows, for a question with an ending of so many tokens."""
        import torch

        other = copy.copy(self)
        other.ending = ending
        if list(rows) != list(range(all_rows)):
            other._cache = _copied(self._cache)
            for layer in other._cache.layers:
                layer.reorder_cache(torch.tensor(rows))
            if (begun := self._positions) is not None and begun.shape[-2] > 1:
                other._positions = begun[..., list(rows), :]
        return other

    def _compute(self, model: Any, input_ids: torch.Tensor, arguments: Mapping[str, Any]) -> None:
        tokens = input_ids.shape[1] - self.ending
        cut = {
            name: value[..., :tokens] if name in PER_ROW and value is not None else value
            for name, value in arguments.items()
        }
        inputs = model.prepare_inputs_for_generation(input_ids[:, :tokens], is_first_iteration=True, **cut)
        cache = model(**inputs, return_dict=True).past_key_values
        positions = arguments.get("position_ids")
        self._positions = None if positions is None else positions[..., : tokens + 1]
        self._cache = cache


def _copied(cache: Any) -> Any:
    """A cache that goes on by itself. Keys and values are not copied: a layer replaces them when it grows.

    The states of linear attention and of convolutions are overwritten in place, so these are copied.
    """
    import torch

    twin = copy.copy(cache)
    twin.layers = []
    for layer in cache.layers:
        own = copy.copy(layer)
        for name, states in vars(layer).items():
            if isinstance(states, dict):
                copies = {
                    key: state.clone() if isinstance(state, torch.Tensor) else state
                    for key, state in states.items()
                }
                setattr(own, name, copies)
        twin.layers.append(own)
    return twin


@dataclass
class SeenBatch:
    """A batch whose images the model has seen, for its further questions.

    question: the question that was asked. inputs: of it. text: those of its tensors that are text.
    """

    batch: Sequence[LoadedProperty]
    question: int
    inputs: ModelInputs
    text: Mapping[str, torch.Tensor]
    beginning: SharedBeginning

    @classmethod
    def begin(
        cls, batch: Sequence[LoadedProperty], question: int, inputs: ModelInputs, endings: Endings
    ) -> Self:
        """Before the model sees the images."""
        text = {name: inputs.tensors[name] for name in endings.tensors[question]}
        counts = ModelInputs(None, inputs.prompt_tokens, inputs.fitting)  # Without pixels.
        return cls(batch, question, counts, text, SharedBeginning(endings.tokens(question)))

    def asked(
        self, batch: Sequence[LoadedProperty], question: int, endings: Endings, longest: float
    ) -> tuple[ModelInputs, SharedBeginning] | None:
        """The inputs of another question for these properties; None where the model has not seen them all.

        longest: tokens of a prompt, at most.
        """
        from transformers import BatchFeature

        if not self.beginning.is_computed:
            return None
        more = endings.tokens(question) - endings.tokens(self.question)
        tokens_of = {
            id(loaded): tokens + more
            for loaded, tokens in zip(self.batch, self.inputs.prompt_tokens, strict=True)
        }
        seen = [id(loaded) for loaded in itertools.compress(self.batch, self.inputs.fitting)]
        if any(id(loaded) not in tokens_of for loaded in batch):
            return None
        tokens = [tokens_of[id(loaded)] for loaded in batch]
        fitting = [count <= longest for count in tokens]
        asked_ids = [id(loaded) for loaded in itertools.compress(batch, fitting)]
        row_of = {identity: row for row, identity in enumerate(seen)}
        if any(identity not in row_of for identity in asked_ids):
            return None
        rows = [row_of[identity] for identity in asked_ids]
        text = endings.exchanged(self.text, self.question, question)
        tensors = BatchFeature({name: tensor[rows] for name, tensor in text.items()}) if rows else None
        beginning = self.beginning.of_rows(rows, len(seen), endings.tokens(question))
        return ModelInputs(tensors, tokens, fitting), beginning
