"""description_model: one model a variant, trained to describe, resumed to the bit wherever it was killed.

Here are the asset, whose function is the story of a training, what decides a training's result, and how its
folder is published. The loop is in ``loop.py``.
"""

# No postponed annotations here: Dagster reads an asset's parameters from its real ones.

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import dagster as dg

from resources.alerts.alert import Alert
from resources.alerts.outbox import Outbox
from resources.dagster_names import NO_ATTEMPT
from resources.gpu import GpuResource
from resources.interrupts import interrupt_once
from sensors.dagster_internals.instance_needs import outlive_outages
from sensors.progress_judge import ProgressLimits
from vlm_assets.assets import markdown, property_catalog
from vlm_assets.assets.fingerprint import Fingerprint
from vlm_assets.assets.learned_labels import write_learned
from vlm_assets.assets.materialize import Metadata
from vlm_assets.assets.run_watch import (
    DeviceWait,
    end_if_paused,
    note_run,
    wait_for_store,
    wait_while_paused,
)
from vlm_assets.config.resource_settings import build_vision_language_model, control_state
from vlm_assets.config.settings import Settings
from vlm_catalog.catalog import Catalog
from vlm_durable.commands import command
from vlm_durable.files.files import make_directory, sha256_of
from vlm_durable.files.layout import AssetFolders, PartitionPaths
from vlm_durable.files.sealed_json import (
    FormatVersionError,
)
from vlm_durable.mirror.bucket import StoreAwayError, UnfitStoreError
from vlm_durable.mirror.mirror import Mirror
from vlm_durable.state.rate import Rate
from vlm_durable.state.withdrawing import being_withdrawn
from vlm_durable.state.workers import Phase, WorkerBeat, Workers
from vlm_durable.versions.versioned_object import PublishedError
from vlm_durable.wording import counted
from vlm_engine.devices.find import DeviceError
from vlm_engine.devices.leases import LeaseHolder, NoDeviceFreeError, WillBeFree
from vlm_engine.model_source import ModelSource, exact_revision
from vlm_engine.prompt import Prompt, build_prompt
from vlm_engine.protocol import EngineError
from vlm_engine.schema import load_schema
from vlm_training.checkpoints import Checkpoints, newest_state, step_in
from vlm_training.published_model import ASSET, PublishedModel
from vlm_training.rank import PLAN
from vlm_training.rank_processes import RankProcesses
from vlm_training.rank_watch import rank_limits
from vlm_training.training_data import learned_by_teachers, pull_data, training_samples
from vlm_training.training_plan import (
    SAMPLES,
    TrainingError,
    TrainingPlan,
    is_import_name,
    remove_training,
    write_samples,
)
from vlm_training.training_store import StoredCheckpoints, StoredModel
from vlm_training.variants import Variant, read_variants

HISTORY = "training.jsonl"
_TRAINING = "training"
"""The part of a fingerprint for the numbers and names in the file of variants."""
_REPORT_SECONDS = 30.0
_BEAT_SECONDS = 2.0
_LOCK_SECONDS = 15.0
"""How long to wait until the processes of a killed run are gone."""


