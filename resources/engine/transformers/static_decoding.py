"""Steps with a cache of fixed size, each launched as one recording: the other way to step a model.

What lives here: sizes that shrink as answers finish and grow as they become longer, and when a model is
stepped with a growing cache after all. What does not: the loop and the prompt (greedy_decoding.py), the
memory (static_cache.py), what a step reads and writes (static_step.py), recording (step_recording.py). The
prompt is computed as ever, into a cache that grows, and moves from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from resources.engine.transformers.attention import MASKED
from resources.engine.transformers.greedy_decoding import PER_ROW, GrowingSteps, Process, Steps, can_select
from resources.engine.transformers.static_cache import Size, StaticMemory, rung_of_length, rung_of_rows
from resources.engine.transformers.static_step import StaticStep
from resources.engine.transformers.step_recording import RecordingError, Step, StepRecorder, out_of_memory

if TYPE_CHECKING:
    import torch

    from resources.engine.transformers.answers_so_far import AnswersSoFar

Decoding = Literal["dynamic", "static", "compiled"]

_TOKENS_AHEAD: Final = 64
"""Tokens that a size has room for when it is chosen, at least: to move again soon costs more."""

_MOST_STEPS: Final = 32
"""Steps of different sizes that are kept, with their recordings: some MiB each."""

_COMPARED: Final = 2
"""Steps of each size that are computed both ways."""

_UNLIKE: Final = 0.1
"""Of the length of the logits: bfloat16's rounding is a tenth of that, another step's are ten times that."""

_log = logging.getLogger(__name__)


class Recorder(Protocol):
    """Records steps. See StepRecorder."""

    def recorded(self, step: Step) -> Step:
        """The same step from a recording."""

    def restart(self) -> None:
        """All recordings were let go."""


def static_decoding(
    model: Any, decoding: Decoding, *, device: Literal["cpu", "cuda"]
) -> StaticDecoding | None:
    """What begins the steps of a model's batches; None where its cache grows."""
    if decoding == "dynamic":
        return None
    return StaticDecoding(
        model,
        recorder=StepRecorder() if device == "cuda" else None,
        compiler=compiled if decoding == "compiled" else None,
    )


def compiled(forward: Any) -> Any:
    """A model's forward, compiled once for all sizes. Needs a C compiler, and a minute at the first step."""
    import torch

    return torch.compile(forward, dynamic=True)


class StaticDecoding:
    """Begins the steps of each batch of one model, and keeps memory and recordings from batch to batch.

    recorder: None launches each step kernel by kernel. compiler: None takes the model's forward as it is.
    """

    def __init__(
        self,
        model: Any,
        *,
        recorder: Recorder | None,
        compiler: Callable[[Any], Any] | None = None,
    ) -> None:
        self._model = model
        self._compiled = None if compiler is None else compiler(model.__call__)
        self._recorder = recorder
        self._steps: dict[Size, StaticStep] = {}
        self.memory = StaticMemory(before_moving=self._forget_steps)
        self._told: set[str] = set()
        self._refusal = _refusal(model)

    def begin(self, model: Any, state: dict[str, Any], answers: AnswersSoFar) -> Steps:
        """The steps after a prompt. See greedy_decoding.Begin."""
        refusal = self._refusal or _refusal_of_state(model, state, answers)
        if refusal is not None:
            self._tell(f"answers are decoded with a growing cache: {refusal}")
            return GrowingSteps(model, state, answers)
        return _StaticSteps(self, model, state)

    def free(self) -> None:
        """Give all memory back; it is taken again when it is needed."""
        self._forget_steps()
        self.memory = StaticMemory(before_moving=self._forget_steps)

    def step(self, size: Size) -> StaticStep:
        """The step of this size, over the memory as it is arranged now."""
        step = self._steps.pop(size, None) or StaticStep(
            self._compiled or self._model, self.memory.layers(), window=_window(self._model)
        )
        while len(self._steps) >= _MOST_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[size] = step
        return step

    def launch(self, step: StaticStep) -> torch.Tensor:
        """The logits of a step. It is compiled and recorded the first time that it runs.

        The first steps of each size are also computed as they are: what says other logits is not used again.
        Two, for a recording that does not see what it is given says the right ones once.
        """
        if step.launch is None:
            if self._compiled is not None:
                self._compile(step)
            step.launch = step.run
            if self._recorder is not None:
                try:
                    step.launch = self._recorder.recorded(step.run)
                except RecordingError as error:
                    self._tell(f"steps are launched kernel by kernel, for they cannot be recorded: {error}")
                    self._recorder = None
        # The step says it: one that was recorded is compared, though no other can be recorded any more.
        plain = step.launch == step.run and step.forward is self._model
        if plain or step.compared == _COMPARED:
            return step.launch()
        found = step.launch()
        expected = step.run(self._model)  # last, for what it leaves in the cache is right
        if _alike(found, expected):
            step.compared += 1
        else:
            self._tell("steps are launched kernel by kernel: compiled or recorded they said something else")
            self._recorder = self._compiled = None
            for one in self._steps.values():
                one.forward, one.launch = self._model, one.run
        return expected

    def _compile(self, step: StaticStep) -> None:
        import torch

        try:
            step.run()
        except Exception as error:  # a compiler fails in any way; what is wrong beside it fails again
            if out_of_memory(error) or isinstance(error, torch.AcceleratorError):
                raise
            self._tell(f"the model is not compiled: {type(error).__name__}: {str(error)[:300]}")
            self._compiled, step.forward = None, self._model

    def _forget_steps(self) -> None:
        self._steps.clear()
        if self._recorder is not None:
            self._recorder.restart()

    def _tell(self, what: str) -> None:
        if what not in self._told:
            _log.warning("Of VLM_ASSETS_DECODING as it is set: %s.", what.rstrip("."))
        self._told.add(what)


