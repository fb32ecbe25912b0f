"""Loading a model's parts through transformers' Auto classes, with errors as sentences for people.

Which files a model has is in model_source.py; transformers_engine.py generates.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from vlm_engine.model_source import (
    CONFIG,
    ModelSource,
    exact_revision,
    read_object,
    refuse_other_files,
)
from vlm_engine.protocol import ModelLoadError
from vlm_engine.transformers.attention import avoid_attention_with_plans
from vlm_engine.transformers.fast_images import made_fast

_log = logging.getLogger(__name__)

_REPORT_LEAKS = frozenset({"duckdb", "triton", "xgrammar"})
"""Modules that print their uncollected objects when the interpreter ends (nanobind's)."""

_NOT_IN_VLLM = frozenset({"bitsandbytes"})
"""Kinds of quantized weights that vLLM 0.32 does not load either."""

_PLAIN = "Take the model's plain weights"

_SCALES = (".weight_scale", ".weight_scale_inv")
"""Endings of names that only quantized weights have beside them, whatever the configuration says."""

_INSTALL_TORCHVISION = ".venv/bin/pip install -c constraints.txt -e '.[torchvision]'"


class _FreezeBefore:
    """A finder that finds nothing. It spares later garbage collections the objects of all imports so far.

    The process's last collection alone takes a second of a core. Later imports are still collected: triton,
    which transformers imports, prints uncollected objects on the screen.
    """

    def find_spec(self, name: str, *_: object) -> None:
        """Called before each import."""
        if name in _REPORT_LEAKS and not _REPORT_LEAKS & sys.modules.keys():
            gc.freeze()


@cache
def _import_transformers() -> None:
    """Import torch and the parts of transformers that every model needs, without garbage collections
    meanwhile.

    Modules stay in memory, and each collection would go through all of them again: 1.2 of 4.8 s of a core.
    """
    collecting, finder = gc.isenabled(), _FreezeBefore()
    gc.disable()
    sys.meta_path.insert(0, finder)
    try:
        import torch  # noqa: F401
        from transformers import AutoModel, AutoProcessor, PreTrainedModel  # noqa: F401
    finally:
        sys.meta_path.remove(finder)
        if collecting:
            gc.enable()


def load_processor(source: ModelSource) -> Any:
    """The processor (tokenizer, image processor, chat template) of a vision-language model.

    Images are processed by the family's PIL processor where it has one, whether torchvision is installed or
    not, with the operations of ``fast_images``: the same folder should answer alike on every machine. The
    part for videos is left out, and with it torchvision and num2words, which nothing else needs.
    """
    _import_transformers()
    with _loading(source, "processor") as arguments, _without_videos():
        from transformers import AutoImageProcessor, AutoProcessor
        from transformers.utils import is_torchvision_available

        processor = AutoProcessor.from_pretrained(source.location, **arguments)
        if is_torchvision_available() and hasattr(processor, "image_processor"):
            processor.image_processor = AutoImageProcessor.from_pretrained(
                source.location, backend="pil", **arguments
            )
        if hasattr(processor, "image_processor"):
            processor.image_processor = made_fast(processor.image_processor)
    for part in ("tokenizer", "image_processor"):
        if not hasattr(processor, part):
            raise ModelLoadError(
                f"model {source.name}: its processor has no {part}, so it cannot look at images"
            )
    if not getattr(processor, "chat_template", None):
        raise ModelLoadError(
            f"model {source.name}: it has no chat template, so nobody knows how to ask it; "
            "use the instruction-tuned variant, or add a chat_template.jinja to its folder"
        )
    return processor


class _NoVideos(dict[str, Any]):
    """Stands for the part for videos: empty, and a dictionary, because processors become JSON."""

    # Attributes that processors read when they are made: Qwen-VL, SmolVLM, MiniCPM-V.
    num_frames = fps = slice_mode = downsample_mode = None
    model_input_names: ClassVar[list[str]] = []

    @classmethod
    def from_pretrained(cls, *_: object, **__: object) -> _NoVideos:
        """Called on the class that transformers would load."""
        return cls()


@contextmanager
def _without_videos() -> Iterator[None]:
    """Load processors without the part for videos, for which alone most of them need torchvision."""
    from transformers import processing_utils
    from transformers.models.smolvlm import processing_smolvlm

    parts = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING
    processor = processing_utils.ProcessorMixin
    get_part, check_class = type(parts).__getitem__, processor.check_argument_for_proper_class
    num2words = processing_smolvlm.num2words

    def get_part_without_videos(self: Any, key: str) -> Any:
        return _NoVideos if key == "video_processor" else get_part(self, key)

    def check_class_without_videos(self: Any, name: str, part: Any) -> Any:
        return _NoVideos if isinstance(part, _NoVideos) else check_class(self, name, part)

    type(parts).__getitem__ = get_part_without_videos
    processor.check_argument_for_proper_class = check_class_without_videos
    processing_smolvlm.num2words = num2words or str
    try:
        yield
    finally:
        type(parts).__getitem__ = get_part
        processor.check_argument_for_proper_class = check_class
        processing_smolvlm.num2words = num2words


def load_config(source: ModelSource) -> Any:
    """The configuration of any model."""
    with _loading(source, "configuration") as arguments:
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(source.location, **arguments)


def load_model(source: ModelSource, auto_class: Any, *, device: str) -> Any:
    """The weights, in evaluation mode on ``device``: float32 on a CPU, bfloat16 on a GPU.

    Only safetensors files of the model's own folder or repository (see ``model_source``). Raises
    ModelLoadError, also where the files lack weights that the architecture has: transformers would fill them
    with noise.
    """
    _import_transformers()
    import torch

    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    _prepare_device(source, device)
    # Each tensor goes from its file to the device: the host never holds the whole model.
    straight = {} if device == "cpu" else {"device_map": device}
    with _loading(source, "weights") as arguments, _nothing_unpickled():
        refuse_other_files(source.name, lambda name: _json_file(source, name, arguments))
        _refuse_quantized(source, _json_file(source, CONFIG, arguments) or {})
        model, report = auto_class.from_pretrained(
            source.location,
            use_safetensors=True,
            dtype=dtype,
            output_loading_info=True,
            **straight,
            **arguments,
        )
        _refuse_incomplete(source, model, report)
        return model.eval()


def load_sentence_transformer(source: ModelSource, folder: Path, *, device: str) -> Any:
    """A text embedder by sentence-transformers, in the number format that its files say.

    folder: its files, which ``sentence_modules`` has accepted. Nothing else is read, also not from the hub.
    Raises ModelLoadError, also where weights are missing. The import takes seconds, so only an embedder of
    this kind calls it.
    """
    _import_transformers()
    _prepare_device(source, device)
    _refuse_quantized(source, read_object(folder, CONFIG) or {})
    with _loading(source, "embedding model"), _nothing_unpickled(), _no_weights_missing(source):
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(
            str(folder),
            device=device,
            trust_remote_code=source.trust_remote_code,
            local_files_only=True,
            model_kwargs={"use_safetensors": True},
        )
        return model.eval()


def _prepare_device(source: ModelSource, device: str) -> None:
    """Set torch up for a GPU. Raises ModelLoadError where this torch cannot use one."""
    import torch

    if device == "cpu":
        return
    if torch.version.cuda is None and torch.version.hip is None:
        raise ModelLoadError(
            f"model {source.name}: the leased device is a GPU, and torch {torch.__version__} is built for"
            " CPUs alone. Install the CUDA build of the version in constraints.txt into .venv, or set"
            " VLM_ASSETS_DEVICES=cpu."
        )
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        # Too old a driver, a fabric manager that does not run, a GPU that fell off the bus.
        raise ModelLoadError(
            f"model {source.name}: CUDA does not answer torch {torch.__version__}:"
            f" {' '.join(str(error).split())[:300]} Nothing was described. Look at `nvidia-smi` and the"
            " kernel log; a driver older than torch's build must be updated."
        ) from error
    avoid_attention_with_plans()


def release_memory(device: str) -> None:
    """Give back memory that nobody holds any more: a GPU's, and the host's that was pinned for it.

    After an error of the device this fails too. That is logged and not raised, so that the caller sees the
    first error.
    """
    gc.collect()
    if device == "cpu":
        return
    import torch

    try:
        torch.cuda.empty_cache()
        empty_host_cache()
    except RuntimeError as error:
        _log.warning("The memory of the device could not be given back: %s", error)


def empty_host_cache() -> None:
    """Give back the host's memory that torch keeps pinned and nobody uses."""
    import torch

    # torch 2.11 has it under another name.
    empty = getattr(torch.accelerator, "empty_host_cache", None) or getattr(
        torch._C, "_host_emptyCache", None
    )
    if empty is not None:
        empty()


def refuse_what_vllm_does_not_load(source: ModelSource) -> None:
    """Raise ModelLoadError for quantized weights that vLLM would refuse, minutes after its start."""
    method = _quantization(read_json(source, CONFIG) or {})
    if method in _NOT_IN_VLLM:
        raise ModelLoadError(
            f"model {source.name}: its weights are quantized ({method}), and vLLM does not load such ones."
            f" {_PLAIN}, or ones that are quantized as AWQ, GPTQ or FP8."
        )


def _quantization(config: Mapping[str, Any]) -> str | None:
    """How a configuration says that the weights are quantized; None where it does not."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]  # such as text_config
    quantized = (part["quantization_config"] for part in parts if part.get("quantization_config"))
    return next((str(quantization.get("quant_method")) for quantization in quantized), None)


def _refuse_quantized(source: ModelSource, config: Mapping[str, Any]) -> None:
    if method := _quantization(config):
        _refuse_number_format(source, method)


def _refuse_number_format(source: ModelSource, method: str) -> NoReturn:
    way = ", or, for the describing model, describe with vLLM (`make vllm`, VLM_ASSETS_ENGINE=server)"
    raise ModelLoadError(
        f"model {source.name}: its weights are quantized ({method}), and in the run's own process only plain"
        f" ones are loaded. {_PLAIN}{'' if method in _NOT_IN_VLLM else way}."
    )


@contextmanager
def _no_weights_missing(source: ModelSource) -> Iterator[None]:
    """Meanwhile refuse any model whose files lack weights. Its pooler is not used, so that may lack."""
    from transformers import PreTrainedModel

    load = PreTrainedModel.__dict__["from_pretrained"]

    def load_complete(model_class: Any, *args: Any, **kwargs: Any) -> Any:
        model, report = load.__func__(model_class, *args, **{**kwargs, "output_loading_info": True})
        _refuse_incomplete(source, model, report, unused="pooler.")
        return model

    PreTrainedModel.from_pretrained = classmethod(load_complete)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load


def _refuse_incomplete(source: ModelSource, model: Any, report: Any, *, unused: str | None = None) -> None:
    lacking = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    lacking = [key for key in lacking if unused is None or not key.startswith(unused)]
    if lacking:
        raise ModelLoadError(
            f"model {source.name}: its files lack {len(lacking)} of the weights of "
            f"{type(model).__name__}, first {', '.join(lacking[:3])}; they are incomplete or another's"
        )
    if any(key.endswith(_SCALES) for key in report["unexpected_keys"]):
        _refuse_number_format(source, "by scales beside them")


def read_json(source: ModelSource, name: str) -> Any:
    """The content of a model's JSON file, from its folder or from the hub; None where it has none."""
    with _loading(source, name) as arguments:
        return _json_file(source, name, arguments)


def _json_file(source: ModelSource, name: str, arguments: dict[str, Any]) -> Any:
    """The content of a model's JSON file, from its folder or from the hub; None where it has none."""
    from transformers.utils import cached_file

    options = {key: value for key, value in arguments.items() if key != "trust_remote_code"}
    path = cached_file(source.location, name, _raise_exceptions_for_missing_entries=False, **options)
    return None if path is None else json.loads(Path(path).read_bytes())


@contextmanager
def _nothing_unpickled() -> Iterator[None]:
    """Refuse ``torch.load`` meanwhile, whichever part of transformers calls it: a pickle can run code."""
    import torch

    def refuse(*_: object, **__: object) -> None:
        raise ModelLoadError("weights that are not in the safetensors format are not loaded")

    allowed = torch.load
    torch.load = refuse
    try:
        yield
    finally:
        torch.load = allowed


@contextmanager
def _loading(source: ModelSource, part: str) -> Iterator[dict[str, Any]]:
    """The arguments for ``from_pretrained``; what it raises becomes a ModelLoadError."""
    import transformers

    arguments: dict[str, Any] = {"trust_remote_code": source.trust_remote_code}
    if source.folder is not None:
        arguments["local_files_only"] = True
    else:
        arguments["revision"] = exact_revision(source)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    bars = transformers.logging.is_progress_bar_enabled()
    transformers.logging.disable_progress_bar()
    try:
        yield arguments
    except (ModelLoadError, MemoryError):
        raise
    except Exception as error:  # transformers raises nearly anything here.
        raise ModelLoadError(_sentence(source, part, error)) from error
    finally:
        transformers.logging.set_verbosity(verbosity)
        if bars:
            transformers.logging.enable_progress_bar()


def _sentence(source: ModelSource, part: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    start = f"model {source.name}: its {part} cannot be loaded"
    if "torchvision" in " ".join(_chain(error)).lower():
        return f"{start}{_torchvision_sentence(text)}"
    if "trust_remote_code" in text:
        return (
            f"{start} without running Python code that comes with the model; read that code, and if you want "
            "it, set VLM_ASSETS_TRUST_REMOTE_CODE=true"
        )
    return f"{start}: {type(error).__name__}: {text[:500]}"


def _torchvision_sentence(text: str) -> str:
    try:
        installed = version("torchvision")
    except PackageNotFoundError:
        return f" without torchvision; install it with `{_INSTALL_TORCHVISION}`"
    return (
        f"; torchvision {installed} may not fit torch {version('torch')}: take it out with "
        f"`.venv/bin/pip uninstall torchvision`, and install what fits with `{_INSTALL_TORCHVISION}`"
        f" ({text[:300]})"
    )


def _chain(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__