def build_description_model(settings: Settings) -> dg.AssetsDefinition | None:
    """The asset; None without variants. Raises SettingsError."""
    variants = read_variants(settings)
    if not variants:
        return None
    names = settings.names

    @dg.asset(
        key=names.key(ASSET),
        partitions_def=dg.StaticPartitionsDefinition(list(variants)),
        deps=[names.key(property_catalog.ASSET)],
        required_resource_keys={names.name("gpu")},
        pool="gpu",
        group_name=names.name("properties"),
        kinds={"safetensors", "pytorch"},
        owners=settings.owner_list,
        tags=settings.tag_values,
        description=(
            "One describing model a variant of VLM_ASSETS_VARIANTS, trained on published descriptions,"
            " reviewed or true labels. Materialize resumes what was interrupted, to the bit; a complete"
            " variant is verified and left alone. VLM_ASSETS_MODEL=variant:NAME describes with it."
        ),
    )
    def description_model(context: dg.AssetExecutionContext) -> dg.MaterializeResult[None]:
        settings.name_in_commands()
        outlive_outages(context.instance)
        interrupt_once(context.run.run_id)
        gpu: GpuResource = names.resource(context, "gpu")
        name = context.partition_key
        wait_while_paused(context, control_state(settings))

        def with_store(do: Callable[[], list[str]], *title: str) -> None:
            for note in wait_for_store(context, settings, do, *title):
                context.log.warning(note)

        try:
            with_store(partial(pull_data, settings, variants[name]))
            work = TrainingWork.for_variant(settings, name, variants[name])
            lock = work.model.lock(_LOCK_SECONDS)
            if lock is None:
                raise TrainingError(
                    f"Variant {name} is being trained by another process, which holds"
                    f" {work.paths.publication_lock}. Wait for it, or end it; nothing was changed."
                )
            with contextlib.closing(lock), work.beat(context.run.run_id) as beat:
                work.refuse_withdrawn()
                with_store(work.pull)
                if work.is_complete():
                    with_store(work.push, "No store to publish in")
                    message = "Complete and unchanged: every file is as it was written. No device was needed."
                    context.log.info(message)
                    return dg.MaterializeResult(metadata=work.metadata(message))
                if warning := work.other_plans():
                    context.log.warning(warning)
                    observed = {"another plan": dg.MetadataValue.text(warning)}
                    context.log_event(
                        dg.AssetObservation(asset_key=context.asset_key, partition=name, metadata=observed)
                    )
                work.prepare()
                wait = DeviceWait(context, beat, control_state(settings))
                holder = LeaseHolder(context.run.run_id, name, ASSET, gpu.home)
                with work.devices(gpu, holder, context, wait) as devices:
                    ranks = RankProcesses(
                        folder=work.folder,
                        export=work.model.export,
                        history=work.history,
                        quarantine=work.paths.quarantine,
                        devices=devices,
                        lock=lock,
                        grace=settings.grace_seconds,
                        # A stuck rank is killed before the health sensor ends the whole run.
                        limits=rank_limits(
                            ProgressLimits(most=settings.stuck_seconds, loading=settings.model_load_seconds)
                        ),
                    )
                    with contextlib.closing(_EventHandler(context, settings, beat)) as handler:
                        for event in ranks.events():
                            handler.handle(event)
                if handler.finished is None:
                    raise TrainingError(f"The training of {name} ended without a word: start it again.")
                beat.enter(Phase.PUBLISHING)
                work.publish(handler.finished)
                with_store(work.push, "No store to publish in")
                return dg.MaterializeResult(metadata=work.metadata("Trained and published."))
        except (NoDeviceFreeError, StoreAwayError):
            note_run(context, NO_ATTEMPT)
            raise
        except (TrainingError, FormatVersionError, PublishedError, UnfitStoreError) as error:
            raise dg.Failure(str(error), allow_retries=False) from error

    return description_model


_STUCK = "no step in the time allowed; the run's page says what it was doing"
_SLOW = "slower than the other ranks for long; the run's page names its batch"
_AFTER_STUCK = (
    "Nothing for now: it is killed, and the training goes on from the last finished step with the ranks that"
    " remain. If it happens again on the same device, look at `nvidia-smi` and the kernel log; if a step"
    " does take that long, raise VLM_ASSETS_STUCK_SECONDS."
)
_AFTER_SLOW = "Look at its device: temperature, clocks, other users (`nvidia-smi`). The training goes on."


