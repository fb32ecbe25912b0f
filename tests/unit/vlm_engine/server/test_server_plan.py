"""Command and environment of a model server: what is filled in, what is left out, what makes two the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from vlm_engine.devices.find import Device, GpuReading, find_devices
from vlm_engine.protocol import ImageTokens, ModelLoadError
from vlm_engine.server.server_plan import (
    VLLM_COMMAND,
    ServerPlan,
    answering_arguments,
    server_environment,
    variable_digests,
)

GPU = Device("GPU-a", "cuda", "A100", 80 << 30, "GPU-a")
CPU = find_devices("cpu:1", {})[0]
PLAN = ServerPlan(VLLM_COMMAND, "owner/a model", "abc123", "abc123")


def test_the_default_command_is_vllms() -> None:
    """The documented default starts vLLM on loopback, at the port chosen, with the revision pinned."""
    assert PLAN.arguments(port=8123)[:9] == [
        "vllm", "serve", "owner/a model", "--revision", "abc123", "--host", "127.0.0.1", "--port", "8123",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("s {model} --revision {revision} --port {port}", ["s", "owner/a model", "--port", "1"]),
        ("s --revision={revision} --port={port}", ["s", "--port=1"]),
        ("s {revision} '{\"image\": 12}' {port}", ["s", '{"image": 12}', "1"]),
    ],
)
def test_what_has_no_revision_goes_without_its_option(command: str, arguments: list[str]) -> None:
    """A local folder has no revision: option and value are left out; JSON in an option is no placeholder."""
    assert replace(PLAN, command=command, revision=None).arguments(port=1) == arguments


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("s {port} {modle}", r"knows no \{modle\}; its placeholders are \{model\}, \{revision\}"),
        ("s --port 8000", r"must take its port from \{port\}"),
        ("", r"must take its port from \{port\}"),
        ("s 'open {port}", "No closing quotation"),
        ("s --port {port} --served-model-name house", "without --served-model-name: .* by {model}"),
        ("s --port {port} --api-key=secret", "without --api-key: each start gets a random key"),
    ],
)
def test_a_wrong_template_is_named(command: str, said: str) -> None:
    """A template that cannot be used ends before anything starts, with what to write instead."""
    with pytest.raises(ModelLoadError, match=said):
        replace(PLAN, command=command).arguments(port=1)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "owner/another"},
        {"revision": "def456"},
        {"exact": "other weights"},
        {"command": f"{VLLM_COMMAND} --dtype float32"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_model_or_argument_makes_another_server(change: dict[str, str]) -> None:
    """What changes the answers changes the digest by which a living server is adopted."""
    assert replace(PLAN, **change).digest != PLAN.digest  # type: ignore[arg-type]


def test_patience_does_not_make_another_server() -> None:
    """Waiting longer is no reason to load a model anew."""
    assert replace(PLAN, idle_seconds=1.0, start_seconds=1.0, grace_seconds=1.0).digest == PLAN.digest


@pytest.mark.parametrize(
    "added",
    [
        "--gpu-memory-utilization 0.7 --max-num-seqs=64",
        "--allowed-local-media-path '/srv/my images' --disable-log-requests",
        "-tp 2 --enforce-eager --port 8123",
    ],
)
def test_room_and_places_change_no_fingerprint(added: str) -> None:
    """More memory, another port or folder, and finished work stays finished."""
    assert answering_arguments(f"{VLLM_COMMAND} {added}") == answering_arguments(VLLM_COMMAND)


def test_options_for_speed_change_no_fingerprint() -> None:
    """What the default command means stays what it was: an update makes no finished partition stale."""
    assert answering_arguments(VLLM_COMMAND) == [
        "vllm", "serve", "{model}", "--revision", "{revision}", "--max-model-len", "{context}",
        "--mm-processor-kwargs", "{processor_options}",
        "--limit-mm-per-prompt", '{"image": {images}, "video": 0}',
        "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
    ]  # fmt: skip


def test_place_of_the_program_changes_no_fingerprint() -> None:
    """The same server from another environment is the same server."""
    moved = VLLM_COMMAND.replace("vllm", "/opt/servers/bin/vllm", 1)
    assert answering_arguments(moved) == answering_arguments(VLLM_COMMAND)


@pytest.mark.parametrize(
    "added",
    [
        "--quantization fp8",
        "--dtype float16",
        "--enforce-eager --quantization fp8",
        "--mm-processor-kwargs '{\"max_pixels\": 50176}'",
        "--chat-template other.jinja",
        "--some-option-of-tomorrow",
        "--disable-log-requests fp8",
    ],
)
def test_whatever_may_change_an_answer_counts(added: str) -> None:
    """Each of these arguments may change an answer, so it changes the fingerprint of the rows."""
    assert answering_arguments(f"{VLLM_COMMAND} {added}") != answering_arguments(VLLM_COMMAND)


def test_word_after_a_flag_counts() -> None:
    """A flag takes no value: the model named after it is the model, wherever the flag stands."""
    assert answering_arguments("vllm serve --enforce-eager {model}") == ["vllm", "serve", "{model}"]
    assert answering_arguments("vllm --port {port} serve {model}") == ["vllm", "serve", "{model}"]


COSTS = ImageTokens(
    each=400,
    text=200,
    images=12,
    fitting=12,
    pixels=1 << 20,
    context=8192,
    options={"size": {"longest_edge": 512}},
)


def on(device: Device, costs: ImageTokens | None = COSTS, *, beside: int = 0, cores: int = 16) -> list[str]:
    """The default command's words for a property of twelve images on this device."""
    plan = replace(PLAN, images=12).for_device(
        device, costs, answer_tokens=1024, beside_bytes=beside << 30, cores=cores
    )
    return plan.arguments(port=1)