class _StaticSteps:
    """Steps one batch. state: what the model keeps, as it was when rows were last moved."""

    def __init__(self, decoding: StaticDecoding, model: Any, state: dict[str, Any]) -> None:
        self._decoding = decoding
        self._model = model
        self._state = state
        self._size = Size(0, 0)
        self._said = 0
        self._step: StaticStep | None = None

    def go_on(self, answers: AnswersSoFar, process: Process) -> None:
        """See Steps."""
        place = answers.computed.shape[1] - 1  # of the last token: all before it are in the cache
        size = self._size_for(len(answers.open), place)
        step = self._step
        if step is None or size != self._size:
            self._step = step = self._moved(answers, size, place)
        else:
            step.go_on(answers.computed[:, -1])
        answers.choose(self._decoding.launch(step)[: len(answers.rows)], process)

    def _size_for(self, rows: int, place: int) -> Size:
        rows = rung_of_rows(rows)
        if place < self._size.length:
            return Size(min(rows, self._size.rows), self._size.length)
        return Size(rows, rung_of_length(place + _TOKENS_AHEAD))

    def _moved(self, answers: AnswersSoFar, size: Size, place: int) -> StaticStep:
        """A step of this size, with the open rows in it."""
        import torch

        model, memory = self._model, self._decoding.memory
        self._step = None  # Nothing may point into memory that is moved.
        kept = answers.leave_the_open()
        # Rows that nobody asked for are copies of the last one: what they compute is sound, and dropped.
        kept = torch.cat([kept, kept[-1:].expand(size.rows - len(kept))])
        cache = self._state.pop("past_key_values", None)
        if cache is not None:
            memory.take_over(cache, kept, size, place)
        else:
            memory.rearrange(kept, size, place)
            # What a growing cache's loop does after each step.
            self._state = model._update_model_kwargs_for_generation(
                {}, self._state, num_new_tokens=answers.said - self._said
            )
        for name in PER_ROW & self._state.keys():
            if (value := self._state[name]) is not None:
                self._state[name] = _rows(value, kept)
        self._size, self._said = size, answers.said
        tokens = answers.computed
        tokens = torch.cat([tokens, tokens[-1:].expand(size.rows - len(tokens), -1)])
        step = self._decoding.step(size)
        step.begin(
            place,
            lambda cache: model.prepare_inputs_for_generation(
                tokens, next_sequence_length=1, past_key_values=cache, **self._state
            ),
        )
        return step


def _alike(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits are the same but for rounding. Asks the device."""
    unlike = (found.float() - expected.float()).norm() / expected.float().norm()
    return bool(unlike < _UNLIKE)  # not where it is no number


def _rows(value: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """These rows of a tensor [..., rows, tokens], whose one row may stand for all."""
    if value.shape[-2] > 1:
        return value.index_select(-2, kept)
    return value.expand(*value.shape[:-2], len(kept), value.shape[-1])


def _window(model: Any) -> int | None:
    """Tokens that a layer with a window looks back on, itself included."""
    window: int | None = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
    return window


def _refusal(model: Any) -> str | None:
    """Why a model cannot be stepped with a cache of fixed size; None where it can."""
    name = type(model).__name__
    text = model.config.get_text_config(decoder=True)
    unknown = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown or getattr(text, "attention_chunk_size", None) is not None:
        return f"{name} has layers of another kind ({', '.join(sorted(unknown)) or 'chunked_attention'})"
    # transformers' own mark of what it steps like that; a vision part alone may lack it.
    if not any(getattr(one, "_can_compile_fullgraph", False) for one in (model, model.get_decoder())):
        return f"transformers does not step {name} with a cache of fixed size"
    if text._attn_implementation not in MASKED:
        return f"it cannot be masked for {text._attn_implementation}"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return f"{name} is spread over several devices"
    return None


def _refusal_of_state(model: Any, state: Mapping[str, Any], answers: AnswersSoFar) -> str | None:
    """The same of what a model keeps from step to step, and asks for in each."""
    import torch

    if not can_select(state, len(answers.rows)):
        return f"{type(model).__name__} keeps more than keys and values from step to step"
    given = model.prepare_inputs_for_generation(answers.computed, next_sequence_length=1, **state)
    tensors = {name for name, value in given.items() if isinstance(value, torch.Tensor)}
    if other := tensors - PER_ROW - {"input_ids"}:
        return f"{type(model).__name__} asks for {', '.join(sorted(other))} in each step"
    if "position_ids" not in tensors:
        return f"{type(model).__name__} counts positions by itself"
    return None