class _EventHandler:
    """Passes the events of the ranks on: to the run's page, its log, the heartbeat and the alerts."""

    def __init__(self, context: dg.AssetExecutionContext, settings: Settings, beat: WorkerBeat) -> None:
        self.finished: Mapping[str, Any] | None = None
        self._context, self._state, self._beat = context, control_state(settings), beat
        self._outbox = Outbox(self._state)
        self._reported = self._beaten = time.monotonic()
        self._first: tuple[float, int] | None = None

    def handle(self, event: Mapping[str, Any]) -> None:
        """Handle the next event. Raises TrainingError if the training refuses to go on."""
        now = time.monotonic()
        match event["event"]:
            case "restored":
                self._context.log.info(
                    f"Goes on at step {event['step']} of {event['steps']}"
                    f" ({counted(event['samples'], 'samples')},"
                    f" {counted(event['skipped'], 'batches')} skipped, start {event['starts']}), ranks:"
                    f" {event['ranks']}."
                    f" A checkpoint every {event['interval']} s: a failure in {event['mtbf']} s is expected."
                )
                self._observe(event)
                self._recovered(f"It goes on at step {event['step']}; its ranks: {event['ranks']}.")
                self._beat.resume(restored=event["step"])
                self._beat.enter(Phase.WORKING)
            case "step":
                self._step(event, now)
            case "starting" | "measuring" | "saving" | "restoring" | "evaluating":
                # No step can come meanwhile.
                self._beat.enter(Phase.LOADING)
            case "epoch":
                self._observe(event)
                self._beat.enter(Phase.WORKING)
            case "skipped" | "warning" | "slow" | "stuck" as kind:
                self._context.log.warning(event["message"])
                self._observe(event)
                if kind in ("slow", "stuck"):
                    self._alert(event, is_stuck=kind == "stuck")
                if kind in ("skipped", "stuck"):
                    self._beat.enter(Phase.WORKING if kind == "skipped" else Phase.LOADING)
            case "keeps pace":
                self._context.log.info(event["message"])
                self._recovered(event["message"], rank=event["rank"])
            case "refused":
                raise TrainingError(event["message"])
            case "finished":
                self.finished = event
        end_if_paused(self._context, self._state)

    def close(self) -> None:
        """Note that no rank runs any more, so that none is stuck or slow."""
        self._recovered("The run of the training has ended.")

    def _alert(self, event: Mapping[str, Any], *, is_stuck: bool) -> None:
        """Raise an alert about a rank. The training goes on if the alert cannot be written."""
        name, now = self._context.partition_key, time.time()
        alert = Alert(
            kind="rank_stuck" if is_stuck else "rank_slow",
            subject=f"{self._subjects}{event['rank']}",
            occurrence=f"{self._context.run.run_id}/{now}",
            severity="error" if is_stuck else "warning",
            title=f"Rank {event['rank']} of {ASSET} {name} on {event['device']} is {event['event']}",
            next_step=_AFTER_STUCK if is_stuck else _AFTER_SLOW,
            partition=name,
            # Without the ids of the batch: alerts stay when a property is withdrawn.
            actual=_STUCK if is_stuck else _SLOW,
            page=f"runs/{self._context.run.run_id}",
            at=now,
        )
        try:
            self._outbox.post_all([alert], once_while_open=True)
        except OSError as error:
            self._context.log.warning(f"No alert tells of it: {error}")

    def _recovered(self, sentence: str, *, rank: int | None = None) -> None:
        """Note that no rank, or not this one, is stuck or slow any more."""
        subjects = [f"{self._subjects}{rank}"]
        try:
            if rank is None:
                opened = self._outbox.open_subjects()
                subjects = [subject for subject in opened if subject.startswith(self._subjects)]
            self._outbox.note_recoveries(dict.fromkeys(subjects, sentence), at=time.time())
        except OSError as error:
            self._context.log.warning(f"Alerts of ranks stay open: {error}")

    @property
    def _subjects(self) -> str:
        return f"{ASSET}/{self._context.partition_key}/rank "

    def _step(self, event: Mapping[str, Any], now: float) -> None:
        self._first = self._first or (now, event["step"])
        if now - self._beaten >= _BEAT_SECONDS or event["step"] == event["steps"]:
            self._beaten = now
            self._beat.commit(event["step"])
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            since, step = self._first
            left = Rate(event["step"] - step, now - since).seconds_left([event["steps"] - event["step"]])
            time_left = "time left unknown" if left is None else f"{left:.0f} s left"
            self._context.log.info(
                f"Step {event['step']} of {event['steps']}, loss {event['loss']:.4f}, {time_left}."
            )

    def _observe(self, event: Mapping[str, Any]) -> None:
        values = {name: value for name, value in event.items() if name != "event" and value is not None}
        self._context.log_event(
            dg.AssetObservation(
                asset_key=self._context.asset_key, partition=self._context.partition_key, metadata=values
            )
        )