def after(option: str, words: list[str]) -> str | None:
    return words[words.index(option) + 1] if option in words else None


def test_a_server_is_told_what_all_images_of_a_property_take() -> None:
    """Its context holds prompt, all images and the longest answer; it shows them as large as was chosen."""
    words = on(GPU)
    assert 200 + 12 * 400 + 1024 <= int(after("--max-model-len", words) or 0) <= 8192
    assert after("--mm-processor-kwargs", words) == '{"size": {"longest_edge": 512}}'
    assert after("--limit-mm-per-prompt", words) == '{"image": 12, "video": 0}'
    assert after("--mm-processor-cache-gb", words) == "0"
    assert after("--max-model-len", on(GPU, replace(COSTS, context=6000))) == "6000"
    unknown = on(GPU, None)
    assert "--max-model-len" not in unknown
    assert "--mm-processor-kwargs" not in unknown
    assert "--mm-processor-kwargs" not in on(GPU, replace(COSTS, options={}))


@pytest.mark.parametrize(
    ("device", "beside", "share"),
    [
        (GPU, 0, "0.92"), (GPU, 16, "0.77"), (replace(GPU, memory_bytes=24 << 30), 2, "0.83"),
        (replace(GPU, memory_bytes=None), 16, "0.85"), (CPU, 16, "0.30"),
    ],
)  # fmt: skip
def test_a_server_leaves_memory_for_the_embedder(device: Device, beside: int, share: str) -> None:
    """The model that embeds loads beside the server, which else takes nearly all of the device."""
    assert after("--gpu-memory-utilization", on(device, beside=beside)) == share


def test_two_models_that_do_not_fit_are_refused_by_name() -> None:
    """An embedder that leaves too little for the server is named before anything is started."""
    with pytest.raises(ModelLoadError, match=r"8 GiB, and the embedding model .* set VLM_ASSETS_EMBEDDING"):
        on(replace(GPU, memory_bytes=8 << 30), beside=5)


def test_vllm_on_a_mig_instance_is_refused_by_name() -> None:
    """It would look the instance up as a whole GPU, and fail or read another's; other servers may do."""
    instance = Device("MIG-a", "cuda", "A100 MIG", None, "MIG-a")
    with pytest.raises(ModelLoadError, match=r"MIG-a is a MIG instance.*ENGINE=transformers"):
        on(instance)
    other = replace(PLAN, command="sglang --port {port}")
    assert other.for_device(instance, None, answer_tokens=1, beside_bytes=0, cores=1).arguments(port=1)


@pytest.mark.parametrize("program", ["bin/vllm serve", "bin/python -u -m vllm.entrypoints.openai.api_server"])
def test_vllm_for_cpus_on_a_gpu_is_refused_by_name(tmp_path: Path, program: str) -> None:
    """It would hold a leased GPU and compute on the CPU, however it is called; on a CPU slot it does."""
    (tmp_path / "cpu-0.32.0").touch()
    plan = replace(PLAN, command=f"{tmp_path}/{program} {{port}}")
    with pytest.raises(ModelLoadError, match=r"GPU-a is a GPU, .* build for CPUs \(cpu-0.32.0\).*make vllm"):
        plan.for_device(GPU, None, answer_tokens=1, beside_bytes=0, cores=1)
    assert plan.for_device(CPU, None, answer_tokens=1, beside_bytes=0, cores=1).arguments(port=1)
    (tmp_path / "cpu-0.32.0").rename(tmp_path / "cuda-0.32.0")
    assert plan.for_device(GPU, None, answer_tokens=1, beside_bytes=0, cores=1).arguments(port=1)


@pytest.mark.parametrize(
    ("device", "tokens"),
    [
        (GPU, "16384"), (replace(GPU, memory_bytes=24 << 30), None), (replace(GPU, memory_bytes=None), None),
        (CPU, None),
    ],
)  # fmt: skip
def test_a_large_gpu_computes_many_tokens_of_prompts_at_once(device: Device, tokens: str | None) -> None:
    """A property has thousands of tokens; a small GPU has no room for more than vLLM's own choice."""
    words = on(device)
    assert after("--max-num-batched-tokens", words) == tokens
    assert "--no-enable-prefix-caching" in words