@dataclass
class TrainingWork:
    """The training of one variant: its plan, what decides its result, its folders. Plain Python.

    sequence: number of the next publication: one more than the highest number when this training began.
    labels: ids of the properties whose labels its known fields tell; None: of all.
    """

    settings: Settings
    name: str
    plan: TrainingPlan
    fingerprint: Fingerprint
    samples: tuple[Any, ...]
    sequence: int = 1
    labels: Container[str] | None = frozenset()

    @classmethod
    def for_variant(cls, settings: Settings, name: str, variant: Variant) -> Self:
        """The work of a variant. Raises TrainingError, CatalogError, SchemaError, ModelLoadError."""
        samples: list[Any] = []
        data = variant.data
        if not is_import_name(data):
            samples, data = training_samples(settings, variant)
        base = variant.base_model
        prompt, limits, parts = _parts_of_settings(settings, variant)
        fingerprint = Fingerprint({"base": _base_revision(settings, variant), "data": data, **parts})
        folder = _folders(settings).partition(name).journal(fingerprint.digest)
        copies = _copies(settings, folder)
        plan = TrainingPlan(
            variant=name,
            base=base,
            samples=data if is_import_name(variant.data) else str(folder / SAMPLES),
            schema=settings.description_schema,
            prompt=prompt.text,
            microbatches=variant.parts,
            copies=str(copies) if copies.keeps_copies else None,
            revision=None,
            trust_remote_code=settings.trust_remote_code,
            limits=limits,
            parts=dict(fingerprint.parts),
            **_values(variant),
            **variant.model_dump(include={"threads", "ranks", "workers", "evaluate", "checkpoint_seconds"}),
        )
        labels = learned_by_teachers(settings, variant) if variant.data == "descriptions" else None
        return cls(settings, name, plan, fingerprint, tuple(samples), labels=labels)

    @cached_property
    def model(self) -> PublishedModel:
        """The variant's published model."""
        return PublishedModel(_folders(self.settings), self.name)

    @property
    def paths(self) -> PartitionPaths:
        """The paths of the variant's files."""
        return self.model.paths

    @property
    def folder(self) -> Path:
        """The plan, the samples and the checkpoints: truth until the model is published."""
        return self.paths.journal(self.fingerprint.digest)

    @property
    def history(self) -> Path:
        """Its path: beside the model to come, or beside the checkpoints while an older model is published."""
        return (self.folder if self.model.record else self.model.folder) / HISTORY

    def beat(self, run_id: str) -> WorkerBeat:
        """The heartbeat of this training: its steps count as rows."""
        count = sum(not self.plan.is_held_out(sample.property_id) for sample in self.samples)
        steps = self.plan.steps or round((self.plan.epochs or 0) * count / self.plan.batch)
        workers = Workers(control_state(self.settings))
        return workers.begin(run_id=run_id, asset=ASSET, partition=self.name, expected=steps)

    def refuse_withdrawn(self) -> None:
        """Refuse to learn from withdrawn properties. A withdrawal that begins later sees the heartbeat.

        Raises TrainingError, CatalogError.
        """
        ids = {sample.property_id for sample in self.samples}
        is_under_way = being_withdrawn(control_state(self.settings)) is not None
        if is_under_way or (ids and len(Catalog.open(self.settings.home).ordinals_of(ids)) < len(ids)):
            raise TrainingError(
                f"Properties are being withdrawn, or were withdrawn while {self.name} was read. Finish"
                f" {command('withdraw')}, then start the variant again; nothing was changed."
            )

    @contextlib.contextmanager
    def devices(
        self,
        gpu: GpuResource,
        holder: LeaseHolder,
        context: dg.AssetExecutionContext,
        will_be_free: WillBeFree | None = None,
    ) -> Iterator[list[str]]:
        """The devices that each rank may see. Each rank on a GPU leases one while one is free.

        The first one is waited for: will_be_free as in ``GpuResource.lease``.
        """
        # Made first: after the lease of this process, this process sees only its own device.
        leases = gpu.leases(log=context.log)
        lease = gpu.lease(
            run_id=holder.run_id,
            partition=self.name,
            step=ASSET,
            log=context.log,
            will_be_free=will_be_free,
        )
        if lease.device.kind == "cpu":
            yield [""] * self.plan.ranks
            return
        with contextlib.ExitStack() as leased:
            devices = [lease.device.visible]
            for _ in range(self.plan.ranks - 1):
                try:
                    another = leased.enter_context(leases.acquire(holder, wait_seconds=0.0, log=context.log))
                except DeviceError as error:
                    context.log.warning(f"Going on with {len(devices)} of {self.plan.ranks} ranks: {error}")
                    break
                devices.append(another.device.visible)
            yield devices

    def other_plans(self) -> str:
        """Which models and steps of another plan exist, and what becomes of them; empty if there are none."""
        sentences = []
        record = self.model.record
        if record is not None and record["fingerprint"] != self.fingerprint.digest:
            changed = changed_parts(record["parts"], self.fingerprint.parts)
            sentences.append(
                f"The published model of {self.name} ({counted(record['step'], 'steps')}) is of another plan"
                f" ({', '.join(changed)} changed). It stays until the new one is complete, which takes its"
                f" place; then it is kept as {self.model.kept}."
            )
        for folder in sorted(self.paths.journals.glob("*")):
            is_published = record is not None and folder.name == record["fingerprint"]
            state = newest_state(folder / "checkpoints")
            if folder == self.folder or is_published or state is None:
                continue
            changed = changed_parts(begun_parts(folder), self.fingerprint.parts)
            sentences.append(
                f"{counted(state['step'], 'steps')} under another plan ({', '.join(changed)} changed) are"
                " left behind in"
                f" {folder}. Under that plan they go on; they are removed when the new model is published."
            )
        if sentences:
            state = newest_state(self.folder / "checkpoints")
            begins = "begins anew at step 0" if state is None else f"goes on at step {state['step']}"
            sentences.append(f"This training {begins}.")
        return " ".join(sentences)

    def prepare(self) -> None:
        """Write the files that the ranks read. The plan is written at each start: a home may have moved."""
        make_directory(self.folder)
        make_directory(self.model.folder)
        if self.samples:
            write_samples(Path(self.plan.samples), self.samples)
        self.plan.write(self.folder / PLAN)
        self.model.empty_export()

    def is_complete(self) -> bool:
        """Whether the published model is of this plan, and its files have their digests."""
        record = self.model.record
        if record is None or record["fingerprint"] != self.fingerprint.digest:
            return False
        return self.model.settle(record)

    def pull(self) -> list[str]:
        """Take over from the store what another machine finished: the model, or its newest checkpoint.

        Returns sentences that say what was done. Raises StoreError, FormatVersionError.
        """
        if not self.settings.mirror.keeps_copies:
            return []
        stored, _ = self._stored.record()
        local = self.model.record
        self.sequence = 1 + max(record["sequence"] if record else 0 for record in (local, stored))
        is_same = stored is not None and stored["fingerprint"] == self.fingerprint.digest
        if stored is not None and is_same and not stored.get("pending"):
            if local is not None and local["files"] == stored["files"] and self.is_complete():
                return []
            make_directory(self.model.folder)
            self.model.empty_export()
            if self._stored.pull(stored):
                self._publish(stored)
                return [f"The finished model was taken over from {self.settings.mirror}."]
        if self.is_complete():
            return []
        checkpoints = Checkpoints(self.folder / "checkpoints", self.paths.quarantine)
        newest = checkpoints.newest(damaged=None)
        copies = StoredCheckpoints(_copies(self.settings, self.folder))
        sentence = copies.pull(checkpoints, after=-1 if newest is None else step_in(newest.name))
        return [] if sentence is None else [sentence]

    def push(self) -> list[str]:
        """Put the finished model into the store. Raises StoreError, and TrainingError if it was overtaken."""
        self._stored.push()
        return []

    @property
    def _stored(self) -> StoredModel:
        return StoredModel(self.settings.mirror, self.model)

    def publish(self, finished: Mapping[str, Any]) -> None:
        """Put the model into place in one step, then write its record. The earlier model is kept."""
        shutil.copyfile(self.history, self.model.export / HISTORY)
        (self.model.export / "README.md").write_text(self._card(finished))
        is_held_out, labels = self.plan.is_held_out, self.labels
        trained = (sample.property_id for sample in self.samples if not is_held_out(sample.property_id))
        learned = (name for name in trained if labels is None or name in labels)
        write_learned(self.model.export, learned, Path(self.plan.base), made_of=self.fingerprint.digest)
        export = self.model.export
        names = sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())
        self._publish(
            {
                "sequence": self.sequence,
                "fingerprint": self.fingerprint.digest,
                "parts": dict(self.fingerprint.parts),
                "files": {name: sha256_of(export / name) for name in names},
                **{name: value for name, value in finished.items() if name not in ("event", "epochs")},
            }
        )

    def _publish(self, record: Mapping[str, Any]) -> None:
        """Publish the exported model, then remove trainings of this variant under other plans."""
        self.model.publish(record)
        # The last checkpoint of this training stays: it can make the model again.
        for other in self.paths.journals.glob("*"):
            if other != self.folder:
                with contextlib.suppress(OSError):
                    remove_training(other)

    def metadata(self, message: str) -> Metadata:
        """The metadata of a finished variant, for people."""
        record = self.model.record or {}
        figures = record.get("figures", {})
        shares = [(name, f"{share:.2%}") for name, share in figures.items()]
        right = (
            markdown.paragraphs(
                markdown.sentence(f"Of {record['asked']}:"),
                markdown.table(("field", "right"), shares, numbers=True),
            )
            if figures
            else markdown.Markdown("Not measured.")
        )
        return {
            "done": dg.MetadataValue.text(message),
            "path": dg.MetadataValue.path(str(self.model.folder)),
            "use it": dg.MetadataValue.text(f"VLM_ASSETS_MODEL=variant:{self.name}"),
            "metric": dg.MetadataValue.float(float(record.get("metric", 0.0))),
            "steps": dg.MetadataValue.int(int(record.get("step", 0))),
            "seconds": dg.MetadataValue.float(round(float(record.get("seconds", 0.0)), 1)),
            "starts": dg.MetadataValue.int(int(record.get("starts", 0))),
            "batches skipped": dg.MetadataValue.int(int(record.get("skipped", 0))),
            "right": markdown.metadata(right),
            "fingerprint": dg.MetadataValue.text(self.fingerprint.digest),
        }

    def _card(self, finished: Mapping[str, Any]) -> str:
        figures = "\n".join(f"- {name}: {value:.2%}" for name, value in finished["figures"].items())
        parts = "\n".join(f"- {name}: `{value}`" for name, value in self.fingerprint.parts.items())
        base = self.plan.base if is_import_name(self.plan.base) else ModelSource(self.plan.base).label
        return (
            "---\nlibrary_name: transformers\npipeline_tag: image-text-to-text\n---\n"
            f"# {self.name}\n\n"
            f"A model that describes properties, {finished['parameters'] / 1e6:.2f} million parameters,"
            f" trained from {base} in {counted(finished['step'], 'steps')}"
            f" ({counted(finished['samples'], 'samples')}) on"
            f" {counted(finished['train'], 'properties')}.\n"
            f"{counted(finished['held_out'], 'others')}, chosen by a hash of their ids, were never"
            f" trained on.\n\n"
            f"Metric at the end ({finished['epochs'][-1]['of']}): {finished['metric']:.6f}.\n"
            f"Batches skipped: {finished['skipped']}.\n\n"
            f"## Right, of {finished['asked']}\n\n{figures or 'Not measured.'}\n\n"
            f"## What decided the result\n\n{parts}\n\nWeights' base and data are named by their digests.\n"
        )


def changed_parts(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """The names of the changed parts of a fingerprint; for the file of variants, the names of its values."""
    names = [name for name in sorted(now) if name != _TRAINING and before.get(name) != now[name]]
    values, values_before = (json.loads(parts.get(_TRAINING, "{}")) for parts in (now, before))
    return names + [name for name in sorted(values) if values_before.get(name) != values[name]]


def begun_parts(folder: Path) -> Mapping[str, str]:
    """The parts of a begun training's fingerprint; empty if its plan has none."""
    try:
        parts: Mapping[str, str] = json.loads((folder / PLAN).read_bytes()).get("parts", {})
    except (OSError, ValueError):
        return {}
    return parts


def changed_settings(before: Mapping[str, str], settings: Settings, variant: Variant) -> list[str]:
    """As ``changed_parts``, without reading the data; empty if the parts of before are unknown.

    A base whose files cannot be read counts as unchanged. Raises SchemaError.
    """
    if not before:
        return []
    _, _, now = _parts_of_settings(settings, variant)
    with contextlib.suppress(EngineError, ValueError, OSError):
        now["base"] = _base_revision(settings, variant)
    return changed_parts(before, now)


def _base_revision(settings: Settings, variant: Variant) -> str:
    """The exact revision of the base model. Raises ModelLoadError."""
    base = variant.base_model
    source = ModelSource(base, None, settings.trust_remote_code, settings.state_directory / "models")
    return base if is_import_name(base) else exact_revision(source)


def _parts_of_settings(
    settings: Settings, variant: Variant
) -> tuple[Prompt, Mapping[str, Any], dict[str, str]]:
    """The prompt, the limits of images, and the parts of the fingerprint that the settings decide."""
    schema = load_schema(settings.description_schema)
    prompt = build_prompt(schema, settings.prompt)
    vision = build_vision_language_model(settings)
    limits = asdict(vision.limits) if vision.limits is not None else {}
    values = {**_values(variant), "microbatches": variant.parts, "threads": variant.threads}
    parts = {
        "schema": schema.digest,
        "prompt": prompt.digest,
        "images": json.dumps(limits, sort_keys=True),
        _TRAINING: json.dumps(values, sort_keys=True),
    }
    return prompt, limits, parts


def _values(variant: Variant) -> dict[str, Any]:
    """The numbers and names of the file of variants that decide the result."""
    own_parts = {"base", "data", "partitions", "microbatches", "threads"}
    without_effect = {"ranks", "workers", "evaluate", "checkpoint_seconds"}
    return variant.model_dump(exclude=own_parts | without_effect)


def _copies(settings: Settings, journal: Path) -> Mirror:
    """The folder of a training's checkpoints in the store."""
    return settings.mirror.below(str((journal / "checkpoints").relative_to(settings.home)))


def _folders(settings: Settings) -> AssetFolders:
    return settings.layout.asset(ASSET)