def test_several_questions_share_a_servers_prompts() -> None:
    """The cache of prompts is on only where a property is asked more than one question."""
    words = replace(PLAN, questions=2).arguments(port=1)
    assert "--enable-prefix-caching" in words
    assert "--no-enable-prefix-caching" not in words


def test_two_devices_share_images_and_not_each_image() -> None:
    """The layers that look at images are small: splitting each over two devices costs more than it saves."""
    assert "--mm-encoder-tp-mode" not in on(GPU)
    together = replace(PLAN, devices=2).arguments(port=1)
    assert after("--mm-encoder-tp-mode", together) == "data"


@pytest.mark.parametrize(
    ("cores", "at_once", "servers"), [(2, 1, "1"), (16, 1, "4"), (192, 1, "8"), (192, 8, "6"), (16, 8, "1")]
)
def test_requests_are_taken_apart_on_several_cores(cores: int, at_once: int, servers: str) -> None:
    """One process that cuts all images would starve the device; devices at work share the cores."""
    assert after("--api-server-count", on(replace(GPU, at_once=at_once), cores=cores)) == servers


def test_what_the_device_decides_makes_no_other_server() -> None:
    """The digest is known before the lease; another budget, prompt or embedder is another server."""
    there = PLAN.for_device(GPU, COSTS, answer_tokens=1024, beside_bytes=0, cores=4)
    assert there.digest == PLAN.digest
    for other in ({"images": 3}, {"question": "another"}, {"beside": "another"}, {"devices": 2}):
        assert replace(PLAN, **other).digest != PLAN.digest  # type: ignore[arg-type]


@dataclass
class Recorded:
    """What NVML said once."""

    answer: list[GpuReading]

    def readings(self) -> list[GpuReading]:
        """The recorded answer."""
        return self.answer


@pytest.mark.parametrize(
    ("device", "readings", "visible"),
    [
        (GPU, [GpuReading(0, "GPU-b", "A100"), GpuReading(3, "GPU-a", "A100")], "3"),
        (GPU, [], "GPU-a"),
        (Device("MIG-a", "cuda", "A100 MIG", None, "MIG-a"), [GpuReading(1, "MIG-a", "A100")], "MIG-a"),
        (Device("given-7-2", "cuda", "given", None, "2", given=True), [], "2"),
        (
            Device("GPU-a+GPU-b", "cuda", "2 x A100", None, "GPU-a,GPU-b"),
            [GpuReading(0, "GPU-b", "A100"), GpuReading(3, "GPU-a", "A100")],
            "3,0",
        ),
    ],
    ids=["listed", "not listed", "MIG", "given", "two together"],
)
def test_a_server_sees_its_gpu_alone(device: Device, readings: list[GpuReading], visible: str) -> None:
    """The leased GPU is all that the server sees; by number where that is known, which vLLM needs."""
    pinned = server_environment(device, {"PATH": "/bin"}, nvml=Recorded(readings))
    assert pinned == {
        "PATH": "/bin", "CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }  # fmt: skip


def test_the_users_choice_of_a_sampler_stays() -> None:
    """Without one, vLLM compiles nothing at its start."""
    own = {"VLLM_USE_FLASHINFER_SAMPLER": "1"}
    assert server_environment(GPU, own, nvml=Recorded([])).items() >= own.items()


def test_a_server_on_a_cpu_slot_is_bounded_as_the_engine_in_process() -> None:
    """A CPU slot hides every GPU and bounds the threads; our settings and secrets stay with us."""
    (slot,) = find_devices("cpu:1", {}, cores=8)
    ours = {"VLM_ASSETS_ALERT_TARGETS": "secret", "DAGSTER_HOME": "/home", "HF_HOME": "/cache"}
    assert server_environment(slot, ours) == {
        "HF_HOME": "/cache", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "4",
    }  # fmt: skip


def test_digests_of_the_environment_tell_no_secret_and_no_terminal() -> None:
    """They compare two environments, by one server's key alone; where it was started from changes nothing."""
    given = {"HF_TOKEN": "secret", "PATH": "/bin", "OMP_NUM_THREADS": "4"}
    kept = variable_digests(given | {"SSH_TTY": "/dev/pts/7", "SHLVL": "2"}, "key")
    assert kept.keys() == {"HF_TOKEN", "PATH"}
    assert kept == variable_digests(given | {"SHLVL": "3"}, "key")
    for other in (variable_digests(given | {"HF_TOKEN": "other"}, "key"), variable_digests(given, "another")):
        assert other["HF_TOKEN"] != kept["HF_TOKEN"]
    assert variable_digests({"A": "\udcff"}, "key"), "a value that is no text"
